"""CPU and memory limits of the container, and their use, from cgroup version 2 or version 1."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 2**60  # version 1 has no word for "none", only a number no machine has


class CgroupSample(NamedTuple):
    """One sample; None means no limit, or a value that the kernel does not report."""

    cpu_limit_cores: float | None = None
    throttled_s: float | None = None
    memory_limit_bytes: int | None = None
    memory_bytes: int | None = None


def sample_cgroup(root: Path = ROOT) -> CgroupSample:
    """Read the cgroup files at `root`; a missing or malformed value becomes None."""
    if (root / "cgroup.controllers").exists():
        quota, _, period = _text(root / "cpu.max").partition(" ")
        throttled_s = _scaled(_field(_text(root / "cpu.stat"), "throttled_usec"), 1e-6)
        limit, used = _text(root / "memory.max"), _text(root / "memory.current")
    else:
        cpu, memory = root / "cpu", root / "memory"
        quota, period = _text(cpu / "cpu.cfs_quota_us"), _text(cpu / "cpu.cfs_period_us")
        throttled_s = _scaled(_field(_text(cpu / "cpu.stat"), "throttled_time"), 1e-9)
        limit, used = _text(memory / "memory.limit_in_bytes"), _text(memory / "memory.usage_in_bytes")
    limit_bytes = _number(limit)
    return CgroupSample(
        _ratio(_number(quota), _number(period)),
        throttled_s,
        limit_bytes if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES else None,
        _number(used),
    )


def available_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use: its affinity, limited by its cgroup's quota; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = sample_cgroup(root).cpu_limit_cores
    return affinity if limit is None else max(1, min(affinity, math.ceil(limit)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # no cgroups, or no permission to read them
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" and "-1" are no limit


def _ratio(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period else None


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        found, _, value = line.partition(" ")
        if found == name:
            return _number(value.strip())
    return None


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
