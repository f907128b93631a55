"""The parts of one streamed answer that its client has not taken yet, and how much of them may lie here.

A handler makes parts as fast as it likes, and its client takes them as fast as it can. Up to a limit the
difference lies here, and neither waits. Beyond it the executor waits: a handler makes 300 MB in 15 ms, and
whoever reads as fast as a network lets him should not lose the answer for it. The wait is bounded, because
others wait for the executor: who takes less than `STEP_BYTES` in `HELD_S` then (8 MiB a second) is given up.

A client may ask for any number of streams, so there is a limit to what lies here of all of them, too. Beyond
it those are given up whose clients have taken nothing for `IDLE_S`, and each that gets more is held as above.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from torchere.serving.errors import Cancelled, LeftUnread, ServingError

LEAST_LIMIT_BYTES = 64 * 2**20  # seconds of speech or thousands of pages of text never come near
STEP_BYTES = 16 * 2**20  # that the client has to take before a held executor goes on
HELD_S = 2.0  # how long it may take for that
# The time is counted in so many looks: one that comes late counts once, because a loop that stood still could
# not have handed anything to the client either.
LOOKS = 8
# Of all streams of a process before it matters, or of so many whole ones where these may be longer.
ALL_BYTES = 2**30
ALL_ANSWERS = 4
IDLE_S = 10.0


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


class UnreadOfAll:
    """What lies unread of all streams that share it. Lives on the event loop.

    Attributes:
        unread_bytes: of all together.
    """

    __slots__ = ("_moved_s", "unread_bytes")

    def __init__(self) -> None:
        self.unread_bytes = 0
        self._moved_s: dict[UnreadParts, float] = {}  # since when each waits for its client, longest first

    def added(self, stream: UnreadParts, size: int) -> None:
        """A part of a stream lies here."""
        self.unread_bytes += size
        self._moved_s.setdefault(stream, time.monotonic())

    def gone(self, stream: UnreadParts, size: int) -> None:
        """So much of it does not any more."""
        self.unread_bytes -= size
        self._moved_s.pop(stream, None)
        if stream.unread_bytes:
            self._moved_s[stream] = time.monotonic()

    def is_full(self, limit: int) -> bool:
        """Whether more lies here than may, even without the streams that nobody reads.

        Args:
            limit: of one stream.
        """
        most_bytes = max(ALL_BYTES, ALL_ANSWERS * limit)
        while self.unread_bytes > most_bytes:
            stream, moved_s = next(iter(self._moved_s.items()))
            if time.monotonic() - moved_s < IDLE_S:
                return True
            stream.lose()
        return False


_OF_PROCESS = UnreadOfAll()


class UnreadParts:
    """A queue of parts, taken by one coroutine. Lives on the event loop.

    Args:
        limit: how many bytes may lie here before the executor is held; see `limit_bytes`.
        give_up: called once, in a turn of its own, when nobody takes the parts, or nobody in time; gets why.
        of_all: what is common to all streams of the process.
    """

    __slots__ = (
        *("_end", "_ended", "_give_up", "_held_limit", "_limit", "_looks_left", "_loop", "_of_all"),
        *("_parts", "_released", "_taker", "_timer", "unread_bytes"),
    )

    def __init__(
        self, limit: int, give_up: Callable[[ServingError], None], of_all: UnreadOfAll = _OF_PROCESS
    ) -> None:
        self._limit = limit
        self._held_limit = limit  # a step below it a held executor goes on
        self._of_all = of_all
        self._give_up: Callable[[ServingError], None] | None = give_up  # None: that was done
        self._ended = False  # nothing more comes
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
        if self._ended:
            return
        if is_hopeless(self.unread_bytes, self._limit):
            self.lose()
            return
        self._parts.append(part)
        self.unread_bytes += len(part)
        self._of_all.added(self, len(part))
        if self._timer is not None:
            self._held_limit = min(self._limit, self._held_limit + len(part))  # it was on its way
        elif self._must_wait():
            self._held_limit = min(self._limit, self.unread_bytes)
            self._looks_left = LOOKS
            self._look_later()
        self._wake()

    def end(self, error: ServingError | None = None) -> None:
        """There are no more; `error`: it went wrong. Without effect on what has ended."""
        if not self._ended:
            self._ended = True
            self._end = error
            self._release()
            self._wake()

    def abandon(self) -> None:
        """Nobody takes them any more: drop what lies here, and what still comes. Any thread may call it."""
        if (not self._ended or self._parts) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drop, Cancelled())

    async def take(self) -> bytes | None:
        """The next part; None: that was all.

        Raises:
            ServingError: it ended with one.
        """
        while not self._parts:
            if self._ended:
                error, self._end = self._end, None  # or it would hold this by its traceback, and this it
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # which holds this frame, and with it the request
                return None
            self._taker = self._loop.create_future()
            await self._taker
        part = self._parts.popleft()
        self.unread_bytes -= len(part)
        self._of_all.gone(self, len(part))
        if self._timer is not None and may_go_on(self.unread_bytes, self._held_limit):
            self._release()
        return part

    def lose(self) -> None:
        """Give it up: its client is too slow."""
        self._drop(LeftUnread(self.unread_bytes))

    def _must_wait(self) -> bool:
        if must_wait(self.unread_bytes, self._limit):
            return True
        return self._of_all.is_full(self._limit) and not self._ended  # it may have lost this one

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(HELD_S / LOOKS, self._look)

    def _look(self) -> None:
        self._looks_left -= 1
        if self._held_limit < self._limit and not self._must_wait():
            self._release()  # it was held for what lay here of others
        elif self._looks_left:
            self._look_later()
        else:
            self.lose()

    def _drop(self, reason: ServingError) -> None:
        self._parts.clear()
        unread_bytes, self.unread_bytes = self.unread_bytes, 0
        self._of_all.gone(self, unread_bytes)
        self.end(reason)
        self._end = reason  # its maker may have ended it before
        give_up, self._give_up = self._give_up, None
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
