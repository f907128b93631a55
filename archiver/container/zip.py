"""Reads `.mar` files (zip), and refuses every file that two zip readers could read differently.

TorchServe's server reads a zip from front to back, most others by the central directory at its end. Here both
must agree: entries follow one another from the first byte of the file to the central directory, without gap
or overlap, and each local header matches the directory.
"""

from __future__ import annotations

import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torchere.archiver.container.entries import (
    CHUNK_BYTES,
    ArchiveLimits,
    Chunks,
    Entry,
    Intake,
    Method,
    identity_of,
    open_regular,
)
from torchere.archiver.errors import ArchiveError

ENCRYPTED_FLAGS = 0x0001 | 0x0040 | 0x2000  # encrypted, strongly encrypted, masked headers
PATCHED_FLAG = 0x0020
DESCRIPTOR_FLAG = 0x0008  # CRC and sizes follow the data
_UTF8_FLAG = 0x0800  # the name is UTF-8; has no meaning for a name in ASCII
STORED, DEFLATED = 0, 8
MAX_RAW_NAME_BYTES = 4096  # keeps the index of a full archive small; entries.py allows much less

_END = struct.Struct("<4s4H2IH")
_WIDE_END = struct.Struct("<4sQ2H2I4Q")
_WIDE_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_WIDE_EXTRA = 0x0001
_NAME_EXTRA = 0x7075  # Info-ZIP's "Unicode Path": a version, the CRC-32 of the plain name, and a name
_NAME_EXTRA_HEAD_BYTES = 5
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF


class Malformed(ValueError):
    """The bytes are not a zip that this package accepts; the text gives the reason."""


class Directory(NamedTuple):
    """Position of the central directory, and the number of entries that it lists."""

    offset: int
    end: int
    entries: int


class Central(NamedTuple):
    """One entry of the central directory, with 64-bit values already in place."""

    raw_name: bytes
    flags: int
    method: int
    crc: int
    stored_size: int
    size: int
    attributes: int
    header_offset: int


class Local(NamedTuple):
    """The header in front of an entry's data."""

    raw_name: bytes
    flags: int
    method: int
    crc: int
    stored_size: int
    size: int
    data_offset: int


def read_directory(file: BinaryIO, file_size: int) -> Directory:
    """Find the central directory: it must end where the end records begin, and these must end the file."""
    if file_size < _END.size:
        raise Malformed("the file is too short to be a zip")
    end_at = file_size - _END.size
    sign, disk, first_disk, here, count, size, offset, comment = _END.unpack(_at(file, end_at, _END.size))
    if sign != b"PK\5\6" or comment:
        raise Malformed("no zip end record at the end: it is cut off, or something was put behind it")
    values = (disk, first_disk, here, count, size, offset)
    wide = _read_wide_end(file, end_at)
    full = (*[_FULL_16] * 4, *[_FULL_32] * 2)
    if wide is None:
        return _directory(values, end_at)
    if any(value not in (limit, other) for value, limit, other in zip(values, full, wide, strict=True)):
        raise Malformed("the two end records differ")
    return _directory(wide, end_at - _WIDE_LOCATOR.size - _WIDE_END.size)


def _read_wide_end(file: BinaryIO, end_at: int) -> tuple[int, ...] | None:
    """Read the 64-bit end record, which precedes its locator and the plain one; None for a 32-bit zip.

    Return the same values as in the plain record, with 64 bits each.
    """
    locator_at = end_at - _WIDE_LOCATOR.size
    if locator_at < _WIDE_END.size:
        return None
    sign, disk, wide_at, disks = _WIDE_LOCATOR.unpack(_at(file, locator_at, _WIDE_LOCATOR.size))
    if sign != b"PK\6\7":
        return None
    if disk or disks > 1 or wide_at != locator_at - _WIDE_END.size:
        raise Malformed("the 64-bit end record is not where it is said to be")
    sign, length, _, _, *values = _WIDE_END.unpack(_at(file, wide_at, _WIDE_END.size))
    if sign != b"PK\6\6" or length != _WIDE_END.size - 12:
        raise Malformed("the 64-bit end record is wrong")
    return tuple(values)


