"""Starts that do not come to their end."""

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torchere.serving import server as ports
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.errors import ServingError
from torchere.serving.server import Server, StopSignals, run


def settings_of(folder: Path, **changes: Any) -> ServerSettings:
    (folder / "store").mkdir()
    (folder / "temp").mkdir()
    port = Address(port=0)
    rest = {"inference_address": port, "management_address": port, "metrics_address": None}
    grpc = {"grpc_inference_address": port, "grpc_management_address": port}
    given: dict[str, Any] = {
        "model_store": folder / "store",
        "temp_dir": folder / "temp",
        "key_file": folder / "key_file.json",
        "system_metrics_enabled": False,
        **rest,
        **grpc,
        **changes,
    }
    return ServerSettings(**given)


def test_a_start_on_ports_that_are_taken_leaves_the_keys_of_the_server_there(tmp_path: Path) -> None:
    (tmp_path / "key_file.json").write_text("the running server's")
    with socket.create_server(("127.0.0.1", 0)) as running:
        taken = Address(port=running.getsockname()[1])
        for api in ("inference", "grpc_management"):
            folder = tmp_path / api
            folder.mkdir()
            settings = settings_of(folder, key_file=tmp_path / "key_file.json", **{f"{api}_address": taken})
            with pytest.raises(ServingError, match="Address already in use"):
                asyncio.run(Server(settings).start())
    assert (tmp_path / "key_file.json").read_text() == "the running server's"


def test_a_metric_that_can_not_be_declared_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text("model_metrics: {gauge: [{name: a b, unit: n, dimensions: []}]}")
    Server(settings_of(tmp_path, metrics_config=file))
    assert "a metric that metrics_config declares is dropped: a b: Prometheus allows" in caplog.text
    assert "Failed to load" not in caplog.text


def test_a_start_that_fails_waits_for_no_load_balancer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`drain_delay_s` is for clients, of which it has none; with it the suite's time limit would be over."""

    def taken_since(addresses: object) -> None:
        """Nobody was there when it looked."""

    monkeypatch.setattr(ports, "refuse_taken", taken_since)
    with socket.create_server(("127.0.0.1", 0)) as running:
        taken = Address(port=running.getsockname()[1])
        settings = settings_of(tmp_path, grpc_management_address=taken, drain_delay_s=3600.0)
        with pytest.raises(ServingError, match="Cannot listen"):
            asyncio.run(Server(settings).start())
    assert list((tmp_path / "temp").iterdir()) == []


@pytest.mark.parametrize("api", ["management_address", "grpc_management_address"])
def test_a_program_can_not_open_management_to_the_network_without_authorization(
    tmp_path: Path, api: str
) -> None:
    settings = settings_of(tmp_path, token_auth_enabled=False, **{api: Address("0.0.0.0")})

    async def main() -> None:
        server = Server(settings)
        await server.start()
        await server.stop()

    with pytest.raises(ServingError, match="Management would be open to the network"):
        asyncio.run(main())


def test_a_signal_while_an_archive_is_fetched_at_the_start_ends_the_server(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never_ending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf")
        asked.set()
        await reader.read()
        writer.close()

    async def main() -> int:
        source = await asyncio.start_server(never_ending, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{source.sockets[0].getsockname()[1]}/m.mar"
        settings = settings_of(tmp_path, load_models=(url,), allowed_urls=(url,))
        running = asyncio.ensure_future(run(settings))
        await asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        status = await asyncio.wait_for(running, 60)
        source.close()
        for _ in range(3000):  # a thread deletes the part, which a process would wait for at its end
            if not any((tmp_path / "store").iterdir()):
                break
            await asyncio.sleep(0.01)
        return status

    assert asyncio.run(main()) == 0
    assert list((tmp_path / "store").iterdir()) == []
    assert list((tmp_path / "temp").iterdir()) == []
    assert not (tmp_path / "key_file.json").exists()


@pytest.mark.parametrize(
    ("first", "second", "after_s", "ends"),
    [
        (signal.SIGTERM, signal.SIGTERM, 0.1, False),
        (signal.SIGTERM, signal.SIGTERM, 1.5, True),
        (signal.SIGINT, signal.SIGINT, 0.1, True),
        (signal.SIGTERM, signal.SIGINT, 0.1, True),
        (signal.SIGINT, signal.SIGTERM, 0.1, True),
    ],
)
def test_a_second_signal_ends_at_once_unless_it_is_a_sigterm_right_behind_another(
    first: int, second: int, after_s: float, ends: bool
) -> None:
    stop = asyncio.Event()
    times = iter((10.0, 10.0 + after_s))
    signals = StopSignals(stop, lambda: next(times, 0.0))
    signals.take(first)
    assert stop.is_set()
    if ends:
        with pytest.raises(SystemExit) as caught:
            signals.take(second)
        assert caught.value.code == 128 + second
    else:
        signals.take(second)


def test_a_workflow_of_the_settings_that_is_not_there_keeps_the_server_unready(tmp_path: Path) -> None:
    async def main() -> tuple[str, ...]:
        server = Server(settings_of(tmp_path, load_workflows=("flow.war",)))
        await server.start()
        reasons = server._dataplane.readiness().reasons
        await server.stop()
        return reasons

    assert asyncio.run(main()) == ("model flow could not be registered; the log says why",)


@pytest.mark.parametrize("waits_for", ["an archive", "pip"])
def test_while_the_start_waits_probes_are_answered_and_nothing_is_healthy(
    tmp_path: Path, waits_for: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = asyncio.Event()

    async def never_ending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    def statuses(port: int) -> dict[str, int]:
        found = {}
        for path in ("/livez", "/startupz", "/readyz", "/ping", "/predictions/m"):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.request("GET", path)
            found[path] = client.getresponse().status
            client.close()
        return found

    async def main() -> dict[str, int]:
        source = await asyncio.start_server(never_ending, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{source.sockets[0].getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        settings = settings_of(
            tmp_path,
            load_models=("p.mar" if waits_for == "pip" else f"{url}/m.mar",),
            install_dependencies=True,
            inference_address=Address(port=port),
            token_auth_enabled=False,
        )
        model = {"modelName": "m", "modelVersion": "1", "handler": "h.py", "requirementsFile": "r.txt"}
        with zipfile.ZipFile(tmp_path / "store" / "p.mar", "w") as archive:
            archive.writestr("h.py", "")
            archive.writestr("r.txt", f"m @ {url}/m-1.0-py3-none-any.whl")
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model}))
        running = asyncio.ensure_future(run(settings))
        await asked.wait()
        found = await asyncio.to_thread(statuses, port)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 60) == 0
        source.close()
        return found

    of_models = {"/startupz": 503, "/readyz": 503, "/ping": 500, "/predictions/m": 503}
    assert asyncio.run(main()) == {"/livez": 200, **of_models}
    said = "Model m waits for pip, which installs its requirements from r.txt; install_timeout_s=600"
    assert (said in caplog.messages) is (waits_for == "pip")


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limits")
def test_a_start_with_too_few_open_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ports, "open_file_limit", lambda: 139)
    assert asyncio.run(run(settings_of(tmp_path))) == 1
    assert "At most 139 files may be open, and the server needs 140 at least." in caplog.text
