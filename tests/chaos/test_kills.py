"""Random workers are killed from outside at random moments while clients predict: the ledger must agree.

No request is lost, none is run or answered twice, and none is quarantined, although the same few contents are
running at every kill. Every second kill is of a rank of a group of four.
`TORCHERE_KILLS=1000 pytest tests/chaos/test_kills.py -s` runs the long version.
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

import psutil
import pytest
from ranked_model import RANKS, pack_ranked

KILLS = int(os.environ.get("TORCHERE_KILLS", "30"))
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
GROUPS = "ranks"  # of 2 x 2 processes
WORKERS = {"processes": 3, "lanes": 2, GROUPS: 2}


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
            body = f"echo {content}" if self._model == GROUPS else content
            path = f"/predictions/{self._model}"
            self.outcomes[number] = (0, "no answer")
            reply = self._server.call("POST", path, body.encode(), headers={"x-number": number})
            text = reply.body.decode()
            assert reply.status != 200 or text == content
            self.outcomes[number] = (reply.status, text)
            if reply.status == 503:
                self._over.wait(0.1)  # else the ledger would hold refusals only


def workers_of(server: Any, model: str) -> list[dict[str, Any]]:
    described = server.call("GET", f"/models/{model}", api="management").json()[0]
    workers: list[dict[str, Any]] = described["workers"]
    return workers


def kill_at_random(server: Any, chance: random.Random) -> tuple[set[int], Counter[str]]:
    """Kill workers that are in service, each once; of a group, any of its ranks.

    Return the process ids of the workers, and the number of kills by model.
    """
    struck: set[int] = set()
    kills: Counter[str] = Counter()
    while len(struck) < KILLS:
        time.sleep(chance.random() * PAUSE_S)
        models = [GROUPS] if len(struck) % 2 else [model for model in WORKERS if model != GROUPS]
        ready = {
            (model, worker["pid"])
            for model in models
            for worker in workers_of(server, model)
            if worker["status"] == "READY" and worker["pid"] not in struck
        }
        if ready:
            model, pid = chance.choice(sorted(ready))
            ranks = [child.pid for child in psutil.Process(pid).children()] if model == GROUPS else []
            os.kill(chance.choice([pid, *ranks]), signal.SIGKILL)
            struck.add(pid)
            kills[model] += 1
    return struck, kills


def losses_of(server: Any, model: str) -> list[int]:
    """How often each lost worker was lost; there must be no quarantined request, and none known."""
    own = server.call("GET", f"/models/{model}", api="management").json()[0]["torchere"]
    assert "quarantinedRequests" not in own
    path = f"/models/{model}/1.0/quarantine"
    assert server.call("GET", path, api="management").json() == {"quarantinedRequests": []}
    return [loss["count"] for loss in own.get("losses", [])]


def check_runs(book: Path, outcomes: dict[str, tuple[int, str]]) -> Counter[int]:
    """Compare the book of the handlers, or of those of one rank, with that of the clients.

    There is one run for each answer, and never two.
    """
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
    folders = {model: store.parent / f"kills-{model}" for model in WORKERS}
    for model, folder in folders.items():
        folder.mkdir()
        if model == GROUPS:
            pack_ranked(pack, model, folder)
        else:
            settings = {**MODELS[model], "folder": folder}
            lines = "\n".join(f"{key}: {value}" for key, value in settings.items())
            pack(model, {"h.py": HANDLER, "c.yaml": lines}, handler="h.py", configFile="c.yaml")
        assert server.register(f"{model}.mar", initial_workers=WORKERS[model]).status == 200
    over = threading.Event()
    clients = {
        model: [Client(server, model, f"{model}-{at}", over) for at in range(CLIENTS)] for model in WORKERS
    }
    for client in [each for row in clients.values() for each in row]:
        client.start()
    struck, kills = kill_at_random(server, random.Random(7))
    over.set()
    for client in [each for row in clients.values() for each in row]:
        client.join()
    for model in WORKERS:
        wait_until(
            lambda model=model: all(
                worker["status"] == "READY" and worker["pid"] not in struck
                for worker in workers_of(server, model)
            ),
            f"all workers of {model} in service",
        )
        losses = losses_of(server, model)
        assert (max(losses, default=0) if model == "lanes" else sum(losses)) == kills[model], model
    sent = 0
    for model, folder in folders.items():
        outcomes = {number: end for client in clients[model] for number, end in client.outcomes.items()}
        books = [f"runs-{rank}" for rank in range(RANKS)] if model == GROUPS else ["runs"]
        statuses = [check_runs(folder / book, outcomes) for book in books]
        sent += len(outcomes)
        print(f"{kills[model]} kills of {model}: {dict(statuses[0])}")
    assert server.stop() == 0
    assert f"{sent} predictions accepted, {sent} answered" in server.log()
