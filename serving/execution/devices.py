"""What this process may use, and how executors share it."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path

CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def available_cores(cpu_max: Path = CGROUP_CPU_MAX) -> int:
    """Cores this process may use: its affinity, cut by the quota of its cgroup (v2); at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return affinity
    return affinity if quota == "max" else max(1, min(affinity, math.ceil(int(quota) / int(period))))


def gpu_count(most: int | None) -> int:
    """How many GPUs the executors of this server may use: those CUDA shows to it, at most `most`.

    Makes no CUDA context, which costs hundreds of megabytes on each GPU and would not survive a fork.
    """
    torch = importlib.import_module("torch")  # seconds, and a command that serves nothing needs none
    there: int = torch.cuda.device_count()
    return there if most is None else min(most, there)


def intra_op_threads(cores: int, executors: int) -> int:
    """How many threads one executor may use for one operator, so that all of them together fit the cores."""
    return max(1, cores // max(1, executors))
