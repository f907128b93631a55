"""Output to a stream whose reader may be slow or blocked; logging calls do not wait for it.

A pipe that is not read holds 64 KiB and then blocks its writer. Text that fits into the pipe is therefore
written immediately, and survives a crash of the process; a separate thread writes the remaining text. Text
beyond the limit is dropped, counted, and reported when the pipe accepts text again. Text that an output
refuses, such as a pipe whose reader has ended, counts as dropped, too.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO
from weakref import WeakSet

MAX_WAITING_BYTES = 32 << 20
TERMINAL_WAIT_S = 0.05  # wait for a blocked terminal; repeated only after all lines are written
LAST_WAIT_MS = 1000  # wait for the reader, at the end of the process
_CHUNK = 1000  # texts in one write

_outlets: WeakSet[Outlet] = WeakSet()  # of this process


class Outlet:
    """Writes texts to a file descriptor, in order. Thread-safe.

    A forked child does not write the queued texts of its parent again. In a child, `put` returns only when
    its text is written, because a child usually ends without cleaning up (`os._exit`) and blocks only itself.

    Args:
        descriptor: the file descriptor, which is not closed here. Writes are unbuffered: a buffer has a lock,
            which a blocked writer would still hold at the end of the process.
        encoding: of the texts; characters that it lacks are written as escapes.
        say_lost: returns the text that reports a number of dropped lines.
        failed: called in the `except` block of a failed write.
        limit: the largest number of queued bytes.
    """

    def __init__(
        self,
        descriptor: int,
        encoding: str,
        *,
        say_lost: Callable[[int], str],
        failed: Callable[[], None],
        limit: int = MAX_WAITING_BYTES,
    ) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._say_lost = say_lost
        self._failed = failed
        self._limit = limit
        self._is_forked = False
        self._tells_room = _tells_room(descriptor)
        self._is_terminal = os.isatty(descriptor)
        self._begin()
        _outlets.add(self)

    def _begin(self) -> None:
        self.dropped = 0  # lines
        # The lock is held during a blocking write only in a forked child and at the end of the process.
        self._changed = threading.Condition()  # guards all fields below
        self._texts: list[bytes] = []
        self._held = 0  # bytes that are queued or being written
        self._said = 0  # dropped lines that were reported, here or by `failed`
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin_in_child(self) -> None:
        """Reset the state after a fork: the lock, the thread and the queued texts belong to the parent."""
        self._is_forked = True
        self._begin()

    def put(self, text: str, lines: int = 1) -> None:
        """Write or queue `text`, which holds `lines` lines. Blocks only briefly, except in a forked child."""
        data = text.encode(self._encoding, "backslashreplace")
        with self._changed:
            if self._is_forked:
                with self._guarded():
                    self._write(data)
                return
            is_first = not self._held
            if is_first and self._tells_room:
                data = self._write_at_once(data)
                if not data:
                    return
            if self._held + len(data) > self._limit:
                self.dropped += lines
                return
            self._texts.append(data)
            self._held += len(data)
            self._closing = False
            if (self._thread is None or not self._thread.is_alive()) and not self._begin_thread():
                self._write_last(lines)
                return
            self._changed.notify_all()
            if is_first and self._is_terminal:  # otherwise text that is printed next would overtake it
                self.flush(TERMINAL_WAIT_S)

    def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until all text is written; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def close(self) -> None:
        """End the thread once all text is written; a later text starts a new thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _begin_thread(self) -> bool:
        thread = threading.Thread(target=self._run, name="log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # since Python 3.12, no thread can start at the end of the process
            return False
        self._thread = thread
        return True

    def _write_last(self, lines: int) -> None:
        """Write the queued texts in this thread, because no other thread can be started.

        If the output accepts nothing for `LAST_WAIT_MS`, count the remaining text as `lines` dropped lines
        and close the queue.
        """
        rest, self._texts, self._held = b"".join(self._texts), [], 0
        while rest and has_room(self._descriptor, LAST_WAIT_MS):
            rest = self._write_at_once(rest)
        if rest:
            self.dropped += lines
            self._limit = 0

    def _write_at_once(self, data: bytes) -> bytes:
        """Write as much data as the descriptor accepts without blocking; return the remaining data."""
        rest = data
        try:
            while rest and has_room(self._descriptor, timeout_ms=0):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
        except BlockingIOError:  # another writer has filled the pipe
            return rest
        except Exception:
            self._lose(rest)
            with suppress(Exception):
                self._failed()
            return b""
        return rest

    def _run(self) -> None:
        while texts := self._next():
            try:
                with self._guarded():
                    self._write(b"".join(texts))
            finally:
                lost = self._written(texts)
            if lost:
                with self._guarded():
                    self.put(self._say_lost(lost))

    def _next(self) -> list[bytes]:
        """Wait for the next texts to write; return [] when the outlet is closing and none are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._texts or self._closing)
            texts = self._texts[:_CHUNK]
            del self._texts[:_CHUNK]
            if not texts:
                self._thread = None
            return texts

    def _written(self, texts: list[bytes]) -> int:
        """Subtract written texts from the queued bytes; return the number of dropped lines to report."""
        with self._changed:
            self._held -= sum(map(len, texts))
            lost, self._said = self.dropped - self._said, self.dropped
            self._changed.notify_all()
            return lost

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                has_room(self._descriptor, timeout_ms=None)
            except Exception:
                self._lose(bytes(rest))
                raise

    def _lose(self, rest: bytes) -> None:
        """Count lines that a broken output did not accept; `failed` reports them, and no later line does."""
        lines = rest.count(b"\n")
        with self._changed:
            self.dropped += lines
            self._said += lines

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """On an error call `failed` and continue: the reader has usually closed its end."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                self._failed()


def _begin_in_child() -> None:
    for outlet in _outlets:
        outlet.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


def has_room(descriptor: int, timeout_ms: int | None) -> bool:
    """Wait until `PIPE_BUF` bytes can be written; return False after `timeout_ms` (None: wait forever)."""
    poll = select.poll()  # one per call: not thread-safe; `select.select` takes only descriptors below 1024
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(timeout_ms))


