"""What is made of files, and made anew when they change under a running server.

A change that can't be used is logged once, and what was there before stays in force: a mistake in a Secret
must not close a door that was open, nor open one that was closed.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from torchere.serving.errors import ServingError

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0  # between two looks; a stat of each file costs microseconds
_ATTEMPTS = 3  # to read files that change while they are read

T = TypeVar("T")
_Signature = tuple[tuple[int, int, int, int, int] | None, ...]


class Reloadable(Protocol):
    """What `watch` looks after."""

    def refresh(self) -> None:
        """Read the files again if they changed; may block, never raises for what is in them."""


class Reloaded(Generic[T]):
    """The value that `read` makes of some files; `refresh` follows them.

    Constructing reads once. A file counts as changed when another one is in its place (links are followed,
    as Kubernetes swaps a link to replace a Secret) or its size, times or mode differ. Thread-safe for
    readers: `value` is swapped whole. `refresh` belongs to one caller at a time.

    Args:
        what: What the log calls it, such as "the token keys".
        paths: The files; all of them together are one value.
        read: Makes the value; may block.

    Raises:
        ServingError: from `read`.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._seen, self.value = self._attempt()

    def refresh(self) -> None:
        """Read again if a file changed; blocks. What can't be used is logged and changes nothing."""
        now = _signature(self._paths)
        if now == self._seen:
            return
        try:
            self._seen, self.value = self._attempt()
        except ServingError as err:
            self._seen = now  # said once; the next change is another try
            logger.error("%s: %s %s Those from before stay in force.", self._what, err.message, err.detail)
            return
        logger.info("%s: read again from %s", self._what, ", ".join(map(str, self._paths)))

    def _attempt(self) -> tuple[_Signature, T]:
        """The value, of files that did not change while they were read (a pair is written one by one)."""
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
            with suppress(OSError):  # `read` says what is wrong with it
                if not stat.S_ISREG(path.stat().st_mode):  # a pipe, for one, would let us wait for ever
                    raise ServingError(f"{self._what} can't be read.", f"{path} is not a regular file.")
        return self._read()


async def watch(files: Sequence[Reloadable], interval_s: float = INTERVAL_S) -> None:
    """Refresh all of them again and again, in a thread, until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        for each in files:
            try:
                await asyncio.to_thread(each.refresh)
            except Exception:  # no thread to be had, for one: the next look may go well
                logger.exception("a look after replaced files failed")


def _signature(paths: Sequence[Path]) -> _Signature:
    return tuple(_stat(path) for path in paths)


def _stat(path: Path) -> tuple[int, int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # `read` says what is wrong with it
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
