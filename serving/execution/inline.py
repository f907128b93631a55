"""When a batch is better run on the event loop itself: a decision from how long the last ones took.

Two threads that hand the GIL to each other for every request cost more than a tiny model does (`benchmarks/`
has the figures). But whatever runs on the loop holds up everything else, so it must be quick, and the first
slow run ends it.
"""

from __future__ import annotations

import math

QUICK_S = 0.0005  # of processor time, per batch, on average: below it a handover costs more than the run
# To run such a request costs less than to take it in and to answer it, so the loop is the bottleneck whatever
# runs beside it. Only a whole batch must not hold the loop up for long.
QUICK_REQUEST_S = 0.0002
LONGEST_QUICK_S = 0.005  # of processor time, for a batch of such requests
S_PER_BYTE = 5e-10  # of the loop, for a byte in or out: at most half of what was measured over REST and gRPC
QUICK_WALL_S = 0.002  # a quick batch that takes longer in a thread waited for more than the GIL
SLOW_CPU_S = 0.02  # of processor time: a single run on the loop that takes more ends it
SLOW_WALL_S = 0.1  # likewise of wall time; more generous, because the process may have had to wait for a core
FIRST_TRIAL = 16  # runs in threads before the loop is tried
LONGEST_TRIAL = 16_384  # each slow run doubles how many are wanted, up to this
_MEMORY = 0.9  # of the running mean, per batch


class InlineChoice:
    """Watches the runs of one version. Not thread-safe: the event loop asks and tells.

    `allowed` False keeps it off for good: handlers with code of their own may sleep or wait for others.
    `on_gpu` does, too: to wait for a GPU takes processor time without the GIL, and looks like work with it.
    """

    def __init__(self, allowed: bool, on_gpu: bool = False) -> None:
        self.allowed = allowed and not on_gpu
        self._on_gpu = on_gpu
        self.active = False  # whether the next batch is to run on the loop
        self._wanted = FIRST_TRIAL
        self._seen = 0
        self._mean_s = 0.0  # of a batch
        self._wall_s = 0.0  # of a batch in a thread
        self._request_s = 0.0  # of a request, in its batch
        self._moved_s = 0.0  # the loop's own for the bytes of a request and its answer

    @property
    def one_at_a_time(self) -> bool:
        """Whether threads would only be in each other's way: next to nothing of a batch runs without the GIL.

        Those that wait share the next batch then. Not so for a handler that waits for something else.
        """
        return self._quick and self._wall_s <= QUICK_WALL_S and not self._on_gpu

    @property
    def mean_wall_s(self) -> float:
        """How long a batch is in a thread, the running mean; infinite as long as there was none."""
        return self._wall_s if self._seen else math.inf

    @property
    def _quick(self) -> bool:
        is_least = self._request_s <= QUICK_REQUEST_S + self._moved_s
        quick_s = LONGEST_QUICK_S if is_least else QUICK_S
        return self._seen >= self._wanted and self._mean_s <= quick_s

    def ran_in_thread(
        self, cpu_s: float, wall_s: float = 0.0, requests: int = 1, moved_bytes: int = 0
    ) -> None:
        """A batch took `cpu_s` of a thread's processor time, and `wall_s` with its waits for the GIL.

        `moved_bytes` came with its requests, or go out with their answers.
        """
        kept = _MEMORY if self._seen else 0.0
        self._mean_s = kept * self._mean_s + (1 - kept) * cpu_s
        self._wall_s = kept * self._wall_s + (1 - kept) * wall_s
        self._request_s = kept * self._request_s + (1 - kept) * cpu_s / requests
        self._moved_s = kept * self._moved_s + (1 - kept) * moved_bytes * S_PER_BYTE / requests
        self._seen += 1
        self.active = self.allowed and self._quick

    def ran_inline(self, cpu_s: float, wall_s: float) -> None:
        """A batch held the loop up."""
        if cpu_s > SLOW_CPU_S or wall_s > SLOW_WALL_S:
            self._seen = 0
            self.active = False
            self._wanted = min(2 * self._wanted, LONGEST_TRIAL)
