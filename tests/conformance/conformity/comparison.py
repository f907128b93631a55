"""Says how an answer differs from the one that was recorded. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

# Their values are another one each time, or say nothing about the interface: only their types are compared.
VOLATILE = frozenset({"id", "startTime", "memoryUsage", "pid", "gpuUsage"})
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? \S+$")
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


def exposed(exposition: str) -> dict[str, tuple[list[str], list[str]]]:
    """What queries rely on of each metric family: its HELP and TYPE line, names and labels of samples."""
    found = {name: (_described(name, exposition), set[str]()) for name in families(exposition)}
    for line in exposition.splitlines():
        sample = _SAMPLE.match(line)
        if sample is not None:
            family = next((each for each in _owners(sample["name"]) if each in found), sample["name"])
            labels = ",".join(re.findall(r'(\w+)="', sample["labels"] or ""))
            found.setdefault(family, ([], set()))[1].add(f"{sample['name']}{{{labels}}}")
    return {name: (lines, sorted(samples)) for name, (lines, samples) in found.items()}


def _described(name: str, exposition: str) -> list[str]:
    return re.findall(rf"^# (?:HELP|TYPE) {re.escape(name)} .*$", exposition, re.MULTILINE)


def _owners(sample: str) -> Iterator[str]:
    """Of what families a sample may be."""
    yield sample
    yield from (sample.removesuffix(end) for end in ("_bucket", "_sum", "_count"))


def families(exposition: str) -> set[str]:
    """The names of the metric families in a Prometheus text."""
    return {line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE ")}
