"""Writers of the archive formats. A sink writes files one by one, in the order they are given.

A zip or a tar depends on neither the machine nor the user nor the time: times, modes and owners are
constants.
"""

from __future__ import annotations

import gzip
import shutil
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from torchere.archiver.container.entries import CHUNK_BYTES
from torchere.archiver.manifest import EPOCH_S

ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch.save inside a .pt
PAGE_BYTES = 4096  # the alignment of large entries, which a server can then map in place
PAGED_FROM_BYTES = 2**20  # the smallest large entry
FILE_MODE = 0o644
# From this size the local header gets 64-bit sizes. Python's zipfile adds them by itself above 2 GiB / 1.05;
# a lower limit leaves the decision to this module, whose padding depends on it.
WIDE_FROM_BYTES = 1_900_000_000

_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER_BYTES = 30
_WIDE_EXTRA_BYTES = 20
# Extra field 0xD935, "alignment": two bytes with the alignment, then zeros. Readers skip extra fields that
# they do not know, and .apk files have had this one for years.
_PADDING = struct.Struct("<HHH")
_PADDING_ID = 0xD935


class Source(Protocol):
    """The source of an entry's bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes, b"" at the end."""
        ...


class Sink(Protocol):
    """An archive being written."""

    def add(self, name: str, size: int, source: Source, store: bool) -> None:
        """Write one entry of exactly `size` bytes; `store` asks for no compression and an aligned start."""
        ...


class _Zip(zipfile.ZipFile):
    """A zip file that only `close` completes, never the garbage collector.

    An abandoned file will be removed, so completing it is useless. After a signal in the middle of an entry,
    completing it would also fail, with an error that hides why the file was abandoned.
    """

    def __del__(self) -> None:
        """Do nothing; ZipFile's own method would call `close`."""


class ZipSink:
    """A `.mar`: a zip whose stored entries begin at a multiple of `ALIGNMENT` bytes, large ones at a page."""

    def __init__(self, archive: zipfile.ZipFile, file: IO[bytes]) -> None:
        self._archive = archive
        self._file = file

    def add(self, name: str, size: int, source: Source, store: bool) -> None:
        """See `Sink.add`."""
        info = zipfile.ZipInfo(name, _ZIP_TIME)
        info.create_system = 3  # Unix, wherever this runs
        info.external_attr = (stat.S_IFREG | FILE_MODE) << 16
        info.compress_type = zipfile.ZIP_STORED if store else zipfile.ZIP_DEFLATED
        info.file_size = size
        wide = size >= WIDE_FROM_BYTES
        if store:
            alignment = PAGE_BYTES if size >= PAGED_FROM_BYTES else ALIGNMENT
            info.extra = _padding(self._file.tell(), name, wide, alignment)
        with self._archive.open(info, "w", force_zip64=wide) as entry:
            shutil.copyfileobj(source, entry, CHUNK_BYTES)
        info.extra = b""  # the padding is not for the central directory, which is written later


class TarSink:
    """A `.tar.gz` with everything below one directory named after the model."""

    def __init__(self, archive: tarfile.TarFile, root: str) -> None:
        self._archive = archive
        self._root = root

    def add(self, name: str, size: int, source: Source, store: bool) -> None:
        """See `Sink.add`; gzip compresses the whole, so `store` changes nothing."""
        info = tarfile.TarInfo(f"{self._root}/{name}")
        info.size = size
        info.mode = FILE_MODE
        info.mtime = EPOCH_S
        self._archive.addfile(info, source)


class DirectorySink:
    """A plain directory; the umask decides the modes of the files."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, name: str, size: int, source: Source, store: bool) -> None:
        """See `Sink.add`."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            shutil.copyfileobj(source, file, CHUNK_BYTES)


@contextmanager
def open_sink(archive_format: str, work: Path, model_name: str) -> Iterator[Sink]:
    """Open a sink that writes `work`, which must not exist; it is complete when the block ends."""
    if archive_format == "no-archive":
        work.mkdir()
        yield DirectorySink(work)
    elif archive_format == "tgz":
        with (
            open(work, "xb") as plain,
            gzip.GzipFile("", "wb", 6, plain, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            yield TarSink(tar, model_name)
    else:
        with open(work, "x+b") as file:
            archive = _Zip(file, "w")
            yield ZipSink(archive, file)
            archive.close()


def _padding(header_offset: int, name: str, wide: bool, alignment: int) -> bytes:
    """Return the extra field that moves the data of an entry to the next aligned offset."""
    fixed = _LOCAL_HEADER_BYTES + len(name.encode()) + (_WIDE_EXTRA_BYTES if wide else 0)
    zeros = -(header_offset + fixed + _PADDING.size) % alignment
    return _PADDING.pack(_PADDING_ID, _PADDING.size - 4 + zeros, alignment) + bytes(zeros)
