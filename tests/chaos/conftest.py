"""The servers of the end-to-end tests, clients with a ledger, and a handler that breaks on demand."""

import http.client
import json
import re
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranked_model import pack_ranked
from servers import pack, start_server, store

__all__ = ["pack", "start_server", "store"]

PATIENCE_S = 120.0
BROKEN = 0  # the status of an answer that began and was never finished, or of a connection that was lost

# Does as it is told, once or for ever. A body is "VERB FAULT": `echo` answers; `now` breaks while it runs;
# `part` answers in parts, then breaks; `held` waits for the file `go` first; `later` answers, and breaks when
# `go` is there. A fault named in the file `load` happens while the model loads, once.
BREAKING = """
import ctypes, os, signal, socket, threading, time
from pathlib import Path


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)  # a thread that is not the main one runs on for a moment


def crash():
    ctypes.string_at(0)


def leave():
    os._exit(7)


def spin():
    while not Path(folder, "over").exists():
        pass


def sleep_in_c():
    ctypes.PyDLL(None).sleep(1000)  # with the GIL held


def wait_for_a_lock():
    until("over")


def use_up_memory():
    import resource
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), hard))
    try:
        bytearray(1 << 32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def ask_for_too_much():
    raise MemoryError


def talk_nonsense():
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as line:
                line.sendall(b"\\xff" * 64)
        except OSError:
            pass
    until("over")


def until(name):
    while not Path(folder, name).exists():
        time.sleep(0.005)


class Handler:
    def initialize(self, context):
        global folder
        folder = context.model_yaml_config["folder"]
        order = Path(folder, "load")
        if order.exists():
            fault = order.read_text()
            order.unlink()
            Path(folder, "loading").touch()
            globals()[fault]()

    def handle(self, data, context):
        verb, _, fault = bytes(data[0]["body"]).decode().partition(" ")
        if verb == "pid":
            return [str(os.getpid())]
        if verb == "part":
            from ts.handler_utils.utils import send_intermediate_predict_response
            for part in ("one", "two"):
                send_intermediate_predict_response([part], context.request_ids, "", 200, context)
        if verb == "held":
            Path(folder, "busy").touch()
            until("go")
        if verb == "later":
            threading.Thread(target=lambda: (until("go"), globals()[fault]()), daemon=True).start()
        if verb in ("now", "part", "held"):
            globals()[fault.partition(" ")[0]]()
        return [fault]
"""


class Ledger:
    """Sends requests and writes down the one outcome of each. Thread-safe: a list append is all there is."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.outcomes: list[tuple[str, int, str]] = []  # model, status, body

    def predict(self, model: str, body: str) -> tuple[int, str]:
        """One request and its outcome: the status, `BROKEN` when there is none or no whole answer."""
        status, text = self._ask(model, body)
        self.outcomes.append((model, status, text))
        return status, text

    def _ask(self, model: str, body: str) -> tuple[int, str]:
        headers = {"content-type": "application/octet-stream"}
        connection = http.client.HTTPConnection(self.server.rest["inference"], timeout=PATIENCE_S)
        try:
            connection.request("POST", f"/predictions/{model}", body.encode(), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except http.client.IncompleteRead as err:
            return BROKEN, err.partial.decode()
        except (ConnectionError, http.client.HTTPException):
            return BROKEN, ""
        finally:
            connection.close()

    def in_background(self, model: str, body: str) -> tuple[threading.Thread, list[tuple[int, str]]]:
        """The same in a thread; the list has the outcome when the thread has ended."""
        outcome: list[tuple[int, str]] = []
        thread = threading.Thread(target=lambda: outcome.append(self.predict(model, body)))
        thread.start()
        return thread, outcome

    @property
    def accepted(self) -> int:
        """How many were admitted, as far as an answer tells: a refusal names itself.

        The first 422 of a model is what its second crash is answered with; the others are refused.
        """
        refused = ("ServiceUnavailableException", "NotFoundException", "BadRequestException")
        convicted = {model for model, status, _ in self.outcomes if status == 422}
        admitted = sum(not any(name in text for name in refused) for _, _, text in self.outcomes)
        return admitted + len(convicted)

    def statuses(self, model: str) -> Counter[int]:
        """How often each status came for a model."""
        return Counter(status for name, status, _ in self.outcomes if name == model)


def until(condition: Callable[[], bool], what: str) -> None:
    """Ask every 20 ms: most conditions are requests, which take time from workers that start."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.02)


