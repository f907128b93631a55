"""The arithmetic of `torchere bench`: from latencies and statuses to the lines it prints. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTS = (50.0, 90.0, 99.0)
LOST = 0  # stands for the status of a request that got no whole answer
_BAR = 24  # characters


@dataclass(slots=True)
class Tally:
    """What the clients of one run saw. Filled by one event loop.

    `latencies_s` are those of answers with a 2xx only: a quick refusal must not make a server look fast.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[int] = field(default_factory=Counter)

    def add(self, status: int, latency_s: float) -> None:
        """Count one request; `LOST` when there was no answer."""
        if 200 <= status < 300:
            self.latencies_s.append(latency_s)
        else:
            self.errors[status] += 1


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the ascending values that at least `percent` of them do not exceed (nearest rank).

    Raises:
        ValueError: there are no values, or `percent` is not above 0 and at most 100.
    """
    if not ordered or not 0 < percent <= 100:
        raise ValueError(
            f"percentile {percent} of {len(ordered)} values; expected some, and 0 < percent <= 100"
        )
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def report(tally: Tally, elapsed_s: float, clients: int) -> str:
    """The lines for people."""
    answered = len(tally.latencies_s)
    lines = [
        f"{answered / elapsed_s:.1f} req/s   ({answered} answers in {elapsed_s:.1f} s, {clients} clients)"
    ]
    if answered:
        ordered = sorted(tally.latencies_s)
        shown = [f"p{percent:g} {percentile(ordered, percent) * 1000:.2f} ms" for percent in PERCENTS]
        lines.append("   ".join([*shown, f"max {ordered[-1] * 1000:.2f} ms"]))
    lines += [f"{count} x {_named(status)}" for status, count in sorted(tally.errors.items())]
    return "\n".join(lines)


def progress(elapsed_s: float, total_s: float, tally: Tally) -> str:
    """One line that overwrites the last one: a bar, the rate so far, the errors so far."""
    done = min(1.0, elapsed_s / total_s)
    filled = round(done * _BAR)
    rate = len(tally.latencies_s) / elapsed_s if elapsed_s else 0.0
    errors = f", {tally.errors.total()} errors" if tally.errors else ""
    return f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done:4.0%}  {rate:.0f} req/s{errors}   "


def _named(status: int) -> str:
    return "no answer (connection lost)" if status == LOST else f"status {status}"
