"""The arithmetic: samples of rounds, ratios between contenders, goals. Pure functions of numbers.

Absolute figures drift with the machine's hours, so a goal compares contenders within one round, and only the
ratios of the rounds are summed up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# contender -> metric -> one figure per round (None: it gave none in that round)
Samples = Mapping[str, Mapping[str, Sequence[float | None]]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of the rounds; `rounds` is how many there were."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Goal:
    """What one figure of `ours` is to be.

    With `against`, the figure is a ratio to the best of those contenders in the same round; without, it is
    the value itself. `more_is_better` says which side of `target` is right, and which peer is the best.
    One without a target is a ratio that explains another: it is shown, and neither met nor missed.
    """

    text: str
    metric: str
    target: float | None
    more_is_better: bool = True
    against: tuple[str, ...] = ()
    ours: str = "torchere"
    against_metric: str = ""  # "": the same metric


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a goal came out; `spread` is None when there was nothing to compare with."""

    goal: Goal
    spread: Spread | None
    best_peer: str

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None: not measured, or there is no target."""
        if self.spread is None or self.goal.target is None:
            return None
        if self.goal.more_is_better:
            return self.spread.median >= self.goal.target
        return self.spread.median <= self.goal.target


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of what was measured; None when nothing was."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Spread(statistics.median(found), min(found), max(found), len(found))


def judge(goal: Goal, samples: Samples) -> Verdict:
    """Compare the rounds of `samples` with one goal."""
    mine = samples.get(goal.ours, {}).get(goal.metric, ())
    if not goal.against:
        return Verdict(goal, spread(mine), "")
    metric = goal.against_metric or goal.metric
    theirs = {name: samples[name].get(metric, ()) for name in goal.against if name in samples}
    ratios = [_ratio(value, _best(theirs, number, goal)) for number, value in enumerate(mine)]
    return Verdict(goal, spread(ratios), _usual_best(theirs, goal))


def _best(theirs: Mapping[str, Sequence[float | None]], number: int, goal: Goal) -> float | None:
    found = [values[number] for values in theirs.values() if number < len(values)]
    usable = [value for value in found if value is not None]
    if not usable:
        return None
    return max(usable) if goal.more_is_better else min(usable)


def _ratio(mine: float | None, best: float | None) -> float | None:
    return None if mine is None or not best else mine / best


def _usual_best(theirs: Mapping[str, Sequence[float | None]], goal: Goal) -> str:
    medians = {name: found.median for name, values in theirs.items() if (found := spread(values))}
    if not medians:
        return ""
    choose = max if goal.more_is_better else min
    return choose(medians, key=lambda name: medians[name])
