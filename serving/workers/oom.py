"""Detects kills by the kernel's out-of-memory killer, from the kernel's counter.

The exit status of a process that was killed by signal 9 does not name the sender. The kernel counts its own
kills in lines `oom_kill N`: for each control group in `memory.events` (cgroup 2) or `memory.oom_control`
(cgroup 1), and for the whole machine in `/proc/vmstat`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchere.handlers.cgroup import OWN, ROOT, own_groups

FRESH_S = 5.0  # a kill that is not claimed for this long was that of another process
_MACHINE = Path("/proc/vmstat")


# Added to a worker's score for the killer: a worker is restarted, the server is not.
_SCORE_ADDED = 300


def offer_to_oom_killer() -> None:
    """Make the kernel kill this process rather than the server when memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):  # some systems lack it, and a sandbox forbids it
        score.write_text(str(min(1000, int(score.read_text()) + _SCORE_ADDED)))


class OomWatch:
    """Attributes SIGKILLs of processes to the out-of-memory killer. One for a server; not thread-safe.

    `read` returns how many processes the kernel has killed for memory so far; None if unknown.
    """

    def __init__(
        self, read: Callable[[], int | None] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read or counter_in(counter_files())
        self._now = now
        self._seen = self._read() or 0
        self._unclaimed = 0
        self._risen_s = 0.0

    def claim(self) -> bool:
        """Whether the kernel killed, for memory, a process that has just ended; each kill counts once."""
        count = self._read()
        if count is None:
            return False
        now_s = self._now()
        if now_s - self._risen_s > FRESH_S:
            self._unclaimed = 0
        if count > self._seen:
            self._unclaimed += count - self._seen
            self._risen_s = now_s
        self._seen = count
        if not self._unclaimed:
            return False
        self._unclaimed -= 1
        return True


def counter_in(files: list[Path]) -> Callable[[], int | None]:
    """Return a function that reads the counter from the first file that has one, or else returns None."""
    file = next((file for file in files if _count_in(file) is not None), None)
    return lambda: None if file is None else _count_in(file)


def counter_files(own: Path = OWN, mount: Path = ROOT) -> list[Path]:
    """Return the files that may contain the out-of-memory kill counter, most specific first."""
    names = ("memory.events", "memory.oom_control")  # of cgroup 2 and 1
    return [*(group / name for group in own_groups("memory", mount, own) for name in names), _MACHINE]


def _count_in(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None
