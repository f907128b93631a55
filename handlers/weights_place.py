"""Where the bytes of a weights file are: in the folder of its archive, or for a while still in the archive.

Unpacking a large archive is mostly copying its weights, and a start would wait for that. So a server may
leave them where they are stored, say so here, and copy them when the model answers; loaders that map weights
map those in the archive meanwhile. Whoever needs the file itself waits for it (`wait_for_weights`), which
costs nothing where it is there: in worker processes and without a server it always is.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from torchere.handlers.shared_weights import file_to_map

if TYPE_CHECKING:  # a server knows of places before it has imported torch
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a weights file that can be read and mapped."""

    path: str  # the file they are in
    offset: int  # bytes, where they begin in it
    size: int  # bytes
    # Takes what was mapped and stays in use. None: it may stay for good. Else the pages are moved to the
    # file in the folder when that is there, so nobody may write to them.
    keep: Callable[[torch.UntypedStorage], None] | None = None

    def open(self) -> BinaryIO:
        """A reader that sees these bytes and no others."""
        file = open(self.path, "rb")  # noqa: SIM115  # the caller closes it
        return cast(BinaryIO, _Window(file, self.offset, self.size)) if self.offset else file


class LateWeights(Protocol):
    """A weights file that is not in its folder yet. Thread-safe."""

    @property
    def size(self) -> int:
        """Its bytes."""
        ...

    def lent(self) -> AbstractContextManager[Place | None]:
        """Where they are while the block runs; None when the file is there after all."""
        ...

    def wait(self) -> None:
        """Have the file written now, and return when it is there; OSError when that fails."""
        ...


_lock = threading.Lock()
_late: dict[str, LateWeights] = {}  # by the path of the file to come; guarded by _lock


def announce(path: str, weights: LateWeights) -> None:
    """Say that the file `path` is still to come."""
    with _lock:
        _late[path] = weights


def withdraw(path: str) -> None:
    """Say that the file `path` is there, or will never be. Twice is as good as once."""
    with _lock:
        _late.pop(path, None)


def late_weights_of(folder: str) -> LateWeights | None:
    """What is still to come into the folder of an archive."""
    with _lock:
        return next((late for path, late in _late.items() if os.path.dirname(path) == folder), None)


@contextmanager
def weights_at(path: str) -> Iterator[Place]:
    """Where the bytes of the weights file `path` are while the block runs.

    Raises:
        OSError: there is no such file.
    """
    late = _late.get(path)
    if late is None:
        yield _in_folder(path)
        return
    with late.lent() as place:
        yield place or _in_folder(path)


def wait_for_weights(path: str) -> None:
    """Return when the file `path` is there, if it is to come; OSError when it could not be written."""
    if late := _late.get(path):
        late.wait()


def is_there(path: str) -> bool:
    """Whether `path` is a file, or will be one."""
    return path in _late or os.path.isfile(path)


def weights_size(path: str) -> int:
    """Bytes of the weights file `path`; OSError when there is no such file, nor one to come."""
    late = _late.get(path)
    return late.size if late else os.path.getsize(path)


def _in_folder(path: str) -> Place:
    path = file_to_map(path)
    return Place(path, 0, os.path.getsize(path))


class _Window(io.RawIOBase):
    """A part of a file as if it were all of it; closing it closes the file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file = file
        self._offset = offset
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        if at < 0:
            raise ValueError(f"negative seek position {at}")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._size - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        data = self._file.read(wanted)
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()
