"""Single records of a zip, put together byte by byte."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.container.entries import ArchiveLimits
from torchere.archiver.container.zip import (
    Malformed,
    _extra_fields,
    check_zip,
    is_descriptor,
    read_central,
    read_local,
)
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import open_archive

DATA = bytes(3_000_000)
FULL = 0xFFFFFFFF


def local(name: bytes = b"x", extra: bytes = b"", packed: bytes = b"", crc: int = 0, size: int = 0) -> bytes:
    fields = (b"PK\3\4", 20, 0, 8, 0, 33, crc, len(packed), size, len(name), len(extra))
    return struct.pack("<4s5H3I2H", *fields) + name + extra + packed


def central(
    name: bytes = b"x",
    *,
    extra: bytes = b"",
    sizes: tuple[int, int] = (0, 0),
    crc: int = 0,
    offset: int = 0,
    disk: int = 0,
) -> bytes:
    fields = (b"PK\1\2", 20, 20, 0, 8, 0, 33, crc, *sizes, len(name), len(extra), 0, disk, 0, 0, offset)
    return struct.pack("<4s6H3I5H2I", *fields) + name + extra


def end(count: int, size: int, offset: int, disk: int = 0) -> bytes:
    return struct.pack("<4s4H2IH", b"PK\5\6", disk, 0, count, count, size, offset, 0)


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def zip_with(tmp_path: Path, packed: bytes, size: int = len(DATA)) -> Path:
    crc = zlib.crc32(DATA)
    front = local(packed=packed, crc=crc, size=size)
    directory = central(sizes=(len(packed), size), crc=crc)
    path = tmp_path / "x.mar"
    path.write_bytes(front + directory + end(1, len(directory), len(front)))
    return path


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 2**20 + 100, 3 * 2**20])
def test_data_that_packs_extremely_well_is_unpacked_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.mar"
    data = bytes(size)
    packed, crc = deflated(data), zlib.crc32(data)
    front = local(packed=packed, crc=crc, size=size)
    directory = central(sizes=(len(packed), size), crc=crc)
    path.write_bytes(front + directory + end(1, len(directory), len(front)))
    assert (open_archive(path).extract(tmp_path / "t") / "x").read_bytes() == data


@pytest.mark.parametrize("cut", [1, 100, 2900])
def test_a_compressed_stream_without_its_end_is_refused(tmp_path: Path, cut: int) -> None:
    path = zip_with(tmp_path, deflated(DATA)[:-cut])
    with pytest.raises(ArchiveError, match="cut off"):
        open_archive(path).verify()


@pytest.mark.parametrize(
    "record",
    [
        central(name=b"n" * 5000),
        central(sizes=(FULL, 0)),
        central(sizes=(FULL, 0), extra=struct.pack("<HH", 1, 9) + bytes(8)),
        central(sizes=(FULL, FULL), extra=struct.pack("<HHQ", 1, 8, 7)),
        central(disk=3),
        central()[:-1],
        b"PK\1\3" + central()[4:],
        b"",
    ],
    ids=[
        "long name",
        "no extra",
        "extra too long",
        "extra too short",
        "disk",
        "cut off",
        "signature",
        "empty",
    ],
)
def test_a_damaged_entry_of_the_directory_is_malformed(record: bytes) -> None:
    with pytest.raises(Malformed):
        read_central(io.BytesIO(record))


def test_64_bit_values_come_from_the_extra_field_in_its_order() -> None:
    other = struct.pack("<HHI", 0x5455, 4, 0)
    extra = other + struct.pack("<HHQQQ", 1, 24, 2**40, 2**33, 2**34)
    found = read_central(io.BytesIO(central(sizes=(FULL, FULL), offset=FULL, extra=extra)))
    assert (found.size, found.stored_size, found.header_offset) == (2**40, 2**33, 2**34)
    only_offset = struct.pack("<HHQ", 1, 8, 2**35)
    found = read_central(io.BytesIO(central(sizes=(3, 4), offset=FULL, extra=only_offset)))
    assert (found.stored_size, found.size, found.header_offset) == (3, 4, 2**35)


class Sliced(bytes):
    """Counts the bytes of its slices, and of theirs."""

    total = 0

    def __getitem__(self, key: Any) -> Any:
        Sliced.total += len(found := Sliced(super().__getitem__(key)))
        return found


def test_many_extra_fields_are_not_copied_for_each_of_them() -> None:
    extra = struct.pack("<HH", 7, 0) * 1000 + struct.pack("<HH", 1, 2) + b"ab"
    assert list(_extra_fields(Sliced(extra), 1)) == [b"ab"]
    assert Sliced.total == 2


def test_a_local_header_must_be_one() -> None:
    with pytest.raises(Malformed, match="no local header"):
        read_local(io.BytesIO(b"PK\3\5" + local()[4:]), 0)


@pytest.mark.parametrize("layout", ["<III", "<IQQ"])
@pytest.mark.parametrize("signature", [b"", b"PK\7\x08"])
def test_every_kind_of_data_descriptor_is_known(layout: str, signature: bytes) -> None:
    record = signature + struct.pack(layout, 7, 8, 9)
    assert is_descriptor(record, 7, 8, 9)
    assert not is_descriptor(record, 7, 8, 10)
    assert not is_descriptor(record + b"\0", 7, 8, 9)
    assert not is_descriptor(record[:-1], 7, 8, 9)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (end(1, 47, 31, disk=1), "one part of several"),
        (end(2, 47, 31), "cut off|damaged"),
        (end(0, 47, 31), "not as long"),
        (end(1, 46, 31), "does not end"),
        (struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1) + end(1, 47, 31), "not where it is said"),
        (bytes(56) + struct.pack("<4sIQI", b"PK\6\7", 0, 78, 1) + end(1, 47, 31), "is wrong"),
    ],
)
def test_an_end_record_that_does_not_fit_is_refused(tmp_path: Path, tail: bytes, said: str) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(local() + central() + tail)
    assert len(local()) == 31
    with pytest.raises(ArchiveError, match=said):
        open_archive(path)


def test_a_file_too_short_for_a_64_bit_end_record_is_not_asked_for_one(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(b"PK\3\4" + end(0, 0, 4))
    with pytest.raises(ArchiveError, match="belong to no entry"):
        open_archive(path)
    path.write_bytes(b"PK\3\4")
    with pytest.raises(ArchiveError, match="too short"):
        open_archive(path)


def test_an_entry_behind_the_last_that_only_a_sequential_reader_would_see_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(local() + local(b"y") + central() + end(1, 47, 62))
    with pytest.raises(ArchiveError, match="belong to no entry"):
        open_archive(path)


def test_a_directory_with_data_is_refused(zip_of: Callable[..., Path]) -> None:
    path = zip_of(("dX", b"hidden"), method=zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"dX", b"d/"))
    with pytest.raises(ArchiveError, match="a directory has data"):
        open_archive(path)


def test_an_entry_whose_descriptor_is_missing_is_refused(tmp_path: Path) -> None:
    flagged = [bytearray(local()), bytearray(central())]
    flagged[0][6] = flagged[1][8] = 8
    path = tmp_path / "x.mar"
    path.write_bytes(b"".join(flagged) + end(1, 47, 31))
    with pytest.raises(ArchiveError, match="not the data descriptor"):
        open_archive(path)


def test_a_stored_entry_of_two_sizes_is_refused_before_it_is_read(zip_of: Callable[..., Path]) -> None:
    path = zip_of(("x", b"data"), method=zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[22] = data[data.index(b"PK\1\2") + 24] = 3
    with pytest.raises(ArchiveError, match="two sizes differ"):
        check_zip(io.BytesIO(data), len(data))


def test_a_directory_of_too_many_entries_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(local() + central() + end(3, 47, 31))
    with pytest.raises(ArchiveError, match="more than 2 entries"):
        open_archive(path, ArchiveLimits(max_entries=2))


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(zip_of: Callable[..., Path]) -> None:
    path = zip_of(("x", b"first"), ("y", bytes(2**20)), method=zipfile.ZIP_STORED)
    read = open_archive(path).chunks()
    assert b"".join(next(read)[1]) == b"first"
    os.truncate(path, 2**19)
    with pytest.raises(ArchiveError, match="cut off"):
        list(next(read)[1])


def test_the_comment_of_an_entry_is_passed_over(zip_of: Callable[..., Path]) -> None:
    info = zipfile.ZipInfo("x")
    info.comment = b"added by hand"
    path = zip_of((info, b"1"), ("y", b"2"))
    assert [entry.name for entry in open_archive(path).entries] == ["x", "y"]
