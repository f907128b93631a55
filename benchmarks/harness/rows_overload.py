"""The row of overload: three times what the server can do, from clients that wait a quarter second."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from harness import servers
from harness.figures import Goal
from harness.processes import Endpoint, Probe, until_answered
from harness.rows import Conditions, Figures, Measure, Row
from torchere.serving.commands.bench import percentile
from torchere.serving.commands.load_client import Client, ConnectionLost, Reply, Target, request_bytes

DEADLINE_S = 0.25
PEAK_CLIENTS = 8  # enough to keep one executor busy, few enough that all are in time
FACTORS = (0.5, 1.0, 2.0, 3.0)  # offered load over the peak
_FAR_FUTURE_S = 4e9
_PATH = "/predictions/timed"
_HEADERS = {"Content-Type": "application/json", "x-torchere-timeout-ms": f"{DEADLINE_S * 1000:.0f}"}


@dataclass(slots=True)
class _Seen:
    """What the clients of one phase saw; latencies of 200s only, in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    refused: int = 0

    def in_time(self) -> int:
        return sum(latency_s <= DEADLINE_S for latency_s in self.latencies_s)


class _Generator:
    """Asks one server; as many connections as there are requests at once."""

    def __init__(self, url: str) -> None:
        self._target = Target.parse(f"{url}{_PATH}")
        self._idle: list[Client] = []

    async def ask(self, body: dict[str, object], seen: _Seen) -> Reply | None:
        """One request, its latency counted from now; None: lost."""
        client = self._idle.pop() if self._idle else Client(self._target)
        sent_s = time.perf_counter()
        try:
            reply = await client.send(request_bytes(self._target, json.dumps(body).encode(), _HEADERS))
        except ConnectionLost:
            seen.refused += 1
            return None
        self._idle.append(client)
        if reply.status == 200:
            seen.latencies_s.append(time.perf_counter() - sent_s)
        else:
            seen.refused += 1
        return reply

    async def closed_loop(self, seconds: float) -> _Seen:
        """`PEAK_CLIENTS` at once; the rate of their answers is the peak."""
        seen = _Seen()
        stop_s = time.perf_counter() + seconds

        async def one_client() -> None:
            while time.perf_counter() < stop_s:
                await self.ask({"until": time.time() + DEADLINE_S}, seen)

        await asyncio.gather(*(one_client() for _ in range(PEAK_CLIENTS)))
        return seen

    async def open_loop(self, per_second: float, seconds: float) -> _Seen:
        """Requests at fixed moments, whatever has become of those before."""
        seen = _Seen()
        started_s = time.perf_counter()
        tasks = []
        for number in range(int(per_second * seconds)):
            due_s = started_s + number / per_second
            if (early_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            tasks.append(asyncio.ensure_future(self.ask({"until": time.time() + DEADLINE_S}, seen)))
        await asyncio.gather(*tasks)
        return seen

    async def report(self) -> dict[str, int]:
        """The handler's own counts."""
        reply = await self.ask({"report": True, "until": _FAR_FUTURE_S}, _Seen())
        counts: dict[str, int] = json.loads(reply.body) if reply and reply.status == 200 else {}
        return counts

    def close(self) -> None:
        """Close every connection."""
        for client in self._idle:
            client.close()


async def _overload(endpoint: Endpoint, seconds: float) -> Figures:
    generator = _Generator(endpoint.url)
    peak = len((await generator.closed_loop(seconds)).latencies_s) / seconds
    figures: Figures = {"peak_rps": peak}
    for factor in FACTORS:
        before = await generator.report()
        seen = await generator.open_loop(factor * peak, seconds)
        after = await generator.report()
        figures[f"goodput_{factor:g}x"] = seen.in_time() / seconds
        if factor == FACTORS[-1]:
            figures |= {
                "refused": float(seen.refused),
                "late": float(after.get("late", 0) - before.get("late", 0)),
            }
            if seen.latencies_s:
                figures["p99_ms"] = percentile(sorted(seen.latencies_s), 99) * 1000
    generator.close()
    return figures


def _served(start: Callable[..., AbstractContextManager[Endpoint]]) -> Measure:
    def measure(conditions: Conditions) -> Figures:
        body = json.dumps({"until": _FAR_FUTURE_S}).encode()
        with start(conditions.shop, "timed", 1) as endpoint:
            until_answered(endpoint, Probe(_PATH, body, b'"late"'))
            return asyncio.run(_overload(endpoint, conditions.seconds))

    return measure


def rows() -> list[Row]:
    """The rows of this module."""
    return [
        Row(
            "overload",
            "Three times the capacity, with deadlines of 250 ms",
            "One worker that is busy 8 ms for a request (asleep, so that the client finds a core). The "
            "peak is the rate of 8 closed-loop clients; then requests come at 0.5, 1, 2 and 3 times the "
            "peak, each with a deadline of 250 ms (header x-torchere-timeout-ms, which TorchServe does "
            "not know). Goodput is the rate of answers within the deadline; late counts the requests the "
            "handler began after theirs.",
            {"torchere": _served(servers.torchere), "torchserve": _served(servers.torchserve)},
            {
                "peak_rps": "peak req/s",
                "goodput_1x": "goodput at 1 x",
                "goodput_3x": "goodput at 3 x",
                "p99_ms": "p99 ms of answered",
                "refused": "refused",
                "late": "begun late",
            },
            (
                Goal(
                    "goodput at 3 x, to its own peak",
                    "goodput_3x",
                    0.9,
                    True,
                    ("torchere",),
                    "torchere",
                    "peak_rps",
                ),
                Goal("p99 of answered requests, ms", "p99_ms", 250, more_is_better=False),
                Goal("requests begun after their deadline", "late", 0, more_is_better=False),
            ),
        )
    ]
