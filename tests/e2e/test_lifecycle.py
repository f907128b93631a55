"""The life of a server process: start, load, stop, and what is promised at each."""

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SLEEPY = """
import time
class Handler:
    def initialize(self, context): pass
    def handle(self, data, context):
        time.sleep(0.005)
        return [row["body"] for row in data]
"""
PID = """
import os
def handle(data, context):
    return None if data is None else [str(os.getpid())] * len(data)
"""


PATIENT = """
import os, time
def handle(data, context):
    while data is not None and not os.path.exists(data[0]["body"]):
        time.sleep(0.01)
    return data and ["done"]
"""


class Client(threading.Thread):
    """Sends one request after the other until it is refused; counts what was answered."""

    def __init__(self, address: str, warm: threading.Barrier) -> None:
        super().__init__()
        self.address = address
        self.warm = warm
        self.answered = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        number = 0
        while True:
            body = b"%d" % number
            try:
                connection.request("POST", "/predictions/sleepy", body)
                reply = connection.getresponse()
                data = reply.read()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                return  # not accepted any more; the server's ledger tells whether that is true
            if reply.status != 200 or data != body:
                self.wrong.append(f"{reply.status} {data!r} for {body!r}")
                return
            number += 1
            self.answered = number
            if number == 20:
                self.warm.wait(30)


def test_sigterm_under_load_answers_every_accepted_request(pack: Any, start_server: Any) -> None:
    archive = pack("sleepy", {"h.py": SLEEPY}, handler="h.py")
    server = start_server(
        "--models", archive, "--disable-token-auth", properties="default_workers_per_model=2"
    )
    warm = threading.Barrier(9)
    clients = [Client(server.rest["inference"], warm) for _ in range(8)]
    for client in clients:
        client.start()
    warm.wait(60)  # every client is in full swing
    assert server.stop() == 0
    for client in clients:
        client.join(30)
    assert [client.wrong for client in clients] == [[]] * 8
    ledger = re.search(r"(\d+) predictions accepted, (\d+) answered", server.log())
    assert ledger is not None
    accepted, answered = map(int, ledger.groups())
    assert accepted == answered == sum(client.answered for client in clients)


@contextmanager
def under_way(pack: Any, start_server: Any, tmp_path: Path) -> Iterator[Any]:
    """A server with a prediction that the end of the block lets finish, and that must be answered then."""
    patient = pack("patient", {"h.py": PATIENT}, handler="h.py")
    server = start_server("--models", patient, "--disable-token-auth")
    enough = tmp_path / "enough"
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            server.call, "POST", "/predictions/patient", str(enough).encode(), content_type="text/plain"
        )
        _until(lambda: "torchere_inflight 1.0" in _metrics(server))
        yield server
        enough.touch()
        assert answer.result(60).body == b"done"


def test_metrics_tell_of_the_drain_to_its_end(pack: Any, start_server: Any, tmp_path: Path) -> None:
    with under_way(pack, start_server, tmp_path) as server:
        server.process.terminate()
        _until(lambda: not _listens(server.rest["inference"]))
        assert "torchere_inflight 1.0" in _metrics(server)
    assert server.process.wait(60) == 0
    assert not _listens(server.rest["metrics"])


def test_a_sigterm_right_behind_another_leaves_the_drain_as_it_is(
    pack: Any, start_server: Any, tmp_path: Path
) -> None:
    """As systemd sends after `ExecStop=torchserve --stop`."""
    with under_way(pack, start_server, tmp_path) as server:
        server.process.terminate()
        _until(lambda: "signal 15: draining" in server.log())
        server.process.terminate()
        _until(lambda: not _listens(server.rest["inference"]))
    assert server.process.wait(60) == 0


def _metrics(server: Any) -> str:
    return str(server.call("GET", "/metrics", api="metrics").body.decode())


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as asked:
        return asked.connect_ex((host, int(port))) == 0


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.02)


def test_the_end_leaves_no_process_and_no_file(pack: Any, start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "temp").mkdir()
    archive = pack("pid", {"h.py": PID}, handler="h.py")
    os.environ["TMPDIR"], before = str(tmp_path / "temp"), os.environ.get("TMPDIR")
    try:
        server = start_server("--models", archive, "--disable-token-auth")
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    pid = int(server.call("GET", "/predictions/pid").body)
    assert [path.name for path in (tmp_path / "temp").rglob("h.py")] == ["h.py"]
    assert server.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert list((tmp_path / "temp").iterdir()) == []


