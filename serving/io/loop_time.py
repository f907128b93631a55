"""Bounds the event loop's time for work that workers and clients cause at will.

A worker may print, or send parts of answers, faster than the server reads them. Output beyond its share of
time (`LoopShare`) waits in the worker's pipe or socket, and blocks the worker. Clients may send more calls
than the loop can parse besides its other work, so connections parse in turns (`LoopTurns`), and the bytes
that they have read wait. This leaves the loop time for other models and for control requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_S = 0.002  # time for one piece of work, before the loop does other work
SHARE = 0.25  # share of the loop's time that all sources of one kind of work get together
UNUSED_S = 0.4  # idle time whose share is saved up, so that a burst of work is not delayed

# Time for parsing in one iteration of the event loop, for all connections together. Each connection has a
# limit (`TURN_S` in `frontend/http2/connection.py`), but hundreds of them would occupy the loop for seconds.
SHARED_TURN_S = 0.02
# Limit for a whole iteration that includes such parsing; after a longer one, the next iterations parse less.
# A call parsed in 50 us can cause 500 us of work in later iterations: a stream of requests has three tasks.
MOST_ITERATION_S = 0.03
LEAST_TURN_S = SHARED_TURN_S / 100


class LoopShare:
    """The share of the event loop's time that one kind of work has used. For use on the loop's thread."""

    __slots__ = ("_next_s",)

    def __init__(self) -> None:
        self._next_s = 0.0  # monotonic time at which the next turn may begin

    def wait_s(self) -> float:
        """Return the seconds until the next turn may begin; 0 or less: now."""
        return self._next_s - time.monotonic()

    def spend(self, duration_s: float) -> None:
        """Count the time of a turn that ends now."""
        self._next_s = max(self._next_s, time.monotonic() - UNUSED_S) + duration_s / SHARE


class LoopTurns:
    """Bounds the total time for which connections parse in one iteration of the event loop.

    Connections call `spend` with the time that they used. Once the sum reaches `turn_s`, they put off the
    bytes that they have read. These are parsed in later iterations, first come, first served, after
    timers, workers and other ports had their turn.

    Attributes:
        are_over: whether further work should be put off, or be done in a thread.
        turn_s: time for parsing in each iteration; less than `SHARED_TURN_S` while iterations are too long.
    """

    __slots__ = ("_due_since_s", "_is_due", "_spent_s", "_waiting", "are_over", "turn_s")

    def __init__(self) -> None:
        self.are_over = False
        self.turn_s = SHARED_TURN_S
        self._due_since_s = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._spent_s = 0.0  # in this iteration, and a little in earlier ones
        self._is_due = False  # `_begin` is scheduled for the next iteration

    def spend(self, duration_s: float) -> None:
        """Count time that was used in this iteration."""
        self._spent_s += duration_s
        if self._spent_s >= self.turn_s / 4:  # one more iteration for each short read would cost too much
            self._look()
            self._schedule()

    def put_off(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later iteration; it must not raise, and calls `spend`."""
        self._waiting.append(go_on)
        self._look()
        self._schedule()

    async def another(self, cost_s: float) -> None:
        """Wait for a later iteration that has time for work of about `cost_s`."""
        coming: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on() -> None:
            if not coming.done():
                coming.set_result(None)
                self.spend(cost_s)

        self.put_off(go_on)
        await coming

    def _look(self) -> None:
        self.are_over = self._spent_s >= self.turn_s or bool(self._waiting)

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._due_since_s = time.monotonic()
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        iteration_s = time.monotonic() - self._due_since_s
        if iteration_s > MOST_ITERATION_S:
            self.turn_s = max(LEAST_TURN_S, self.turn_s * MOST_ITERATION_S / iteration_s)
        else:
            self.turn_s = min(SHARED_TURN_S, self.turn_s * 1.1)
        self._is_due = False
        self._spent_s = 0.0
        for _ in range(len(self._waiting)):
            if self._spent_s >= self.turn_s:
                break
            self._waiting.popleft()()
        self._look()
        if self._waiting:
            self._schedule()
