"""Timeout for a silent peer, with one timer that is not restarted for each message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LATE_S = 1.0  # a timer this late means that the loop stood still (Ctrl+Z, a paused container, no core)


def was_late(due_s: float) -> bool:
    """Return whether a timer that has just fired is late because its event loop stood still.

    Data that arrived meanwhile is not read yet.

    Args:
        due_s: when the timer was due, in monotonic seconds. The result has no meaning for a uvloop timer of
            less than half a millisecond.
    """
    return time.monotonic() - due_s > LATE_S


class Silence:
    """Watches a worker while it has a batch, a client while it sends a body, or a connection that is idle.

    Create and use it on the event loop.

    Calls `on_timeout()` after `timeout_s` without a message. If the loop stood still at the end of that time,
    the time starts again, but only once, so that a loop that is always late reaches the timeout, too.
    Messages are frequent, so they do not move the timer: when it fires, it checks how much time is left.
    """

    def __init__(self, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None  # None: no message is expected
        self._anew_s: float | None = None  # when the time started again without a message
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Start to expect messages."""
        self._began_s = self._loop.time()
        if self._timer is None:
            self._look_in(self._timeout_s)

    def broken(self) -> None:
        """Restart the time: a message came, and more are expected."""
        self._began_s = self._loop.time()

    def over(self) -> None:
        """Stop expecting messages."""
        self._began_s = None

    def stop(self) -> None:
        """Stop expecting messages, and cancel the timer."""
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