def _tells_room(descriptor: int) -> bool:
    """Return whether `has_room` is reliable: a terminal may accept fewer bytes than it reports."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def may_stand_still(stream: TextIO) -> int | None:
    """Return the descriptor of a stream that may block (pipe, terminal); None for files and memory."""
    try:
        descriptor = stream.fileno()
        return None if stat.S_ISREG(os.fstat(descriptor).st_mode) else descriptor
    except (OSError, ValueError):
        return None


# Reports that a log line can't be written or a file can't be moved: the reason, at most once a minute.
# Python's logging writes a traceback of the log call for each failure. On a full disk, a server that answers
# a thousand requests per second would write megabytes of tracebacks per second.

SAID_EVERY_S = 60.0


class SaysWhatIsLost(logging.Handler):
    """Handler mixin that reports log records lost because the operating system did not accept them."""

    output = "standard output"  # name of the output in messages
    _say_after_s = 0.0  # monotonic

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an `OSError` with `say`; report any other error as Python's logging does.

        Call it in the `except` block of the failed write.
        """
        err = sys.exc_info()[1]
        if isinstance(err, OSError):
            self.say(f"lines of {self.output} are lost: {err.strerror or err}")
        else:
            super().handleError(record)

    def say(self, text: str) -> None:
        """Write to standard error, at most once a minute; skip the text if standard error is blocked."""
        now_s = time.monotonic()
        if now_s >= self._say_after_s:
            self._say_after_s = now_s + SAID_EVERY_S
            with suppress(OSError, ValueError, AttributeError):  # standard error may be closed or missing
                descriptor = may_stand_still(sys.stderr)
                if descriptor is None or has_room(descriptor, timeout_ms=0):
                    sys.stderr.write(f"{text}\n")
                    sys.stderr.flush()
