"""Values that are read from files and reloaded when the files change while the server runs.

If the new contents are unusable, this is logged once and the previous value stays in effect: a mistake in a
Kubernetes Secret must neither reject calls that were allowed nor allow calls that were rejected.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchere.serving.errors import ServingError

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0  # time between two checks; a check takes microseconds per file
_ATTEMPTS = 3  # maximum attempts to read files that change while being read

T = TypeVar("T")
_Signature = tuple[tuple[int, int, int, int, int] | None, ...]


class Reloaded(Generic[T]):
    """A value that `read` computes from files; `refresh` updates it when the files change.

    The constructor reads the files for the first time. A file counts as changed if it was replaced by another
    file (links are followed, because Kubernetes updates a Secret by replacing a link) or if its size, times
    or mode differ. Thread-safe for readers: `value` is replaced as a whole. Only one caller at a time may
    call `refresh`. `what` is the name of the value in log lines, such as "the token keys".

    Args:
        paths: the files that the value is computed from.
        read: computes the value; may block.

    Raises:
        ServingError: raised by `read`, or a path is not a regular file.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._seen, self.value = self._attempt()
        self._failed: tuple[_Signature, str] | None = None  # the last error, which is logged once

    def refresh(self) -> None:
        """Reload if a file has changed. Blocks. An unusable file is logged and leaves the value unchanged.

        Each call tries it again, because the cause may have been the process, such as too many open files.
        """
        now = _signature(self._paths)
        if now == self._seen:
            self._failed = None
            return
        try:
            self._seen, self.value = self._attempt()
        except ServingError as err:
            failed = (now, err.full_text)
            if failed != self._failed:
                logger.error("%s: %s Those from before stay in force.", self._what, err.full_text)
            self._failed = failed
            return
        self._failed = None
        logger.info("%s: read again from %s", self._what, ", ".join(map(str, self._paths)))

    def _attempt(self) -> tuple[_Signature, T]:
        """Read the value; retry while files change, because the files of a pair are written one by one.

        The last attempt is used even if a file changed during it.
        """
        for _ in range(_ATTEMPTS - 1):
            before = _signature(self._paths)
            try:
                value = self._read_files()
            except ServingError:
                if _signature(self._paths) == before:
                    raise
                continue
            if _signature(self._paths) == before:
                return before, value
        return _signature(self._paths), self._read_files()

    def _read_files(self) -> T:
        for path in self._paths:
            with suppress(OSError):  # `read` reports the error
                if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe, for example, could block forever
                    raise ServingError(f"{self._what} can't be read.", f"{path} is not a regular file.")
        return self._read()


async def watch(files: Sequence[Reloaded[Any]], interval_s: float = INTERVAL_S) -> None:
    """Refresh all `files` every `interval_s` seconds, in a thread, until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        for each in files:
            try:
                await asyncio.to_thread(each.refresh)
            except Exception:  # for example, no thread is available; the next check may succeed
                logger.exception("a look after replaced files failed")


def _signature(paths: Sequence[Path]) -> _Signature:
    return tuple(_stat(path) for path in paths)


def _stat(path: Path) -> tuple[int, int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # `read` reports the error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
