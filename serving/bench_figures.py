"""The arithmetic of `torchere bench`: from latencies, statuses and refusals to the lines it prints. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTS = (50.0, 90.0, 99.0)
LOST = 0  # stands for the status of a request that got no whole answer
_BAR = 24  # characters
_MOST_TEXTS = 3  # shown of each status
_MOST_TEXTS_KEPT = 100  # of all; a text may name its request, and no two are alike
_MOST_CHARACTERS = 300  # of a text
_OTHERS = "other texts"


@dataclass(slots=True)
class Tally:
    """What the clients of one run saw. Filled by one event loop.

    `latencies_s` are those of answers with a 2xx only: a quick refusal must not make a server look fast.
    `errors` counts the others by status and text.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, status: int, latency_s: float, body: bytes = b"") -> None:
        """Count one request; `LOST` when there was no answer, with the cause as its body."""
        if 200 <= status < 300:
            self.latencies_s.append(latency_s)
            return
        error = (status, refusal_text(body))
        is_kept = error in self.errors or len(self.errors) < _MOST_TEXTS_KEPT
        self.errors[error if is_kept else (status, _OTHERS)] += 1


def refusal_text(body: bytes) -> str:
    """Why a request failed, in one line: what a JSON object says of it, or the body as it is."""
    text = body.decode("utf-8", "backslashreplace")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        said = (parsed.get("message") or parsed.get("error"), parsed.get("detail"))
        text = ": ".join(str(part) for part in said if part) or text
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


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
    for status in sorted({status for status, _ in tally.errors}):
        texts = Counter({text: count for (of, text), count in tally.errors.items() if of == status})
        lines += [f"{count} x {_named(status)}{text and f': {text}'}" for text, count in _foremost(texts)]
    return "\n".join(lines)


def progress(elapsed_s: float, total_s: float, tally: Tally) -> str:
    """One line that overwrites the last one: a bar, the rate so far, the errors so far."""
    done = min(1.0, elapsed_s / total_s)
    filled = round(done * _BAR)
    rate = len(tally.latencies_s) / elapsed_s if elapsed_s else 0.0
    errors = f", {tally.errors.total()} errors" if tally.errors else ""
    return f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done:4.0%}  {rate:.0f} req/s{errors}   "


def _foremost(texts: Counter[str]) -> list[tuple[str, int]]:
    """The most frequent texts, and the rest as one."""
    others = texts.pop(_OTHERS, 0)
    ordered = texts.most_common()
    others += sum(count for _, count in ordered[_MOST_TEXTS:])
    return ordered[:_MOST_TEXTS] + ([(_OTHERS, others)] if others else [])


def _named(status: int) -> str:
    return "no answer (connection lost)" if status == LOST else f"status {status}"
