"""The way to a stream whose reader may stand still: who logs never waits for him.

A pipe that nobody empties takes 64 KiB, and then whoever writes to it stands. So a thread of its own writes;
what does not fit into what may wait is dropped, counted, and said when the reader takes lines again.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Callable
from typing import TextIO

MAX_WAITING_CHARACTERS = 32 << 20
_CHUNK = 1000  # texts in one write


class Outlet:
    """Writes texts to a descriptor, in the order they came. Any thread may call it.

    Args:
        descriptor: not closed here, and written to past all buffers: at the end of a process nobody may have
            to wait for the lock of a buffer whose writer stands.
        encoding: of the texts; what it lacks is written as escapes.
        say_lost: the text that says that so many lines were dropped.
        failed: called in the writing thread's `except` when a write failed.
        limit: how many characters may wait.
    """

    def __init__(
        self,
        descriptor: int,
        encoding: str,
        *,
        say_lost: Callable[[int], str],
        failed: Callable[[], None],
        limit: int = MAX_WAITING_CHARACTERS,
    ) -> None:
        self.dropped = 0  # lines
        self._descriptor = descriptor
        self._encoding = encoding
        self._say_lost = say_lost
        self._failed = failed
        self._limit = limit
        self._changed = threading.Condition()  # guards all below; never held while anything is written
        self._texts: list[str] = []
        self._held = 0  # characters that wait or are being written
        self._said = 0  # of the lines that were dropped
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, text: str, lines: int = 1) -> None:
        """Have a text of so many lines written; never waits."""
        with self._changed:
            if self._held + len(text) > self._limit:
                self.dropped += lines
                return
            self._texts.append(text)
            self._held += len(text)
            self._closing = False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, no longer than that; False when it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def close(self) -> None:
        """Let the thread end when all is written; a text that comes later begins a new one."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while texts := self._next():
            try:
                self._write("".join(texts))
            except OSError:  # nobody reads any more
                self._failed()
            with self._changed:
                self._held -= sum(map(len, texts))
                lost, self._said = self.dropped - self._said, self.dropped
                self._changed.notify_all()
            if lost:
                self.put(self._say_lost(lost))

    def _next(self) -> list[str]:
        """What is to be written next; [] when there is nothing and there will be nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._texts or self._closing)
            texts = self._texts[:_CHUNK]
            del self._texts[:_CHUNK]
            if not texts:
                self._thread = None
            return texts

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode(self._encoding, "backslashreplace"))
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody who has it, too, made it so
                select.select((), (self._descriptor,), ())


def may_stand_still(stream: TextIO) -> int | None:
    """The descriptor of a stream that somebody has to read: a pipe, a terminal; None for files and memory."""
    try:
        descriptor = stream.fileno()
        return None if stat.S_ISREG(os.fstat(descriptor).st_mode) else descriptor
    except (OSError, ValueError):
        return None
