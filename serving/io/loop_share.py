"""Keeps the event loop's time for work that workers cause at will within a share.

A worker may print, or send parts of answers, faster than the server reads them. What is beyond the share
waits in the worker's pipe or socket, and the worker with it: other models and control requests have the rest.
"""

from __future__ import annotations

import time

TURN_S = 0.002  # of work, before the loop does other work


class LoopShare:
    """The time that one kind of work has taken of the event loop. For use on the loop's thread.

    Args:
        share: of the time, over all sources of the work.
        unused_s: seconds without work whose share is saved up: a burst of it is not delayed.
    """

    __slots__ = ("_next_s", "_share", "_unused_s")

    def __init__(self, share: float, unused_s: float) -> None:
        self._share, self._unused_s = share, unused_s
        self._next_s = 0.0  # monotonic, when the next turn may begin

    def wait_s(self) -> float:
        """Return the seconds until the next turn may begin; 0 or less: now."""
        return self._next_s - time.monotonic()

    def spend(self, duration_s: float) -> None:
        """Count the time of a turn that ends now."""
        self._next_s = max(self._next_s, time.monotonic() - self._unused_s) + duration_s / self._share
