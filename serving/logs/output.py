"""The way to a stream whose reader may stand still: who logs never waits for him.

A pipe that nobody empties takes 64 KiB, and then whoever writes to it stands. So what the reader has room for
is written at once, which outlives whatever becomes of the process, and a thread of its own writes the rest.
What does not fit into what may wait is dropped, counted, and said when the reader takes lines again.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO, TypeVar
from weakref import WeakSet

MAX_WAITING_BYTES = 32 << 20
TERMINAL_WAIT_S = 0.05  # once until a terminal takes lines again
LAST_WAIT_MS = 1000  # for a reader, at the end of the process
_CHUNK = 1000  # texts in one write

Given = TypeVar("Given")

_outlets: WeakSet[Outlet] = WeakSet()  # of this process


class Outlet:
    """Writes texts to a descriptor, in the order they came. Any thread may call it.

    In a process that was forked off, what waited is not written again, and each text is written before `put`
    returns: such a process mostly ends without a word (`os._exit`), and nobody but itself waits.

    Args:
        descriptor: not closed here, and written to past all buffers: at the end of a process nobody may have
            to wait for the lock of a buffer whose writer stands.
        encoding: of the texts; what it lacks is written as escapes.
        say_lost: the text that says that so many lines were dropped.
        failed: called in the `except` of who writes when a write failed.
        limit: how many bytes may wait.
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
        self._changed = threading.Condition()  # guards all below; nothing that may wait is written under it
        self._texts: list[bytes] = []
        self._held = 0  # bytes that wait or are being written
        self._said = 0  # of the lines that were dropped
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin_in_child(self) -> None:
        """This process was forked off: the lock and the thread are the parent's, and so is what waits."""
        self._is_forked = True
        self._begin()

    def put(self, text: str, lines: int = 1) -> None:
        """Have a text of so many lines written; hardly waits, except in a process that was forked off."""
        data = text.encode(self._encoding, "backslashreplace")
        with self._changed:
            if self._is_forked:
                self._guarded(self._write, data)
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
            if is_first and self._is_terminal:  # or what is printed next would stand before it
                self.flush(TERMINAL_WAIT_S)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, no longer than that; False when it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def close(self) -> None:
        """Let the thread end when all is written; a text that comes later begins a new one."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _begin_thread(self) -> bool:
        thread = threading.Thread(target=self._run, name="log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # from Python 3.12 on there are no new ones at the end of the process
            return False
        self._thread = thread
        return True

    def _write_last(self, lines: int) -> None:
        """Write what waits, so many lines, as nobody else will; a reader that stands is waited for once."""
        rest, self._texts, self._held = b"".join(self._texts), [], 0
        while rest and has_room(self._descriptor, LAST_WAIT_MS):
            rest = self._write_at_once(rest)
        if rest:
            self.dropped += lines
            self._limit = 0

    def _write_at_once(self, data: bytes) -> bytes:
        """Write what the reader has room for; returns the rest."""
        rest = data
        try:
            while rest and has_room(self._descriptor, timeout_ms=0):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
        except BlockingIOError:  # somebody else took the room
            return rest
        except Exception:
            with suppress(Exception):
                self._failed()
            return b""
        return rest

    def _run(self) -> None:
        while texts := self._next():
            try:
                self._guarded(self._write_all, texts)
            finally:
                lost = self._written(texts)
            if lost:
                self._guarded(self._put_lost, lost)

    def _next(self) -> list[bytes]:
        """What is to be written next; [] when there is nothing and there will be nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._texts or self._closing)
            texts = self._texts[:_CHUNK]
            del self._texts[:_CHUNK]
            if not texts:
                self._thread = None
            return texts

    def _written(self, texts: list[bytes]) -> int:
        """These wait no more; returns how many lines were dropped that nobody was told of."""
        with self._changed:
            self._held -= sum(map(len, texts))
            lost, self._said = self.dropped - self._said, self.dropped
            self._changed.notify_all()
            return lost

    def _put_lost(self, lines: int) -> None:
        self.put(self._say_lost(lines))

    def _write_all(self, texts: list[bytes]) -> None:
        self._write(b"".join(texts))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody who has it, too, made it so
                has_room(self._descriptor, timeout_ms=None)

    def _guarded(self, step: Callable[[Given], None], given: Given) -> None:
        """Whatever goes wrong, who writes goes on: mostly, nobody reads any more."""
        try:
            step(given)
        except Exception:
            with suppress(Exception):
                self._failed()


def _begin_in_child() -> None:
    for outlet in _outlets:
        outlet.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


def has_room(descriptor: int, timeout_ms: int | None) -> bool:
    """Whether `PIPE_BUF` bytes may be written now without waiting; waits so long for that, None for ever."""
    poll = select.poll()  # one for each use: two threads may not use one, and select knows small numbers only
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(timeout_ms))


def _tells_room(descriptor: int) -> bool:
    """Whether `has_room` holds. A terminal that has room may have less."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def may_stand_still(stream: TextIO) -> int | None:
    """The descriptor of a stream that somebody has to read: a pipe, a terminal; None for files and memory."""
    try:
        descriptor = stream.fileno()
        return None if stat.S_ISREG(os.fstat(descriptor).st_mode) else descriptor
    except (OSError, ValueError):
        return None


SAID_EVERY_S = 60.0


class SaysWhatIsLost(logging.Handler):
    """A part of handlers: what becomes of a record that the operating system doesn't take."""

    output = "standard output"  # what it is called
    _say_after_s = 0.0  # monotonic

    def handleError(self, record: logging.LogRecord) -> None:
        """Say why, as `say` does; what is no `OSError` as logging does.

        Call it in the `except` of the one that writes.
        """
        err = sys.exc_info()[1]
        if isinstance(err, OSError):
            self.say(f"lines of {self.output} are lost: {err.strerror or err}")
        else:
            super().handleError(record)

    def say(self, text: str) -> None:
        """Say it on standard error, at most once a minute; where nobody reads that it is left unsaid."""
        now_s = time.monotonic()
        if now_s >= self._say_after_s:
            self._say_after_s = now_s + SAID_EVERY_S
            with suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                descriptor = may_stand_still(sys.stderr)
                if descriptor is None or has_room(descriptor, timeout_ms=0):
                    sys.stderr.write(f"{text}\n")
                    sys.stderr.flush()
