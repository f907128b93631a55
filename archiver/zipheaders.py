"""The records of a zip file as bytes on disk, read strictly (APPNOTE.TXT 6.3.10, sections 4.3 to 4.5)."""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

ENCRYPTED_FLAGS = 0x0001 | 0x0040 | 0x2000  # encrypted, strongly encrypted, masked headers
PATCHED_FLAG = 0x0020
DESCRIPTOR_FLAG = 0x0008  # CRC and sizes follow the data
STORED, DEFLATED = 0, 8
MAX_RAW_NAME_BYTES = 4096  # keeps the index of a full archive small; names.py allows much less

_END = struct.Struct("<4s4H2IH")
_WIDE_END = struct.Struct("<4sQ2H2I4Q")
_WIDE_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_WIDE_EXTRA = 0x0001
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF


class Malformed(ValueError):
    """The bytes are not a zip as this package accepts it; the text says what is wrong."""


class Directory(NamedTuple):
    """Where the central directory is and how many entries it lists."""

    offset: int
    end: int
    entries: int


class _WideEnd(NamedTuple):
    values: tuple[int, ...]  # as in the plain end record, with 64 bits each
    offset: int


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
    """Find the central directory: it must end exactly where the end records begin, and these end the file."""
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
    if any(
        value not in (limit, other) for value, limit, other in zip(values, full, wide.values, strict=True)
    ):
        raise Malformed("the two end records differ")
    return _directory(wide.values, wide.offset)


def _read_wide_end(file: BinaryIO, end_at: int) -> _WideEnd | None:
    """Read the 64-bit end record that stands, with its locator, in front of the plain one; None without."""
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
    return _WideEnd(tuple(values), wide_at)


def _directory(values: tuple[int, ...], end: int) -> Directory:
    """The directory that an end record at `end` describes."""
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
    size, stored_size, offset = _widened(extra, (size, stored_size, offset))
    return Central(name, flags, method, crc, stored_size, size, attributes, offset)


def read_local(file: BinaryIO, offset: int) -> Local:
    """Read the header in front of an entry's data."""
    fields = _LOCAL.unpack(_at(file, offset, _LOCAL.size))
    sign, _, flags, method, _, _, crc, stored_size, size, name_length, extra_length = fields
    if sign != b"PK\3\4":
        raise Malformed("there is no local header where the central directory says")
    name = _exactly(file, name_length)
    size, stored_size = _widened(_exactly(file, extra_length), (size, stored_size))
    data_offset = offset + _LOCAL.size + name_length + extra_length
    return Local(name, flags, method, crc, stored_size, size, data_offset)


def is_descriptor(record: bytes, crc: int, stored_size: int, size: int) -> bool:
    """Say if `record` is a data descriptor with these values: 32 or 64 bits, with or without signature."""
    body = record[4:] if len(record) in (16, 24) else record
    if body is not record and not record.startswith(b"PK\7\x08"):
        return False
    layout = {12: "<III", 20: "<IQQ"}.get(len(body))
    return layout is not None and struct.unpack(layout, body) == (crc, stored_size, size)


def _widened(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Replace every value that is full by the 64-bit one of the extra field, which has them in this order."""
    if _FULL_32 not in values:
        return values
    wide = _extra_field(extra, _WIDE_EXTRA)
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


def _extra_field(extra: bytes, wanted: int) -> bytes:
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if length > len(extra) - 4:
            raise Malformed("an extra field is longer than its room")
        if kind == wanted:
            return extra[4 : 4 + length]
        extra = extra[4 + length :]
    return b""


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return _exactly(file, size)


def _exactly(file: BinaryIO, size: int) -> bytes:
    found = file.read(size)
    if len(found) != size:
        raise Malformed("the file is cut off")
    return found
