"""The buffer of unread parts of a streamed answer, with back-pressure on the executor.

A handler makes parts as fast as it can, and its client reads them as fast as it can. Up to a limit the
difference is buffered here, and neither waits. Above the limit the executor is paused: a handler makes 300 MB
in 15 ms, and a client that reads at network speed should not lose its answer. The pause is bounded, because
other requests wait for the executor: the stream is aborted if its client takes less than `STEP_BYTES` within
`HELD_S` during a pause (8 MiB a second).

A client may open any number of streams, so the buffered bytes of all streams have a limit, too. Above it,
streams whose clients have taken nothing for `IDLE_S` are aborted, and any other stream that gets a part is
paused as above.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from torchere.serving.errors import Cancelled, LeftUnread, ServingError

LEAST_LIMIT_BYTES = 64 * 2**20  # seconds of speech or thousands of pages of text never come near
STEP_BYTES = 16 * 2**20  # bytes that the client must take before a paused executor resumes
HELD_S = 2.0  # the time limit for taking them
# `HELD_S` is counted in this many timer ticks. A late tick counts once, because a blocked event loop could
# not have sent the client anything either.
LOOKS = 8
# The limit for all streams of a process: these bytes, or this many times the limit of one stream if larger.
ALL_BYTES = 2**30
ALL_ANSWERS = 4
IDLE_S = 10.0
LEAST_PART_BYTES = 64  # memory that a part of at most one byte takes


def held_bytes(part: bytes) -> int:
    """Return the bytes that a buffered part counts for: a handler may send millions of tiny ones."""
    return max(LEAST_PART_BYTES, len(part))


class UnreadOfAll:
    """Counts the unread bytes of all streams that share it. Lives on the event loop.

    Attributes:
        unread_bytes: the total of all streams.
    """

    __slots__ = ("_moved_s", "unread_bytes")

    def __init__(self) -> None:
        self.unread_bytes = 0
        self._moved_s: dict[UnreadParts, float] = {}  # since when each stream waits, longest wait first

    def added(self, stream: UnreadParts, size: int) -> None:
        """Count the bytes of a new part of a stream."""
        self.unread_bytes += size
        self._moved_s.setdefault(stream, time.monotonic())

    def gone(self, stream: UnreadParts, size: int) -> None:
        """Subtract bytes that the client of a stream took, or that were dropped."""
        self.unread_bytes -= size
        self._moved_s.pop(stream, None)
        if stream.unread_bytes:
            self._moved_s[stream] = time.monotonic()

    def is_full(self, limit: int) -> bool:
        """Abort idle streams while the total is above its limit; return whether it stays above.

        Args:
            limit: the limit in bytes of one stream, from which the total limit follows.
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
        limit: the bytes that may be buffered before the executor is paused.
        give_up: called once with the reason, in its own turn of the event loop, if the client abandons the
            parts or takes them too slowly.
        of_all: the shared count of all streams of the process.
    """

    __slots__ = (
        *("_end", "_ended", "_give_up", "_held_limit", "_limit", "_looks_left", "_loop", "_of_all"),
        *("_parts", "_released", "_taker", "_timer", "unread_bytes"),
    )

    def __init__(
        self, limit: int, give_up: Callable[[ServingError], None], of_all: UnreadOfAll = _OF_PROCESS
    ) -> None:
        self._limit = limit
        self._held_limit = limit  # a paused executor resumes `STEP_BYTES` below it
        self._of_all = of_all
        self._give_up: Callable[[ServingError], None] | None = give_up  # None: already called
        self._ended = False  # no more parts are accepted
        self._loop = asyncio.get_running_loop()
        self._parts: deque[bytes] = deque()
        self._end: ServingError | None = None  # the error to raise after the last part
        self._released: list[Callable[[], None]] = []
        self._taker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # while the executor is paused
        self._looks_left = 0
        self.unread_bytes = 0

    @property
    def held(self) -> bool:
        """Whether the executor is paused."""
        return self._timer is not None

    def when_over(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the executor may resume; only for a caller that has seen `held`."""
        self._released.append(go_on)

    def add(self, part: bytes) -> None:
        """Append a part; it is dropped if the stream has ended."""
        if self._ended:
            return
        if self.unread_bytes > 2 * self._limit:  # the producer can't or did not pause
            self.lose()
            return
        self._parts.append(part)
        size = held_bytes(part)
        self.unread_bytes += size
        self._of_all.added(self, size)
        if self._timer is not None:
            self._held_limit = min(self._limit, self._held_limit + size)  # sent before the pause
        elif self._must_wait():
            self._held_limit = min(self._limit, self.unread_bytes)
            self._looks_left = LOOKS
            self._look_later()
        self._wake()

    def end(self, error: ServingError | None = None) -> None:
        """End the stream, with `error` if it failed. Without effect if it has ended."""
        if not self._ended:
            self._ended = True
            self._end = error
            self._release()
            self._wake()

    def abandon(self) -> None:
        """Drop all buffered and later parts, because the reader is gone. Any thread may call it."""
        if (not self._ended or self._parts) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drop, Cancelled())

    async def take(self) -> bytes | None:
        """Wait for the next part and return it, or None at the end.

        Raises:
            ServingError: the stream ended with this error.
        """
        while not self._parts:
            if self._ended:
                error, self._end = self._end, None  # no reference cycle through its traceback
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # its traceback holds this frame, and so the request
                return None
            self._taker = self._loop.create_future()
            await self._taker
        part = self._parts.popleft()
        size = held_bytes(part)
        self.unread_bytes -= size
        self._of_all.gone(self, size)
        if self._timer is not None and self.unread_bytes <= max(0, self._held_limit - STEP_BYTES):
            self._release()
        return part

    def lose(self) -> None:
        """Abort the stream, because its client is too slow."""
        self._drop(LeftUnread(self.unread_bytes))

    def _must_wait(self) -> bool:
        if self.unread_bytes > self._limit:
            return True
        return self._of_all.is_full(self._limit) and not self._ended  # `is_full` may have aborted this stream

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(HELD_S / LOOKS, self._look)

    def _look(self) -> None:
        self._looks_left -= 1
        if self._held_limit < self._limit and not self._must_wait():
            self._release()  # this stream was paused because of others
        elif self._looks_left:
            self._look_later()
        else:
            self.lose()

    def _drop(self, reason: ServingError) -> None:
        self._parts.clear()
        unread_bytes, self.unread_bytes = self.unread_bytes, 0
        self._of_all.gone(self, unread_bytes)
        self.end(reason)
        self._end = reason  # its producer may have ended it before
        give_up, self._give_up = self._give_up, None
        if give_up is not None:
            self._loop.call_soon(give_up, reason)

    def _release(self) -> None:
        """Resume the executor."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        released, self._released = self._released, []
        for go_on in released:
            go_on()

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
