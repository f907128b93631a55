"""Log files that begin anew at 100 MB, and that others may move, remove, and fill the disk of."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
from pathlib import Path
from typing import TextIO

from torchere.serving.telemetry.lost_lines import SaysWhatIsLost

MAX_FILE_BYTES = 100 * 2**20  # TorchServe's; it compresses old files and rotates daily as well
KEPT_FILES = 5


class RotatingFile(SaysWhatIsLost, logging.handlers.RotatingFileHandler):
    """A file that is looked for before each write: one that logrotate has moved is not written to any more.

    A write that fails costs its lines, and the next one tries again, from the folder on. A file that can't be
    moved (it is mounted by itself, or its folder is not ours) grows by as much again before the next try.

    Raises:
        OSError: it can't be opened (from the constructor only).
    """

    def __init__(self, path: Path, lines: logging.Formatter) -> None:
        super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
        self.setFormatter(lines)
        self.output = str(path)
        self._is_closed = False
        self._full_bytes = self.maxBytes  # from which on it is moved

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            text = self.format(record)
        except Exception:  # as logging's own handlers do
            self.handleError(record)
        else:
            self.write(f"{text}\n", 1)

    def write(self, text: str, lines: int) -> None:
        """Write so many lines at once, in any thread; the file is rotated before them, if at all."""
        with self.lock or contextlib.nullcontext():
            if self._is_closed:
                return
            try:
                stream = self._find()
                size = os.fstat(stream.fileno()).st_size  # 0 of a pipe
                if size + len(text) >= self._full_bytes:
                    stream = self._begin_anew(size)
                stream.write(text)
                stream.flush()
            except Exception:
                self.handleError(logging.makeLogRecord({"msg": f"{lines} lines of the log"}))

    def close(self) -> None:
        """Take no more; on a full disk what waited in the buffer is lost."""
        self._is_closed = True
        try:
            super().close()
        except OSError:
            self.handleError(logging.makeLogRecord({"msg": "the last lines of the log"}))

    def _begin_anew(self, size: int) -> TextIO:
        """Move the file, of `size` bytes, and open a new one; the old one where it can't be moved."""
        try:
            self.doRollover()
            self._full_bytes = self.maxBytes
        except OSError as err:
            self._full_bytes = size + self.maxBytes
            self.say(f"{self.output} can't be moved, and grows: {err.strerror or err}")
        return self._find()

    def _find(self) -> TextIO:
        """What is open, or the file opened anew if that is not what the path leads to."""
        old = self.stream
        if old is not None:
            if not old.closed and _is_at(old.fileno(), self.baseFilename):
                return old
            self.stream = None  # as RotatingFileHandler has it between two files
            with contextlib.suppress(OSError):  # a full disk: what it did not take is lost
                old.close()
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        self.stream = self._open()
        return self.stream


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:  # it was moved, or its file system is another one by now
        return False
