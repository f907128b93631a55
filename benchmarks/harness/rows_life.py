"""Rows of a server's life: a cold start with a large archive, and a worker killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from harness import servers
from harness.errors import Failed
from harness.figures import Goal
from harness.models import ENVELOPE, FEATURES, LARGE, LARGE_LAYERS, Workshop, instances_body, plain_body
from harness.paths import SCRIPTS
from harness.processes import Endpoint, Probe, until_answered
from harness.rows import Conditions, Figures, Measure, Row
from torchere.serving.commands.load_client import Client, ConnectionLost, Target, request_bytes

_KILL_CLIENTS = 8
_KILL_WORKERS = 2
_KILL_AFTER_S = 1.0
_BACK_WITHIN_S = 60.0
_JSON = {"Content-Type": "application/json"}

Start = Callable[..., AbstractContextManager[Endpoint]]


def _cold_tiny() -> Row:
    def measure(conditions: Conditions) -> Figures:
        conditions.shop.archive("single")
        probe = Probe("/predictions/single", instances_body(), b'"predictions"')
        with servers.torchere(conditions.shop, "single", 1, ENVELOPE) as endpoint:
            return {"first_answer_s": until_answered(endpoint, probe)}

    def bare(conditions: Conditions) -> Figures:
        return {"first_answer_s": _bare_start_s(conditions.shop, FEATURES, 4)}

    return Row(
        "cold_start_tiny",
        "Cold start with a tiny archive",
        "The same with the tiny MLP: what the server itself takes.",
        {"torchere": measure, "bare torch": bare},
        {"first_answer_s": "first answer s"},
        (Goal("to import torch + load + forward", "first_answer_s", None, False, ("bare torch",)),),
    )


def _cold() -> Row:
    probe = Probe("/predictions/large", instances_body(LARGE), b'"predictions"')

    def served(start: Start) -> Measure:
        def measure(conditions: Conditions) -> Figures:
            conditions.shop.archive("large")  # packing is not part of the start
            with start(conditions.shop, "large", 1, ENVELOPE) as endpoint:
                return {"first_answer_s": until_answered(endpoint, probe)}

        return measure

    def bare(conditions: Conditions) -> Figures:
        return {"first_answer_s": _bare_start_s(conditions.shop, LARGE, LARGE_LAYERS)}

    return Row(
        "cold_start",
        "Cold start with a 400 MB archive",
        "From the start of the process to the first right answer, asked for every 5 ms; one worker. The "
        "floor is a Python process that imports torch, loads the same file with torch.jit.load and runs "
        "it once. The files are in the page cache.",
        {"torchere": served(servers.torchere), "bare torch": bare, "torchserve": served(servers.torchserve)},
        {"first_answer_s": "first answer s"},
        (
            Goal("to import torch + load + forward", "first_answer_s", 1.6, False, ("bare torch",)),
            Goal("to TorchServe", "first_answer_s", 0.4, False, ("torchserve",)),
        ),
    )


def _bare_start_s(shop: Workshop, width: int, layers: int) -> float:
    command = [sys.executable, str(SCRIPTS / "bare_start.py"), str(shop.mlp(width, layers)), str(width)]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if process.stdout is None or process.stdout.readline().strip() != b"ready":
            raise Failed("the bare start ended before it was ready")
        elapsed_s = time.perf_counter() - started_s
    return elapsed_s


def _kill() -> Row:
    probe = Probe("/predictions/pid", plain_body(), b'"pid"')

    def served(start: Start) -> Measure:
        def measure(conditions: Conditions) -> Figures:
            with start(conditions.shop, "pid", _KILL_WORKERS) as endpoint:
                until_answered(endpoint, probe)
                return asyncio.run(_killed(endpoint, probe))

        return measure

    return Row(
        "kill",
        "kill -9 of a worker under load",
        f"Two workers, batch size 1, {_KILL_CLIENTS} clients. From the kill of one worker to the first "
        "answer of the process that replaces it, whose id is in the answer. Failures are the answers "
        "other than 200 meanwhile.",
        {"torchere": served(servers.torchere), "torchserve": served(servers.torchserve)},
        {"back_s": "back after s", "failures": "failures"},
        (
            Goal("seconds until the replacement answers", "back_s", 0.5, more_is_better=False),
            Goal("to TorchServe", "back_s", 0.2, False, ("torchserve",)),
        ),
    )


async def _killed(endpoint: Endpoint, probe: Probe) -> Figures:
    watch = _Watch()
    target = Target.parse(f"{endpoint.url}{probe.path}")
    request = request_bytes(target, probe.body, _JSON)
    clients = [asyncio.ensure_future(watch.ask(Client(target), request)) for _ in range(_KILL_CLIENTS)]
    try:
        # One that had not answered before would pass for the replacement.
        await asyncio.wait_for(watch.all_known.wait(), _BACK_WITHIN_S)
        await asyncio.sleep(_KILL_AFTER_S)  # the load settles
        watch.kill_one()
        await asyncio.wait_for(watch.replaced.wait(), _BACK_WITHIN_S)
    except asyncio.TimeoutError:
        raise Failed(f"a worker, or its replacement, did not answer within {_BACK_WITHIN_S:g} s") from None
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return {"back_s": watch.back_s, "failures": float(watch.failures)}


class _Watch:
    """Sees which processes answer. Used by one event loop."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._killed_s = 0.0
        self.failures = 0
        self.back_s = 0.0
        self.all_known = asyncio.Event()
        self.replaced = asyncio.Event()

    def kill_one(self) -> None:
        """End one of the processes that have answered so far, which must be all."""
        self._killed_s = time.perf_counter()
        os.kill(min(self._known), signal.SIGKILL)

    async def ask(self, client: Client, request: bytes) -> None:
        """Ask until cancelled."""
        with contextlib.closing(client):
            while True:
                try:
                    status, body = await client.send(request)
                except ConnectionLost:
                    status, body = 0, b""
                self._saw(status, body)

    def _saw(self, status: int, body: bytes) -> None:
        if status != 200:
            self.failures += 1
            return
        pid = int(json.loads(body)["pid"])
        if not self._killed_s:
            self._known.add(pid)
            if len(self._known) == _KILL_WORKERS:
                self.all_known.set()
        elif pid not in self._known and not self.replaced.is_set():
            self.back_s = time.perf_counter() - self._killed_s
            self.replaced.set()


def rows() -> list[Row]:
    """The rows of this module."""
    return [_cold(), _cold_tiny(), _kill()]
