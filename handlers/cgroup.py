"""CPU and memory limits of this process's control group, and their use, from cgroup version 2 or 1."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_LOOK_S = 0.1  # ten ticks of the kernel
_NO_LIMIT_BYTES = 2**60  # version 1 writes "no limit" as a number above any memory


N = TypeVar("N", int, float)


class CgroupSample(NamedTuple):
    """One sample; None means no limit, or a value that the kernel does not report."""

    cpu_limit_cores: float | None = None
    throttled_s: float | None = None
    memory_limit_bytes: int | None = None
    memory_bytes: int | None = None


def own_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> list[Path]:
    """Return the folders of this process's group, of its parent, and so on up to the root of the mount.

    They need not exist: in a container `own` may have the host's path, with the group mounted as the root.

    Args:
        controller: "cpu" or "memory"; version 1 has a hierarchy of groups for each.
        root: where the groups are mounted.
        own: lines `number:controllers:path`; version 2 names no controllers.
    """
    is_v2 = _is_v2(root)
    top = root if is_v2 else root / controller
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if (is_v2 and not controllers) or (not is_v2 and controller in controllers.split(",")):
            parts = PurePosixPath(path).parts[1:]
            if ".." in parts:  # outside of the namespace's root, and so of the mount
                break
            return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [top]


def sample_cgroup(root: Path = ROOT, own: Path = OWN) -> CgroupSample:
    """Read the smallest limits of the groups of `own_groups`; a missing or malformed value becomes None.

    Use is measured in the group with that limit, which may have other members; without a limit, in the
    process's own group.
    """
    read_cpu, read_memory = (_cpu_v2, _memory_v2) if _is_v2(root) else (_cpu_v1, _memory_v1)
    cores, throttled_s = _tightest(map(read_cpu, own_groups("cpu", root, own)))
    limit_bytes, used_bytes = _tightest(map(read_memory, own_groups("memory", root, own)))
    return CgroupSample(cores, throttled_s, limit_bytes, used_bytes)


def _is_v2(root: Path) -> bool:
    return (root / "cgroup.controllers").exists()


def _cpu_v2(group: Path) -> tuple[float | None, float | None]:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return _cores(quota, period), _throttled_s(group, "throttled_usec", 1e-6)


def _cpu_v1(group: Path) -> tuple[float | None, float | None]:
    quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    return _cores(quota, period), _throttled_s(group, "throttled_time", 1e-9)


def _cores(quota: str, period: str) -> float | None:
    limit, share = _number(quota), _number(period)
    return limit / share if limit and share else None


def _throttled_s(group: Path, name: str, unit_s: float) -> float | None:
    found = re.search(rf"^{name} +(\d+)$", _text(group / "cpu.stat"), re.MULTILINE)
    return int(found[1]) * unit_s if found else None


def _memory_v2(group: Path) -> tuple[int | None, int | None]:
    return _number(_text(group / "memory.max")), _number(_text(group / "memory.current"))


def _memory_v1(group: Path) -> tuple[int | None, int | None]:
    limit_bytes = _number(_text(group / "memory.limit_in_bytes"))
    if limit_bytes is not None and limit_bytes >= _NO_LIMIT_BYTES:
        limit_bytes = None
    return limit_bytes, _number(_text(group / "memory.usage_in_bytes"))


def _tightest(groups: Iterable[tuple[N | None, N | None]]) -> tuple[N | None, N | None]:
    """Return the limit and the use of the group with the smallest limit; groups come most specific first."""
    least: tuple[N | None, N | None] = (None, None)
    for limit, used in groups:
        is_less = limit is not None and (least[0] is None or limit < least[0])
        if is_less or least == (None, None):
            least = (limit, used)
    return least


def available_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use: its affinity, limited by its cgroup's quota; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = sample_cgroup(root).cpu_limit_cores
    return affinity if limit is None else max(1, min(affinity, math.ceil(limit)))


def pin_to_limit(root: Path = ROOT, stat: Path = Path("/proc/stat")) -> list[int]:
    """Restrict the calling thread and all that it starts to as many cores as its cgroup's quota covers.

    A quota does not name cores, and other containers may be pinned too, so the cores chosen are those that
    are idlest in the next tenth of a second. Nothing changes without a quota, or if it covers all cores.

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
    in_turn = random.sample(sorted(allowed), len(allowed))  # each container breaks ties differently
    chosen = sorted(in_turn, key=lambda core: -idle.get(core, 0))[: math.ceil(limit)]
    os.sched_setaffinity(0, chosen)
    return sorted(chosen)


def _idle_ticks(stat: Path) -> dict[int, int]:
    """Return the idle time of each core since the machine's start."""
    lines = re.findall(r"^cpu(\d+) \d+ \d+ \d+ (\d+)", _text(stat), re.MULTILINE)
    return {int(core): int(ticks) for core, ticks in lines}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="surrogateescape").strip()
    except OSError:  # no cgroups, or no permission to read them
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" and "-1" mean no limit
