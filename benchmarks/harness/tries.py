"""Choosing what is fastest, where one noisy moment must not decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

Way = TypeVar("Way")

NEAR = 0.1  # ways this much slower than the fastest are not tried again
TRIES_AGAIN = 2  # of those that are nearer


def tries_of(ways: Sequence[Way], rate: Callable[[Way], float]) -> dict[Way, list[float]]:
    """The rate of each way: of one try, and of more in turn for those near the fastest."""
    tries = {way: [rate(way)] for way in ways}
    least = (1 - NEAR) * max(rates[0] for rates in tries.values())
    near = [way for way, rates in tries.items() if rates[0] >= least]
    for way in near * TRIES_AGAIN:
        tries[way].append(rate(way))
    return tries


def fastest(tries: dict[Way, list[float]]) -> Way:
    """The way with the greatest median rate."""
    return max(tries, key=lambda way: median(tries[way]))
