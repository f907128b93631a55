"""Keeps the event loop's time for work that workers cause at will within a share.

A worker may print, or send parts of answers, faster than the server reads them. What is beyond the share
waits in the worker's pipe or socket, and the worker with it: other models and control requests have the rest.
"""

from __future__ import annotations

import time

TURN_S = 0.002  # of work, before the loop does other work
SHARE = 0.25  # of the loop's time, over all sources of one kind of work
UNUSED_S = 0.4  # time without work whose share is saved up: a burst of it is not delayed


class LoopShare:
    """The time that one kind of work has taken of the event loop. For use on the loop's thread."""

    __slots__ = ("_next_s",)

    def __init__(self) -> None:
        self._next_s = 0.0  # monotonic, when the next turn may begin

    def wait_s(self) -> float:
        """Return the seconds until the next turn may begin; 0 or less: now."""
        return self._next_s - time.monotonic()

    def spend(self, duration_s: float) -> None:
        """Count the time of a turn that ends now."""
        self._next_s = max(self._next_s, time.monotonic() - UNUSED_S) + duration_s / SHARE