def _directory(values: tuple[int, ...], end: int) -> Directory:
    """Return the directory that an end record at `end` describes."""
    disk, first_disk, here, count, size, offset = values
    if disk or first_disk or here != count:
        raise Malformed("the zip is one part of several, or lists more entries than it has")
    if offset + size != end:
        raise Malformed("the central directory does not end where the end record begins")
    return Directory(offset, end, count)


def read_central(file: BinaryIO) -> Central:
    """Read the entry of the central directory at the file's position."""
    fields = _CENTRAL.unpack(_exactly(file, _CENTRAL.size))
    sign, _, _, flags, method, _, _, crc, stored_size, size, *lengths = fields
    name_length, extra_length, comment_length, disk, _, attributes, offset = lengths
    if sign != b"PK\1\2" or disk not in (0, _FULL_16):
        raise Malformed("the central directory is damaged")
    if name_length > MAX_RAW_NAME_BYTES:
        raise Malformed(f"a name of {name_length} bytes")
    name = _exactly(file, name_length)
    extra = _exactly(file, extra_length)
    _exactly(file, comment_length)
    _check_other_name(extra, name)
    size, stored_size, offset = _widened(extra, (size, stored_size, offset))
    return Central(name, flags, method, crc, stored_size, size, attributes, offset)


def read_local(file: BinaryIO, offset: int) -> Local:
    """Read the header in front of an entry's data."""
    fields = _LOCAL.unpack(_at(file, offset, _LOCAL.size))
    sign, _, flags, method, _, _, crc, stored_size, size, name_length, extra_length = fields
    if sign != b"PK\3\4":
        raise Malformed("there is no local header where the central directory says")
    name, extra = _exactly(file, name_length), _exactly(file, extra_length)
    _check_other_name(extra, name)
    size, stored_size = _widened(extra, (size, stored_size))
    data_offset = offset + _LOCAL.size + name_length + extra_length
    return Local(name, flags, method, crc, stored_size, size, data_offset)


def is_descriptor(record: bytes, crc: int, stored_size: int, size: int) -> bool:
    """Return whether `record` is a data descriptor of these values: 32 or 64 bits, signature optional."""
    body = record[4:] if len(record) in (16, 24) else record
    if body is not record and not record.startswith(b"PK\7\x08"):
        return False
    layout = {12: "<III", 20: "<IQQ"}.get(len(body))
    return layout is not None and struct.unpack(layout, body) == (crc, stored_size, size)


