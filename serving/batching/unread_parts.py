"""The parts of one streamed answer that its client has not taken yet, and how much of them may lie here.

A handler makes parts as fast as it likes, and its client takes them as fast as it can. Up to a limit the
difference lies here, and neither waits. Beyond it the executor waits: a handler makes 300 MB in 15 ms, and
whoever reads as fast as a network lets him should not lose the answer for it. The wait is bounded, because
others wait for the executor: who takes less than `STEP_BYTES` in `HELD_S` then (8 MiB a second) is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from torchere.serving.errors import Cancelled, LeftUnread, ServingError

LEAST_LIMIT_BYTES = 64 * 2**20  # seconds of speech or thousands of pages of text never come near
STEP_BYTES = 16 * 2**20  # that the client has to take before a held executor goes on
HELD_S = 2.0  # how long it may take for that
# The time is counted in so many looks: one that comes late counts once, because a loop that stood still could
# not have handed anything to the client either.
LOOKS = 8


def limit_bytes(max_response_bytes: int) -> int:
    """How much of one streamed answer may lie unread: as much as of a whole one, and never very little.

    >>> limit_bytes(6_553_500) == LEAST_LIMIT_BYTES, limit_bytes(10**9)
    (True, 1000000000)
    """
    return max(LEAST_LIMIT_BYTES, max_response_bytes)


def must_wait(unread_bytes: int, limit: int) -> bool:
    """Whether the executor is to wait for the client."""
    return unread_bytes > limit


def may_go_on(unread_bytes: int, limit: int) -> bool:
    """Whether an executor that waits may make more."""
    return unread_bytes <= max(0, limit - STEP_BYTES)


def is_hopeless(unread_bytes: int, limit: int) -> bool:
    """Whether there is no room for another part: what makes the parts can't wait, or has not."""
    return unread_bytes > 2 * limit


class UnreadParts:
    """A queue of parts, taken by one coroutine. Lives on the event loop.

    Args:
        limit: how many bytes may lie here before the executor is held; see `limit_bytes`.
        give_up: called once, in a turn of its own, when nobody takes the parts, or nobody in time; gets why.
    """

    __slots__ = (
        *("_end", "_give_up", "_limit", "_looks_left", "_loop", "_parts", "_released", "_taker", "_timer"),
        "unread_bytes",
    )

    def __init__(self, limit: int, give_up: Callable[[ServingError], None]) -> None:
        self._limit = limit
        self._give_up: Callable[[ServingError], None] | None = give_up  # None: nothing more comes
        self._loop = asyncio.get_running_loop()
        self._parts: deque[bytes] = deque()
        self._end: ServingError | None = None  # what is raised behind the last part
        self._released: list[Callable[[], None]] = []
        self._taker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # while the executor is held
        self._looks_left = 0
        self.unread_bytes = 0

    @property
    def held(self) -> bool:
        """Whether the executor is to make no more for now."""
        return self._timer is not None

    def when_over(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the executor may make more; whoever asks has seen `held`."""
        self._released.append(go_on)

    def add(self, part: bytes) -> None:
        """One more part; dropped when nobody is to get it."""
        if self._give_up is None:
            return
        if is_hopeless(self.unread_bytes, self._limit):
            self._lose()
            return
        self._parts.append(part)
        self.unread_bytes += len(part)
        if self._timer is None and must_wait(self.unread_bytes, self._limit):
            self._looks_left = LOOKS
            self._look_later()
        self._wake()

    def end(self, error: ServingError | None = None) -> None:
        """There are no more; `error`: it went wrong. Without effect on what has ended."""
        if self._give_up is not None:
            self._give_up = None
            self._end = error
            self._release()
            self._wake()

    def abandon(self) -> None:
        """Nobody takes them any more: drop what lies here, and what still comes. Any thread may call it."""
        if (self._give_up is not None or self._parts) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drop, Cancelled("the client went away"))

    async def take(self) -> bytes | None:
        """The next part; None: that was all.

        Raises:
            ServingError: it ended with one.
        """
        while not self._parts:
            if self._give_up is None:
                error, self._end = self._end, None  # or it would hold this by its traceback, and this it
                if error is not None:
                    raise error
                return None
            self._taker = self._loop.create_future()
            await self._taker
        part = self._parts.popleft()
        self.unread_bytes -= len(part)
        if self._timer is not None and may_go_on(self.unread_bytes, self._limit):
            self._release()
        return part

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(HELD_S / LOOKS, self._look)

    def _look(self) -> None:
        self._looks_left -= 1
        if self._looks_left:
            self._look_later()
        else:
            self._lose()

    def _lose(self) -> None:
        """The client is too slow."""
        self._drop(LeftUnread(self.unread_bytes))

    def _drop(self, reason: ServingError) -> None:
        give_up = self._give_up
        self._parts.clear()
        self.unread_bytes = 0
        self.end(reason)
        if give_up is not None:
            self._loop.call_soon(give_up, reason)

    def _release(self) -> None:
        """Let the executor go on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        released, self._released = self._released, []
        for go_on in released:
            go_on()

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
