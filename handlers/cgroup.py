"""CPU and memory limits of the container, and their use, from cgroup version 2 or version 1."""

from __future__ import annotations

import math
import os
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
_LOOK_S = 0.1  # ten ticks of the kernel
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


def pin_to_limit(root: Path = ROOT, stat: Path = Path("/proc/stat")) -> list[int]:
    """Restrict the calling thread, and what it starts, to as many cores as its cgroup's quota is worth.

    It takes those that are idle most in the next tenth of a second, for a quota says nothing of which, and
    other containers may be pinned, too. Without a quota, or with one that is worth all its cores, nothing
    changes.

    Returns:
        The cores, or [] if nothing changed.
    """
    limit = sample_cgroup(root).cpu_limit_cores
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if limit is None or math.ceil(limit) >= len(allowed):
        return []
    before = _idle_ticks(stat)
    time.sleep(_LOOK_S)
    idle = {core: ticks - before.get(core, 0) for core, ticks in _idle_ticks(stat).items()}
    in_turn = random.sample(sorted(allowed), len(allowed))  # ties fall differently in each container
    chosen = sorted(in_turn, key=lambda core: -idle.get(core, 0))[: math.ceil(limit)]
    os.sched_setaffinity(0, chosen)
    return sorted(chosen)


def _idle_ticks(stat: Path) -> dict[int, int]:
    """Return the idle time of each core since the machine's start."""
    lines = re.findall(r"^cpu(\d+) \d+ \d+ \d+ (\d+)", _text(stat), re.MULTILINE)
    return {int(core): int(ticks) for core, ticks in lines}


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