def _widened(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Replace each 0xFFFFFFFF by its 64-bit value; the ZIP64 extra field has these in the same order."""
    if _FULL_32 not in values:
        return values
    wide = next(_extra_fields(extra, _WIDE_EXTRA), b"")
    found = []
    for value in values:
        if value == _FULL_32:
            if len(wide) < 8:
                raise Malformed("a 64-bit size is missing")
            found.append(int.from_bytes(wide[:8], "little"))
            wide = wide[8:]
        else:
            found.append(value)
    return tuple(found)


def _check_other_name(extra: bytes, name: bytes) -> None:
    """Refuse another name in an extra field, because Info-ZIP and newer Pythons use that name instead."""
    for field in _extra_fields(extra, _NAME_EXTRA):  # Python uses the last of several; all are checked
        other = field[_NAME_EXTRA_HEAD_BYTES:]
        if other not in (b"", name):
            raise Malformed(f"its extra field names it {other[:80].decode(errors='replace')!a} instead")


def _extra_fields(extra: bytes, wanted: int) -> Iterator[bytes]:
    start = 0
    while len(extra) - start >= 4:
        kind, length = struct.unpack_from("<HH", extra, start)
        start += 4 + length
        if start > len(extra):
            raise Malformed("an extra field is longer than its room")
        if kind == wanted:
            yield extra[start - length : start]


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return _exactly(file, size)


def _exactly(file: BinaryIO, size: int) -> bytes:
    found = file.read(size)
    if len(found) != size:
        raise Malformed("the file is cut off")
    return found


# Errors of Python's zipfile for a file that is damaged, or packed by an unknown method.
DAMAGED = (zipfile.BadZipFile, EOFError, NotImplementedError, lzma.LZMAError, zlib.error)
_REPACK = "pack the archive again"
_MAX_RECORDS = 100_000  # limit for one file of weights
_EMPTY_DEFLATED_BYTES = 2  # some tools "compress" directories
# Chunk size of stored data. Each chunk takes the GIL, which a starting server holds while it imports modules:
# with chunks of 1 MiB, unpacking 400 MB at that time took 0.1 s longer.
_COPIED_BYTES = 2**23


class ZipContainer:
    """One zip file, indexed and checked; see `entries.Container`."""

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        self._path = path
        with open_regular(path) as file:
            self._identity = identity_of(file)
            size = os.fstat(file.fileno()).st_size
            self.entries = _Indexer(path, file, Intake(path, limits)).entries(size)

    def walk(self, wanted: Callable[[Entry], bool]) -> Iterator[tuple[Entry, Chunks]]:
        """See `Container.walk`."""
        with open_regular(self._path, self._identity) as file:
            for entry in self.entries:
                if wanted(entry):
                    yield entry, self._checked(entry, _unpacked(file, entry))

    def _checked(self, entry: Entry, chunks: Chunks) -> Chunks:
        crc = size = 0
        try:
            for chunk in chunks:
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
                if size > entry.size:
                    break
                yield chunk
        except (zlib.error, Malformed) as error:
            raise ArchiveError(
                self._path, f"the data is damaged: {error}", _REPACK, entry=entry.name
            ) from error
        if size != entry.size:
            lie = f"unpacks to {'more' if size > entry.size else 'less'} than the {entry.size} bytes declared"
            raise ArchiveError(self._path, lie, _REPACK, entry=entry.name)
        if crc != entry.crc:
            reason = f"the CRC is {crc:08x}, not the {entry.crc:08x} recorded"
            raise ArchiveError(self._path, reason, _REPACK, entry=entry.name)


def check_zip(file: BinaryIO, size: int, max_entries: int = _MAX_RECORDS) -> None:
    """Raise ArchiveError, with the cause in `reason`, when two readers could disagree about a zip file.

    Args:
        file: the whole file, which need not have a name.
        size: its size in bytes.
        max_entries: a file with more entries is refused, too, before any of them is read.
    """
    path = Path("model")
    _Indexer(path, file, Intake(path, ArchiveLimits(max_entries=max_entries))).entries(size)


class _Indexer:
    """Reads and checks the records of one open file."""

    def __init__(self, path: Path, file: BinaryIO, intake: Intake) -> None:
        self._path = path
        self._file = file
        self._intake = intake

    def entries(self, file_size: int) -> tuple[Entry, ...]:
        """Return all files, in the order of their data."""
        try:
            directory = read_directory(self._file, file_size)
            self._intake.check_count(directory.entries)
            centrals = self._centrals(directory)
        except Malformed as error:
            raise ArchiveError(self._path, str(error), _REPACK) from error
        self._take_all(centrals, directory)
        return self._intake.finish()

    def _centrals(self, directory: Directory) -> list[Central]:
        self._file.seek(directory.offset)
        centrals = [read_central(self._file) for _ in range(directory.entries)]
        if self._file.tell() != directory.end:
            raise Malformed("the central directory is not as long as the end record says")
        return sorted(centrals, key=lambda central: central.header_offset)

    def _take_all(self, centrals: list[Central], directory: Directory) -> None:
        cursor = 0
        for number, central in enumerate(centrals):
            last = number + 1 == len(centrals)
            limit = directory.offset if last else centrals[number + 1].header_offset
            name = self._name(central)
            try:
                cursor = self._take(name, central, cursor, limit)
            except Malformed as error:
                raise self._intake.refuse(name, str(error), _REPACK) from error
        if cursor != directory.offset:
            raise ArchiveError(self._path, "bytes that belong to no entry", _REPACK)

    def _name(self, central: Central) -> str:
        try:
            name = central.raw_name.decode()
        except UnicodeDecodeError as error:
            shown = central.raw_name.decode("latin-1")
            raise self._intake.refuse(shown, "the name is not UTF-8", _REPACK) from error
        # A leading "./" is from a list of names that `find` made; "./" alone is the folder itself.
        return name if name == "./" else name.removeprefix("./")

    def _take(self, name: str, central: Central, cursor: int, limit: int) -> int:
        """Check one entry, which must begin at `cursor`, and return its end, which is at most `limit`."""
        if central.header_offset != cursor:
            overlaps = central.header_offset < cursor
            raise Malformed("it overlaps another entry" if overlaps else "bytes before it belong to no entry")
        _check_kind(name, central)
        local = read_local(self._file, cursor)
        _check_agreement(local, central)
        end = local.data_offset + central.stored_size
        if central.flags & DESCRIPTOR_FLAG and end <= limit:
            self._file.seek(end)
            if not is_descriptor(self._file.read(min(limit - end, 25)), *central[3:6]):
                raise Malformed("what follows its data is not the data descriptor that belongs there")
            end = limit
        if end > limit:
            raise Malformed("it overlaps the next entry")
        self._keep(name, central, local)
        return end

    def _keep(self, name: str, central: Central, local: Local) -> None:
        if name.endswith("/"):
            if central.size or central.stored_size > _EMPTY_DEFLATED_BYTES:
                raise Malformed("a directory has data")
            if name != "./":
                self._intake.add_directory(name[:-1])
            return
        method: Method = "deflated" if central.method == DEFLATED else "stored"
        self._intake.add(
            Entry(name, central.size, central.stored_size, method, local.data_offset, central.crc)
        )


def _check_kind(name: str, central: Central) -> None:
    if central.flags & ENCRYPTED_FLAGS:
        raise Malformed("it is encrypted")
    if central.method not in (STORED, DEFLATED) or central.flags & PATCHED_FLAG:
        raise Malformed(f"unknown compression method {central.method}; only stored and deflated are read")
    if central.method == STORED and central.size != central.stored_size:
        raise Malformed("it is stored, but its two sizes differ")
    kind = stat.S_IFMT(central.attributes >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise Malformed("it is a link" if kind == stat.S_IFLNK else "it is a device, FIFO or socket")
    if kind == stat.S_IFDIR and not name.endswith("/"):
        raise Malformed("it is marked as a directory but named like a file")


def _check_agreement(local: Local, central: Central) -> None:
    """Raise Malformed when the local header contradicts the central directory."""
    if local.raw_name.isascii():
        # Python 3.14's zipfile clears the flag in the central directory alone when an entry is appended.
        local = local._replace(flags=local.flags & ~_UTF8_FLAG)
        central = central._replace(flags=central.flags & ~_UTF8_FLAG)
    same = ("raw_name", "flags", "method")
    values = ("crc", "stored_size", "size")
    wrong = [field for field in same if getattr(local, field) != getattr(central, field)]
    for field in values:
        allowed = {getattr(central, field)}
        if central.flags & DESCRIPTOR_FLAG:
            allowed.add(0)  # unknown when the header was written; the descriptor has the value
        if getattr(local, field) not in allowed:
            wrong.append(field)
    if wrong:
        raise Malformed(f"its local header differs from the central directory in {', '.join(wrong)}")


def _unpacked(file: BinaryIO, entry: Entry) -> Chunks:
    """Yield the entry's bytes in chunks; memory stays near the size of one chunk for any data."""
    file.seek(entry.offset or 0)
    if entry.method == "stored":
        yield from _packed(file, entry.stored_size, _COPIED_BYTES)
        return
    packed = _packed(file, entry.stored_size, CHUNK_BYTES)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    for pending in packed:
        while pending:
            if inflater.eof:
                raise Malformed("there is something behind the compressed data")
            yield inflater.decompress(pending, CHUNK_BYTES)
            pending = inflater.unconsumed_tail or inflater.unused_data  # noqa: PLW2901  # the rest of it
    while not inflater.eof:  # input is used up; the limit above may have held output back
        rest = inflater.decompress(b"", CHUNK_BYTES)
        if not rest and not inflater.eof:
            raise Malformed("the compressed data is cut off")
        yield rest


def _packed(file: BinaryIO, size: int, chunk_bytes: int) -> Chunks:
    while size:
        chunk = file.read(min(size, chunk_bytes))
        if not chunk:
            raise Malformed("the file is cut off")
        size -= len(chunk)
        yield chunk
