"""Who is at work during a soak: clients, some of whom go away, an operator, and somebody who kills workers.

Each is a thread with a tally of outcomes; an outcome that nobody expects is kept in words.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections import Counter
from urllib.parse import urlsplit

import requests

from soaking.plant import Plant

PAUSE_S = 0.004  # of a client between requests: a mixed load, not the most the machine can do
KILL_EVERY_S = 7.0
CHANGE_EVERY_S = 0.5
_MAX_WRONG = 3  # that are kept in words


class Actor(threading.Thread):
    """One at work until `over` is set."""

    def __init__(self, plant: Plant, over: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self.plant = plant
        self.over = over
        self.chance = random.Random(seed)
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.session = requests.Session()

    def run(self) -> None:
        """Act, again and again."""
        while not self.over.is_set():
            try:
                self.act()
            except OSError as err:  # of the session, too
                self.found(f"{type(self).__name__}: {err!r}")

    def act(self) -> None:
        """One thing to do."""
        raise NotImplementedError

    def found(self, what: str) -> None:
        """Keep what should not have happened."""
        self.tally["unexpected"] += 1
        if len(self.wrong) < _MAX_WRONG:
            self.wrong.append(what[:300])


class Client(Actor):
    """Predicts, streams, makes the handler fail, reads metrics, or goes away in the middle."""

    def act(self) -> None:
        """One request of some kind, and a pause."""
        kind = self.chance.choices(("plain", "stream", "fail", "gone", "metrics"), (80, 8, 4, 7, 1))[0]
        if kind == "gone":
            self._go_away()
        elif kind == "metrics":
            self._check(kind, self.session.get(f"{self.plant.metrics}/metrics", timeout=60), 200, "")
        else:
            self._predict(kind, self.chance.choice(("processes", "threads")))
        self.over.wait(self.chance.random() * 2 * PAUSE_S)

    def _predict(self, kind: str, model: str) -> None:
        body = f"{kind} {self.chance.random()}"
        try:
            answer = self.session.post(
                f"{self.plant.inference}/predictions/{model}",
                body.encode(),
                headers={"content-type": "application/octet-stream"},
                timeout=60,
            )
        except requests.exceptions.ChunkedEncodingError:
            if kind != "stream":
                raise
            self.tally["stream lost to a kill"] += 1  # cut off, as it should be: it must not look whole
            return
        wanted = "Prediction failed" if kind == "fail" else body
        self._check(kind, answer, 503 if kind == "fail" else 200, wanted)

    def _check(self, kind: str, answer: requests.Response, status: int, wanted: str) -> None:
        if answer.status_code == status and wanted in answer.text:
            self.tally[kind] += 1
        elif answer.status_code == 500 and "Worker died." in answer.text:
            self.tally["lost to a kill"] += 1
        else:
            self.found(f"{kind}: {answer.status_code} {' '.join(answer.text.split())}")

    def _go_away(self) -> None:
        where = urlsplit(self.plant.inference)
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as line:
            line.sendall(
                b"POST /predictions/processes HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nplain 1.0"
            )
            self.over.wait(self.chance.random() * 0.01)
        self.tally["gone"] += 1


class Operator(Actor):
    """Registers, scales and unregisters a model."""

    def act(self) -> None:
        """One change, and a pause."""
        base, name = f"{self.plant.management}/models", "comes_and_goes"
        step = self.chance.choice(("register", "unregister", "scale"))
        if step == "register":
            answer = self.session.post(f"{base}?url={name}.mar&initial_workers=1", timeout=120)
        elif step == "unregister":
            answer = self.session.delete(f"{base}/{name}", timeout=120)
        else:
            count = self.chance.randrange(3)
            answer = self.session.put(f"{base}/{name}?min_worker={count}&synchronous=true", timeout=120)
        if answer.status_code in (200, 404, 409):
            self.tally[step] += 1
        else:
            self.found(f"{step}: {answer.status_code} {answer.text}")
        self.over.wait(CHANGE_EVERY_S)


class Killer(Actor):
    """Kills a worker with signal 9."""

    def act(self) -> None:
        """A pause, and one kill."""
        if self.over.wait(KILL_EVERY_S):
            return
        try:
            os.kill(self.chance.choice(self.plant.workers()), signal.SIGKILL)
        except ProcessLookupError:
            return  # it is being replaced just now
        self.tally["kill"] += 1