class Breaking:
    """A server over models of the handler above, with a ledger. `ready` is what the probe of a model says."""

    def __init__(self, server: Any, pack: Any, root: Path) -> None:
        self.server = server
        self.isolation = "process"
        self.ledger = Ledger(server)
        self._pack = pack
        self._root = root

    def folder(self, model: str) -> Path:
        """Where orders for the handler of a model are put, and its signs are found."""
        folder = self._root / model
        folder.mkdir(exist_ok=True)
        return folder

    def archive(self, model: str, *, ranked: bool = False, **config: object) -> str:
        """Pack a model; `config` goes into its model-config.yaml. `ranked`: that of `ranked_model.py`."""
        if ranked:
            return pack_ranked(self._pack, model, self.folder(model), **config)
        settings = {"folder": str(self.folder(model)), "responseTimeout": 1, "startupTimeout": 15, **config}
        files = {"h.py": BREAKING, "c.yaml": json.dumps(settings)}
        return str(self._pack(model, files, handler="h.py", configFile="c.yaml"))

    def register(self, model: str, workers: int = 1, **config: Any) -> Any:
        """Pack and register a model, and wait until it is loaded."""
        if not config.get("ranked"):
            config.setdefault("isolation", self.isolation)
        return self.server.register(self.archive(model, **config), initial_workers=workers)

    def unregister(self, model: str) -> Any:
        return self.server.call("DELETE", f"/models/{model}", api="management")

    def describe(self, model: str) -> Any:
        return self.server.call("GET", f"/models/{model}", api="management").json()[0]

    def ready(self, model: str) -> bool:
        try:
            return bool(self.server.call("GET", f"/readyz/{model}").status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def until_ready(self, model: str) -> None:
        until(lambda: self.ready(model), f"{model} ready")

    def until_gone(self, model: str) -> None:
        until(lambda: self.server.call("GET", f"/readyz/{model}").status == 404, f"{model} gone")

    def until_replaced(self, model: str, pids: set[int]) -> None:
        """Wait until none of the workers is one of these processes."""
        until(
            lambda: pids.isdisjoint(worker["pid"] for worker in self.describe(model)["workers"]),
            f"workers of {model} replaced",
        )

    def until_not_ready(self, model: str) -> None:
        until(lambda: not self.ready(model), f"{model} not ready")

    def order(self, model: str, name: str, text: str = "") -> None:
        """Give the handler of a model an order."""
        (self.folder(model) / name).write_text(text)

    def until_sign(self, model: str, name: str) -> None:
        """Wait for a sign of the handler of a model."""
        until(lambda: self.server.process.poll() is None and (self.folder(model) / name).exists(), name)

    def stop_and_count(self) -> tuple[int, int]:
        """Stop the server in good order; the predictions it accepted, and answered, by its own count."""
        assert self.server.stop() == 0
        found = re.findall(r"(\d+) predictions accepted, (\d+) answered", self.server.log())
        return int(found[-1][0]), int(found[-1][1])


@pytest.fixture(scope="module")
def breaking(pack: Any, store: Path) -> Callable[[Any], Breaking]:
    """`breaking(server)`: the server with models that break on demand."""
    return lambda server: Breaking(server, pack, store.parent)


@pytest.fixture(scope="module")
def wait_until() -> Callable[[Callable[[], bool], str], None]:
    return until
