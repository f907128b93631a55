"""What is measured during a soak, and whether it stayed level. Pure but for `take`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

WARM_UP = 0.25  # of the samples: pools, caches and arenas fill up
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server."""

    at_s: float  # since the start
    rss_mb: float  # of the server process, 10^6 bytes
    worker_mb: float  # of its largest child
    files: float  # descriptors of the server process
    threads: float
    temp_files: float  # under its temporary folder


@dataclass(frozen=True, slots=True)
class Bound:
    """How much the level of one quantity may rise from the first to the last third after the warm-up."""

    name: str
    share: float
    absolute: float


BOUNDS = (
    Bound("rss_mb", 0.03, 15.0),
    Bound("worker_mb", 0.05, 15.0),
    Bound("files", 0.0, 8.0),  # connections of clients that are just gone
    Bound("threads", 0.0, 3.0),
    Bound("temp_files", 0.0, 8.0),  # of a model that is registered at the moment: it has seven
)


@dataclass(frozen=True, slots=True)
class Level:
    """One quantity over a soak."""

    bound: Bound
    values: tuple[float, ...]  # after the warm-up
    first: float  # median of the first third
    last: float

    @property
    def holds(self) -> bool:
        """Whether it stayed level."""
        return self.last - self.first <= self.first * self.bound.share + self.bound.absolute


def take(process: psutil.Process, temp: Path, at_s: float) -> Sample:
    """Look at a server and its children now."""
    children = process.children(recursive=True)
    return Sample(
        at_s,
        process.memory_info().rss / 1e6,
        max(map(_rss, children), default=0) / 1e6,
        process.num_fds(),
        process.num_threads(),
        sum(len(folders) + len(files) for _, folders, files in os.walk(temp)),  # it changes under us
    )


def levels(samples: Sequence[Sample]) -> list[Level]:
    """Compare the first and the last third of what comes after the warm-up, for every quantity."""
    warm = samples[int(len(samples) * WARM_UP) :]
    third = max(1, len(warm) // 3)
    found = []
    for bound in BOUNDS:
        values = tuple(float(getattr(sample, bound.name)) for sample in warm)
        found.append(Level(bound, values, median(values[:third]), median(values[-third:])))
    return found


def median(values: Sequence[float]) -> float:
    """The middle of at least one value."""
    return sorted(values)[len(values) // 2]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The course of values as text, one character for each stretch of them.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    stretch = max(1, len(values) // width)
    means = [sum(part) / len(part) for part in _parts(values, stretch)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def svg(samples: Sequence[Sample]) -> str:
    """All quantities over time as a picture, each in a band of its own."""
    names = [field.name for field in fields(Sample)][1:]
    end_s = max(samples[-1].at_s, 1.0)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {120 * len(names)}" fill="none">']
    for place, name in enumerate(names):
        values = [float(getattr(sample, name)) for sample in samples]
        top = max(*values, 1.0) * 1.1
        points = " ".join(
            f"{40 + 840 * sample.at_s / end_s:.1f},{120 * place + 110 - 90 * value / top:.1f}"
            for sample, value in zip(samples, values, strict=True)
        )
        label = f"{name}: {values[0]:.0f} to {values[-1]:.0f}, at most {max(values):.0f}"
        lines.append(f'<text x="40" y="{120 * place + 16}" font-size="13" fill="#555">{label}</text>')
        lines.append(f'<polyline points="{points}" stroke="#2463a8" stroke-width="1.5"/>')
    return "\n".join([*lines, "</svg>", ""])


def _parts(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just been killed
        return 0
