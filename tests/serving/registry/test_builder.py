"""What is said of a version while it is built."""

import asyncio
import io
import json
import os
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchere.serving.batching.unread_parts import LEAST_LIMIT_BYTES
from torchere.serving.config.model_settings import Asked
from torchere.serving.config.properties import parse_properties
from torchere.serving.config.resolve import configure
from torchere.serving.config.server_settings import Limits, ServerSettings
from torchere.serving.registry import builder
from torchere.serving.registry.builder import Loader
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.registry import Registry
from torchere.serving.registry.version import Version
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.workers.launch import CompilerLauncher, ForkLauncher, Launcher

OWN = {"h.py": b"def handle(data, context): return data\n"}
COMPILED = {"net.pt": b"looked at when it is loaded"}


def exported() -> dict[str, bytes]:
    """A file that is an exported program, as far as the server looks."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as program:
        program.writestr("net/archive_format", "pt2")
        program.writestr("net/models/model.json", "{}")
    return {"net.pt2": content.getvalue()}


def version_of(
    folder: Path, config: str, files: Mapping[str, bytes] = OWN, handler: str = "h.py", **settings: Any
) -> Version:
    """A version from an archive with that model config, on a machine without a GPU."""
    model = {"modelName": "m", "modelVersion": "1.0", "handler": handler, "configFile": "m.yaml"}
    for name in ("net.pt", "net.pt2"):
        if name in files:
            model["serializedFile"] = name
    with zipfile.ZipFile(folder / "m.mar", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("m.yaml", config)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))

    async def main() -> Version:
        server = ServerSettings(model_store=folder, temp_dir=folder, max_gpus=0, **settings)
        registry = Registry(server, RegistryMetrics(Metrics("host")))
        version = await registry.register(Wanted("m.mar", Asked()))
        await registry.close()
        return version

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ("deviceType: gpu", True),
        ("deviceType: cuda", True),
        ("deviceType: mps", False),  # without numbers; the worker says what it finds
        ("deviceType: xla", False),
        ("deviceIds: [0]", True),
        ("deviceType: cpu\ndeviceIds: [0]", False),
        ("minWorkers: 1", False),
    ],
)
def test_a_model_that_asks_for_a_gpu_where_none_is_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str, warned: bool
) -> None:
    version_of(tmp_path, config)
    assert ("m:1.0 asks for a GPU in its model config, and there is none" in caplog.text) is warned


@pytest.mark.parametrize(
    ("config", "shares_weights", "pinned"),
    [
        ("isolation: thread", True, False),
        ("isolation: process", False, False),
        ("minWorkers: 1", False, False),  # its handler is Python of its own
        ("isolation: thread\ncontinuousBatching: true", False, True),
        ("isolation: thread\nsequenceBatching: true\nsequenceMaxIdleMSec: 1000", False, True),
        ("isolation: thread\nasyncCommunication: true", False, False),
    ],
)
def test_executors_are_lanes_of_one_process_unless_they_keep_state_or_are_to_be_apart(
    tmp_path: Path, config: str, shares_weights: bool, pinned: bool
) -> None:
    version = version_of(tmp_path, config)
    spec = version.pool._spec
    assert (spec.shares_weights, spec.pinned) == (shares_weights, pinned)
    assert version.origin.isolation == ("thread" if shares_weights else "process")


@pytest.mark.parametrize(
    ("config", "hidden", "threads"),
    [
        ("{}", None, 7),
        ("{}", "OMP_.*", 16),
        ("parallelType: tp\ntorchrun: {nproc-per-node: 2, OMP_NUMBER_THREADS: 3}", None, 3),
    ],
)
def test_threads_of_openmp_that_the_operator_has_chosen_are_those_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, hidden: str | None, threads: int
) -> None:
    monkeypatch.setattr(builder, "available_cores", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    version = version_of(tmp_path, config, hidden_env_vars=hidden)
    assert version.pool._spec.intra_op_threads == threads


@pytest.mark.parametrize(
    ("config", "sends_ahead"),
    [
        ("minWorkers: 1", True),
        ("useJobTicket: true", False),
        ("jobQueueSize: 7", False),
        ("jobQueueSize: 8", True),
    ],
)
def test_runs_are_sent_ahead_unless_so_few_may_wait_that_each_counts(
    tmp_path: Path, config: str, sends_ahead: bool
) -> None:
    assert version_of(tmp_path, config).pool._settings.sends_ahead is sends_ahead


@pytest.mark.parametrize(("most_bytes", "limit_bytes"), [(1, LEAST_LIMIT_BYTES), (10**9, 10**9)])
def test_as_much_may_lie_unread_as_of_a_whole_answer_and_never_very_little(
    tmp_path: Path, most_bytes: int, limit_bytes: int
) -> None:
    version = version_of(tmp_path, "minWorkers: 1", limits=Limits(max_response_bytes=most_bytes))
    assert version.batcher.unread_limit_bytes == limit_bytes


@pytest.mark.parametrize(
    ("more", "files", "isolation"),
    [
        ("", COMPILED, "shared"),
        ("continuousBatching: true\n", COMPILED, "process"),
        ("asyncCommunication: true\n", COMPILED, "process"),
        ("sequenceBatching: true\nsequenceMaxIdleMSec: 1000\n", COMPILED, "process"),
        ("torchscript:\n  quantized_engine: onednn\n", COMPILED, "thread"),
        ("torchscript:\n  optimize_for_inference: true\n", COMPILED, "shared"),
        ("", COMPILED | {"base_handler.py": b"import os\n"}, "thread"),
        ("", COMPILED | {"parts/__init__.py": b""}, "thread"),
    ],
)
def test_a_version_shares_a_process_unless_it_needs_one_of_its_own(
    tmp_path: Path, more: str, files: Mapping[str, bytes], isolation: str
) -> None:
    version = version_of(tmp_path, f"isolation: shared\n{more}", files, "base_handler")
    assert version.origin.isolation == isolation
    assert version.pool._spec.shares_weights is (isolation != "process")


@pytest.mark.parametrize(
    ("config", "files", "launcher"),
    [
        ("minWorkers: 1", OWN, ForkLauncher),
        ("minWorkers: 1", COMPILED, ForkLauncher),
        ("minWorkers: 1", exported(), CompilerLauncher),
        ("isolation: thread", exported(), CompilerLauncher),
        ("pt2: inductor", COMPILED, CompilerLauncher),
    ],
)
def test_workers_that_import_torchs_compiler_are_forked_with_it(
    tmp_path: Path, config: str, files: Mapping[str, bytes], launcher: type[Launcher]
) -> None:
    version = version_of(tmp_path, config, files, "h.py" if files is OWN else "base_handler")
    assert type(version.pool._settings.launcher) is launcher


def test_a_compiled_model_is_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def holds(_path: str, _folder: str) -> bool:
        threads.append(threading.current_thread())
        return False

    monkeypatch.setattr(builder, "holds_gil", holds)
    version_of(tmp_path, "minWorkers: 1", exported(), "base_handler")
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_the_folders_of_an_archive_are_not_searched_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop = []
    real = os.scandir

    def watched(path: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            on_loop.append(str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", watched)
    version = version_of(tmp_path, "isolation: shared", COMPILED | {"a/b/c.txt": b""}, "base_handler")
    assert version.origin.isolation == "shared"
    assert on_loop == []


def test_executors_are_numbered_from_initial_worker_port(tmp_path: Path) -> None:
    properties = parse_properties(f"initial_worker_port=9500\nmodel_store={tmp_path}")

    async def main() -> list[int]:
        loader = Loader(configure(properties).checked(), RegistryMetrics(Metrics("host")))
        ids = [loader._next_id(), loader._next_id()]
        await loader.close()
        return ids

    assert asyncio.run(main()) == [9500, 9501]
