"""Timeouts for peers that are silent, stop reading or make no progress, with few timers and clock reads."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
import time
from collections.abc import Callable, Hashable, Mapping
from operator import eq
from typing import Generic, TypeVar

T = TypeVar("T")
STOPPING_TIMEOUT_S = 5.0  # how long a request whose rest does not arrive may delay a shutdown
LATE_S = 1.0  # a timer this late means that the event loop was stopped (Ctrl+Z, paused container, no CPU)


def was_late(due_s: float) -> bool:
    """Return whether a timer that has just fired is late because its event loop was stopped.

    It was due at `due_s`, monotonic. Data that arrived in the meantime has not been read yet. The result is
    meaningless for a uvloop timer of less than half a millisecond.
    """
    return time.monotonic() - due_s > LATE_S


async def within(future: asyncio.Future[T], timeout_s: float) -> T:
    """Wait for a future like `asyncio.wait_for`, but never lose a cancellation.

    Up to Python 3.11, `wait_for` loses a cancellation that arrives together with the result (CPython issue
    86296), so that an abandoned load would go on.

    Raises:
        asyncio.TimeoutError: there is no result after `timeout_s`; the future is cancelled.
        Exception: the future's exception.
    """
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
    except asyncio.CancelledError:
        if not future.cancel() and not future.cancelled():
            future.exception()  # otherwise asyncio would log that the exception was never retrieved
        raise
    if not done:
        future.cancel()
        raise asyncio.TimeoutError
    return future.result()


class Silence:
    """Calls `on_timeout()` after `timeout_s` without a message. Create and use it on the event loop.

    If the event loop was stopped at the end of that time, the time starts again, but only once, so that a
    loop that is always late still reaches the timeout. Messages are frequent, so they do not reschedule the
    timer: when it fires, it computes the remaining time.
    """

    def __init__(self, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self.began_s: float | None = None  # when the silence began; None: no message is expected
        self._anew_s: float | None = None  # when the time was restarted because the event loop was late
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Expect a message from now on; call it again for each message that more will follow."""
        self.began_s = self._loop.time()
        if self._timer is None:
            self._look_in(self._timeout_s)

    def over(self) -> None:
        """Stop expecting messages."""
        self.began_s = None

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
        if self.began_s is None:
            return
        if was_late(due_s) and self.began_s != self._anew_s:
            self.began_s = self._anew_s = self._loop.time()
        left_s = self.began_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._look_in(left_s)
        else:
            self.began_s = None
            self._on_timeout()


class Upload(Silence):
    """Ends an upload of a body when the client is silent, or sends at too low a rate.

    `min_rate` is in bytes a second, averaged over `timeout_s`; 0: there is no minimum rate.
    """

    def __init__(self, timeout_s: float, min_rate: float, on_timeout: Callable[[], None]) -> None:
        super().__init__(timeout_s, on_timeout)
        self._min_bytes = min_rate * timeout_s
        self._bytes = 0  # since `_counts_since_s`
        self._counts_since_s = 0.0
        self._paused_s: float | None = None  # when the server stopped reading; None: it reads

    def arrived(self, size: int) -> None:
        """Count bytes of a body that is still incomplete."""
        is_first = self.began_s is None
        self.watch()
        now_s = self.began_s or 0.0
        if is_first:
            self._counts_since_s, self._bytes = now_s, 0
        self._bytes += size
        if now_s - self._counts_since_s < self._timeout_s:
            return
        is_slow = self._bytes < self._min_bytes
        self._counts_since_s, self._bytes = now_s, 0
        if is_slow:
            self._on_timeout()

    def hurry(self, timeout_s: float) -> None:
        """Lower the timeout; the minimum rate stays. A silence that has begun counts from now."""
        self._min_bytes *= timeout_s / self._timeout_s
        is_expected = self.began_s is not None
        self.stop()
        self._timeout_s = timeout_s
        if is_expected:
            self.watch()

    def pause(self) -> None:
        """Stop counting time, because the server stops reading."""
        self._paused_s = self._loop.time()

    def resume(self) -> None:
        """Count time again."""
        if self._paused_s is not None:
            self._counts_since_s += self._loop.time() - self._paused_s
            self._paused_s = None


Key = TypeVar("Key", bound=Hashable)
Progress = TypeVar("Progress")


class Stalls(Generic[Key, Progress]):
    """Watchdog that ends transfers on which a client makes no progress. Used on the event loop only.

    Args:
        every_s: seconds between two checks. A stalled transfer ends after one to two intervals.
        waiting: returns the transfers that wait for the client now, each with its progress: a value that
            changes with every byte transferred.
        give_up: ends the transfers that stalled between two checks.
        has_stalled: compares the progress at both checks; by default, a transfer whose progress did not
            change has stalled.
    """

    __slots__ = ("_every_s", "_give_up", "_has_stalled", "_is_over", "_loop", "_timer", "_waiting")

    def __init__(
        self,
        every_s: float,
        waiting: Callable[[], Mapping[Key, Progress]],
        give_up: Callable[[dict[Key, Progress]], None],
        has_stalled: Callable[[Progress, Progress], bool] = eq,
    ) -> None:
        self._has_stalled = has_stalled
        self._every_s = every_s
        self._waiting = waiting
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def watch(self) -> None:
        """Start the checks, unless they run already; call this when a transfer may begin to wait."""
        if self._timer is None:
            self._look_later()

    def hurry(self, every_s: float) -> None:
        """Lower the time between two checks; the next check compares with the present progress."""
        self._every_s = every_s
        if self._timer is not None:
            self._timer.cancel()
            self._look_later()

    def stop(self) -> None:
        """Stop checking for good: the connection is lost."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if not self._is_over:
            self._timer = self._loop.call_later(self._every_s, self._look, self._waiting())

    def _look(self, before: Mapping[Key, Progress]) -> None:
        self._timer = None
        now = self._waiting()
        if not now:
            return
        stalled = {
            key: found
            for key, found in now.items()
            if key in before and self._has_stalled(before[key], found)
        }
        if stalled:
            self._give_up(stalled)
        self._look_later()


UNREAD_TIMEOUT_S = 150.0  # between two checks: a client that read nothing in between is disconnected


def untaken_bytes(transport: asyncio.WriteTransport) -> int | None:
    """Return the number of written bytes, in our buffer or the kernel's, that the client has not received.

    The kernel may buffer megabytes, and accepts more only when much of its buffer is free, so the size of our
    own buffer does not show whether a client is slow. None: unknown, as asyncio's TLS transport does not
    expose its encrypted bytes.
    """
    in_kernel = None
    if transport.get_extra_info("sslcontext") is None:
        in_kernel = bytes_in_kernel(transport)
    return None if in_kernel is None else transport.get_write_buffer_size() + in_kernel


def bytes_in_kernel(transport: asyncio.WriteTransport) -> int | None:
    """Return the bytes in the kernel's buffer that the client has not received; None: unknown."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return None
    try:
        (in_kernel,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # the socket has just been closed
        return None
    return int(in_kernel)