def test_a_worker_that_is_killed_comes_back_and_describe_says_why(pack: Any, open_server: Any) -> None:
    open_server.register(pack("pid", {"h.py": PID}, handler="h.py"), initial_workers=1)
    first = int(open_server.call("GET", "/predictions/pid").body)
    os.kill(first, signal.SIGKILL)
    open_server.follow("was lost")
    second = int(open_server.call("GET", "/predictions/pid").body)  # waits in the queue for the new worker
    assert second != first
    worker = open_server.call("GET", "/models/pid", api="management").json()[0]["workers"][0]
    assert (worker["pid"], worker["status"]) == (second, "READY")
    assert "killed by signal 9" in open_server.log()


def test_the_workers_end_when_the_server_is_killed(pack: Any, start_server: Any) -> None:
    server = start_server("--models", pack("pid", {"h.py": PID}, handler="h.py"), "--disable-token-auth")
    worker = int(server.call("GET", "/predictions/pid").body)
    server.process.kill()
    server.process.wait(30)
    deadline_s = time.monotonic() + 30
    while _alive(worker):
        assert time.monotonic() < deadline_s, "the worker outlived its server"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_tokens_are_asked_for_by_default(pack: Any, start_server: Any) -> None:
    server = start_server("--models", pack("pid", {"h.py": PID}, handler="h.py"))
    refused = server.call("GET", "/predictions/pid")
    assert (refused.status, refused.json()["type"]) == (400, "InvalidKeyException")
    keys = json.loads((server.folder / "key_file.json").read_text())
    allowed = server.call("GET", "/predictions/pid", authorization=f"Bearer {keys['inference']['key']}")
    assert allowed.status == 200
    server.until_ready()
    assert server.call("GET", "/readyz").json()["status"] == "ready"


def test_a_server_that_lacks_an_archive_of_its_start_is_unready_until_it_is_registered(
    pack: Any, start_server: Any
) -> None:
    there = pack("there", {"h.py": PID}, handler="h.py")
    server = start_server("--models", there, "late.mar", "--disable-token-auth", "--enable-model-api")
    assert server.call("GET", "/predictions/there").status == 200
    unready = server.call("GET", "/readyz")
    assert unready.status == 503
    assert "model late could not be registered" in unready.body.decode()
    assert server.call("GET", "/startupz").status == 200  # its neighbours are not to be killed for it
    server.register(pack("late", {"h.py": PID}, handler="h.py"), initial_workers=1)
    assert server.call("GET", "/readyz").status == 200


def test_versions_live_side_by_side_and_the_default_moves(
    pack: Any, open_server: Any, tmp_path: Path
) -> None:
    one = "def handle(data, context):\n    return data and ['one'] * len(data)\n"
    open_server.register(pack("v", {"h.py": one}, handler="h.py"), initial_workers=1)
    two = pack("v2", {"h.py": one.replace("one", "two")}, handler="h.py", modelName="v", modelVersion="2.0")
    open_server.register(two, initial_workers=1)
    assert open_server.call("GET", "/predictions/v").body == b"one"
    assert open_server.call("GET", "/predictions/v/2.0").body == b"two"
    assert open_server.call("PUT", "/models/v/2.0/set-default", api="management").status == 200
    assert open_server.call("GET", "/predictions/v").body == b"two"
    assert open_server.call("DELETE", "/models/v/1.0", api="management").status == 200
    assert open_server.call("GET", "/predictions/v/1.0").status == 404


def test_a_request_that_outlasts_the_drain_is_ended_and_not_waited_for(
    pack: Any, start_server: Any, tmp_path: Path
) -> None:
    """Whatever kills the process waits for both delays of the configuration, and no longer."""
    patient = pack("patient", {"h.py": PATIENT}, handler="h.py")
    server = start_server("--models", patient, "--disable-token-auth", properties="drain_timeout_s=1\n")
    server.follow("patient:1.0 is ready")  # the request has to be in the handler, not in the queue
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            server.call,
            "POST",
            "/predictions/patient",
            str(tmp_path / "never").encode(),
            content_type="text/plain",
        )
        _until(lambda: "torchere_inflight 1.0" in _metrics(server))
        server.process.terminate()
        assert server.process.wait(45) == 0  # unregister_timeout is 120 s
        reply = answer.result(60)
        # It has begun: by this type, not by "ServiceUnavailableException", clients know not to send it again.
        assert (reply.status, reply.json()["type"]) == (503, "InternalServerException")
    assert "1 predictions accepted, 1 answered" in server.log()


def test_sigquit_shows_the_threads_and_the_server_goes_on(pack: Any, start_server: Any) -> None:
    pid = pack("pid", {"h.py": PID}, handler="h.py")
    server = start_server("--models", pid, "--disable-token-auth")
    os.kill(server.process.pid, signal.SIGQUIT)
    _until(lambda: "(most recent call first)" in server.log())
    assert server.call("POST", "/predictions/pid", b"x").status == 200
    server.process.terminate()
    assert server.process.wait(45) == 0
