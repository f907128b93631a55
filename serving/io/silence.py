"""How long the other end of a connection may say nothing, without a timer for each thing it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LATE_S = 1.0  # of a timer: its loop stood still (Ctrl+Z, a paused container, no core), and nobody listened


def was_late(due_s: float) -> bool:
    """Whether a timer that has just fired did so when its loop had stood still: what came is not read yet.

    Args:
        due_s: when it was to fire, monotonic. A timer of uvloop's for less than half a millisecond can't
            tell.
    """
    return time.monotonic() - due_s > LATE_S


class Silence:
    """Watches a worker while it has a batch, a client while it sends a body, or a connection that is idle.

    Lives on the event loop, which it must be made on.

    Calls `on_timeout()` when nothing was heard for `timeout_s`; where the loop stood still at the end of it,
    the time begins anew, once: a loop that is always late ends it, too. The one timer is not moved when
    something is heard, which is often: when it fires, it looks how much of the time is left.
    """

    def __init__(self, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None  # None: nothing is expected
        self._anew_s: float | None = None  # when it began anew, unheard
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """From now on it is to say something."""
        self._began_s = self._loop.time()
        if self._timer is None:
            self._look_in(self._timeout_s)

    def broken(self) -> None:
        """It said something, and there is more to come."""
        self._began_s = self._loop.time()

    def over(self) -> None:
        """It is not to say anything any more."""
        self._began_s = None

    def stop(self) -> None:
        """As `over`, and for good: let go of the timer, too."""
        self.over()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, left_s: float) -> None:
        self._timer = self._loop.call_later(left_s, self._look, time.monotonic() + left_s)

    def _look(self, due_s: float) -> None:
        self._timer = None
        if self._began_s is None:
            return
        if was_late(due_s) and self._began_s != self._anew_s:
            self._began_s = self._anew_s = self._loop.time()
        left_s = self._began_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._look_in(left_s)
        else:
            self._began_s = None
            self._on_timeout()
