"""When a batch is better run on the event loop itself: a decision from how long the last ones took.

Two threads that hand the GIL to each other for every request cost more than a tiny model does (`benchmarks/`
has the figures). But whatever runs on the loop holds up everything else, so it must be quick, and the first
slow run ends it.
"""

from __future__ import annotations

QUICK_S = 0.0005  # of processor time, per batch, on average: below it a handover costs more than the run
SLOW_CPU_S = 0.002  # of processor time: a single run on the loop that takes more ends it
SLOW_WALL_S = 0.1  # likewise of wall time; more generous, because the process may have had to wait for a core
FIRST_TRIAL = 16  # runs in threads before the loop is tried
LONGEST_TRIAL = 16_384  # each slow run doubles how many are wanted, up to this
_MEMORY = 0.9  # of the running mean, per batch


class InlineChoice:
    """Watches the runs of one version. Not thread-safe: the event loop asks and tells.

    `allowed` False keeps it off for good: handlers with code of their own may sleep or wait for others.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._wanted = FIRST_TRIAL
        self._seen = 0
        self._mean_s = 0.0

    @property
    def active(self) -> bool:
        """Whether the next batch is to run on the loop."""
        return self.allowed and self._seen >= self._wanted and self._mean_s <= QUICK_S

    def ran_in_thread(self, cpu_s: float) -> None:
        """A batch took `cpu_s` of a thread's processor time (wall time says little: it waits for the GIL)."""
        self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * cpu_s if self._seen else cpu_s
        self._seen += 1

    def ran_inline(self, cpu_s: float, wall_s: float) -> None:
        """A batch held the loop up."""
        if cpu_s > SLOW_CPU_S or wall_s > SLOW_WALL_S:
            self._seen = 0
            self._wanted = min(2 * self._wanted, LONGEST_TRIAL)
