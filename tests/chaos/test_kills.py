"""Random workers are killed from outside at random moments while clients predict: the ledger must agree.

No request is lost, none is run or answered twice, and none is quarantined, although the same few contents are
running at every kill. `TORCHERE_KILLS=1000 pytest tests/chaos/test_kills.py -s` runs the long version.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KILLS = int(os.environ.get("TORCHERE_KILLS", "40"))
PAUSE_S = 0.4  # at most, between two kills
CLIENTS = 3  # of each model
CONTENTS = 4
HANDLER = """
import os, time


class Handler:
    def initialize(self, context):
        folder = context.model_yaml_config["folder"]
        self.book = os.open(os.path.join(folder, "runs"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle(self, data, context):
        for at in range(len(data)):
            headers = {name.lower(): value for name, value in context.get_all_request_header(at).items()}
            os.write(self.book, headers["x-number"].encode() + b"\\n")
        time.sleep(0.005)
        return [row["body"] for row in data]
"""
# One process per worker, with batches; and two lanes of one process.
MODELS: dict[str, dict[str, object]] = {
    "processes": {"isolation": "process", "batchSize": 2, "maxBatchDelay": 2},
    "lanes": {"isolation": "thread", "responseTimeout": 1},
}
WORKERS = {"processes": 3, "lanes": 2}


class Client(threading.Thread):
    """Sends the same few contents again and again, each request with its own number; keeps the outcomes."""

    def __init__(self, server: Any, model: str, name: str, over: threading.Event) -> None:
        super().__init__(name=name)
        self._server = server
        self._model = model
        self._over = over
        self.outcomes: dict[str, tuple[int, str]] = {}  # by number: status and body

    def run(self) -> None:
        while not self._over.is_set():
            number = f"{self.name}-{len(self.outcomes)}"
            content = str(len(self.outcomes) % CONTENTS)
            path = f"/predictions/{self._model}"
            self.outcomes[number] = (0, "no answer")
            reply = self._server.call("POST", path, content.encode(), headers={"x-number": number})
            text = reply.body.decode()
            assert reply.status != 200 or text == content
            self.outcomes[number] = (reply.status, text)
            if reply.status == 503:
                self._over.wait(0.1)  # else the ledger would hold refusals only


def workers_of(server: Any, model: str) -> list[dict[str, Any]]:
    described = server.call("GET", f"/models/{model}", api="management").json()[0]
    workers: list[dict[str, Any]] = described["workers"]
    return workers


def kill_at_random(server: Any, chance: random.Random) -> set[int]:
    """Kill workers that are in service, each once; return their process ids."""
    killed: set[int] = set()
    while len(killed) < KILLS:
        time.sleep(chance.random() * PAUSE_S)
        ready = {
            worker["pid"]
            for model in MODELS
            for worker in workers_of(server, model)
            if worker["status"] == "READY"
        }
        if alive := sorted(ready - killed):
            pid = chance.choice(alive)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return killed


def losses_of(server: Any, model: str) -> list[int]:
    """How often each lost worker was lost; there must be no quarantined request, and none known."""
    own = server.call("GET", f"/models/{model}", api="management").json()[0]["torchere"]
    assert "quarantinedRequests" not in own
    path = f"/models/{model}/1.0/quarantine"
    assert server.call("GET", path, api="management").json() == {"quarantinedRequests": []}
    return [loss["count"] for loss in own.get("losses", [])]


def check_runs(book: Path, outcomes: dict[str, tuple[int, str]]) -> Counter[int]:
    """Compare the handlers' book with the clients': one run for each answer, and never two."""
    runs = Counter(book.read_text().split())
    assert set(runs.values()) == {1}, "run twice: " + ", ".join(k for k, n in runs.items() if n > 1)
    statuses = Counter(status for status, _ in outcomes.values())
    for number, (status, text) in outcomes.items():
        if status == 200:
            assert number in runs
        elif status == 500:
            assert "Worker died." in text
        else:  # the version was out of service for longer than `restart_wait_s`
            assert (status, "restarting" in text) == (503, True), (status, text)
            assert number not in runs
    return statuses


@pytest.mark.timeout(600 + 2 * KILLS)
def test_kills_from_outside_lose_no_request_run_none_twice_and_convict_none(
    start_server: Callable[..., Any], pack: Any, store: Path, wait_until: Any
) -> None:
    server = start_server("--disable-token-auth", "--enable-model-api")
    for model, settings in MODELS.items():
        folder = store.parent / f"kills-{model}"
        folder.mkdir()
        lines = "\n".join(f"{key}: {value}" for key, value in {**settings, "folder": folder}.items())
        pack(model, {"h.py": HANDLER, "c.yaml": lines}, handler="h.py", configFile="c.yaml")
        assert server.register(f"{model}.mar", initial_workers=WORKERS[model]).status == 200
    over = threading.Event()
    clients = {
        model: [Client(server, model, f"{model}-{at}", over) for at in range(CLIENTS)] for model in MODELS
    }
    for client in [each for row in clients.values() for each in row]:
        client.start()
    killed = kill_at_random(server, random.Random(7))
    over.set()
    for client in [each for row in clients.values() for each in row]:
        client.join()
    for model in MODELS:
        wait_until(
            lambda model=model: all(
                worker["status"] == "READY" and worker["pid"] not in killed
                for worker in workers_of(server, model)
            ),
            f"all workers of {model} in service",
        )
    assert sum(losses_of(server, "processes")) + max(losses_of(server, "lanes"), default=0) == KILLS
    sent = 0
    for model in MODELS:
        outcomes = {number: end for client in clients[model] for number, end in client.outcomes.items()}
        statuses = check_runs(store.parent / f"kills-{model}" / "runs", outcomes)
        sent += len(outcomes)
        print(f"{KILLS} kills, {model}: {dict(statuses)}")
    assert server.stop() == 0
    assert f"{sent} predictions accepted, {sent} answered" in server.log()
