"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from harness.paths import ROOT


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that belong beside every figure."""

    date: str  # UTC, ISO 8601
    cpu: str
    cores: int  # that this process may use
    memory_gib: float
    system: str
    python: str
    torch: str
    torchere: str
    commit: str
    load_before: float  # 1-minute load average before the run: what else was running


def facts() -> Machine:
    """Look around."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_version()} of {sys.base_prefix}",  # who built it makes a tenth of speed
        torch=version("torch"),
        torchere=version("torchere"),
        commit=_commit(),
        load_before=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
