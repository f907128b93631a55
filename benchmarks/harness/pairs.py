"""The arithmetic of pairs: two sides measured in turns, and the interval of the median of their ratios.

Pure functions of numbers. The machine's speed drifts, so a ratio compares two figures of one pair only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.9  # least probability that the interval holds the true median
OLD, NEW = "old", "new"


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with two order statistics around it, and the probability that they hold the true median."""

    median: float
    low: float
    high: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """A goal: the median ratio of `metric`, new to `against`, in row `row`.

    `inline` is the target when large bodies travel inside frames, not in shared memory; None: the same.
    """

    row: str
    metric: str
    against: str
    target: float
    more_is_better: bool = True
    inline: float | None = None

    def limit(self, *, inline: bool) -> float:
        """The target that holds with or without shared memory."""
        return self.inline if inline and self.inline is not None else self.target


def turns(names: list[str], number: int) -> list[str]:
    """The order of a pair: old new, then new old, and so on; the peers follow."""
    first, second, *peers = names
    return [first, second, *peers] if number % 2 == 0 else [second, first, *peers]


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The median, and the narrowest symmetric order statistics that hold the true median with `level`.

    They need no assumption about the distribution but independence: the number of values below the true
    median is binomial with 1/2. Fewer than five values can't reach 0.9: their least and greatest are given.

    Raises:
        ValueError: there is no value.
    """
    ordered, count = sorted(values), len(values)
    if not count:
        raise ValueError("found no values, expected at least one")
    cut = max((k for k in range((count + 1) // 2) if _coverage(count, k) >= level), default=0)
    return Interval(statistics.median(ordered), ordered[cut], ordered[-1 - cut], _coverage(count, cut))


def _coverage(count: int, cut: int) -> float:
    tail = sum(math.comb(count, below) for below in range(cut + 1)) / 2**count
    return max(0.0, 1 - 2 * tail)


def ratios(mine: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Mine to theirs in each pair that has both, without those where theirs is 0."""
    return [one / two for one, two in zip(mine, theirs, strict=True) if one is not None and two]


def verdict(found: Interval, target: float, *, more_is_better: bool) -> str:
    """How a goal came out: "reached" or "MISSED" when the whole interval says so, otherwise "open".

    Too few pairs leave every goal open.
    """
    sign = 1 if more_is_better else -1
    least, middle, most = sorted(sign * (value - target) for value in (found.low, found.median, found.high))
    if found.coverage >= LEVEL and least >= 0:
        return "reached"
    if found.coverage >= LEVEL and most < 0:
        return "MISSED"
    return "open, median reaches" if middle >= 0 else "open, median misses"


def middle(samples: Mapping[str, Sequence[float | None]], metric: str) -> float | None:
    """The median of one contender's figure over the pairs; None when it has none."""
    values = [value for value in samples.get(metric, ()) if value is not None]
    return statistics.median(values) if values else None
