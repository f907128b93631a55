"""Says how an answer differs from the one that was recorded. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

# Their values are another one each time, or say nothing about the interface: only their types are compared.
VOLATILE = frozenset({"id", "startTime", "memoryUsage", "pid", "gpuUsage"})
FLOAT_TOLERANCE = 1e-5  # relative; models are run by other builds of torch


def differences(want: Any, got: Any, ours: Set[str] = frozenset(), at: str = "body") -> Iterator[str]:
    """Yield a line for each difference between two JSON values.

    Args:
        want: what was recorded.
        got: what came.
        ours: members that our objects may have beside the recorded ones.
        at: where in the answer the values stand.
    """
    if isinstance(want, dict) and isinstance(got, dict):
        yield from _between_objects(want, got, ours, at)
    elif isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            yield f"{at} has {len(got)} items, recorded {len(want)}"
        for index, (one, other) in enumerate(zip(want, got, strict=False)):
            yield from differences(one, other, ours, f"{at}[{index}]")
    elif not _same_value(want, got):
        yield f"{at} is {got!r:.300}, recorded {want!r:.300}"


def _between_objects(
    want: Mapping[str, Any], got: Mapping[str, Any], ours: Set[str], at: str
) -> Iterator[str]:
    for name, value in want.items():
        if name not in got:
            yield f"{at}.{name} is missing"
        elif name not in VOLATILE:
            yield from differences(value, got[name], ours, f"{at}.{name}")
        elif type(value) is not type(got[name]):
            yield f"{at}.{name} is {got[name]!r}, recorded {value!r}: another type"
    for name in got.keys() - want.keys() - ours:
        if got[name] is not None:  # TorchServe leaves members without a value out, ours may say null
            yield f"{at}.{name} was not recorded"


def _same_value(want: Any, got: Any) -> bool:
    if isinstance(want, float) and isinstance(got, (int, float)):
        return math.isclose(want, got, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return type(want) is type(got) and want == got


def families(exposition: str) -> set[str]:
    """The names of the metric families in a Prometheus text."""
    return {line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE ")}
