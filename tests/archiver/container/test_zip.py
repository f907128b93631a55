"""Zip files on which two readers could disagree, or that want to do harm."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.container.entries import ArchiveLimits
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import open_archive

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")


def refusal(path: Path, target: Path, limits: ArchiveLimits | None = None) -> str:
    """What is said on opening or unpacking; nothing may be left behind."""
    with pytest.raises(ArchiveError) as caught:
        open_archive(path, limits).extract(target)
    assert not target.exists()
    assert [name for name in os.listdir(target.parent) if name.startswith(".torchere")] == []
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def patched(path: Path, where: bytes, field_offset: int, value: bytes, nth: int = 0) -> Path:
    """Overwrite bytes at an offset from the nth record that begins with `where`."""
    data = bytearray(path.read_bytes())
    at = -1
    for _ in range(nth + 1):
        at = data.index(where, at + 1)
    data[at + field_offset : at + field_offset + len(value)] = value
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/x", "C:x", "a\\x", "a\nb", "x/./y", "x//y", "n" * 300, "../x/"]
)
def test_names_that_leave_the_archive_are_refused(
    zip_of: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    assert "entry" in refusal(zip_of((name, b"")), tmp_path / "t")


def test_names_may_begin_with_a_dot_and_a_slash_as_find_writes_them(
    zip_of: Callable[..., Path], tmp_path: Path
) -> None:
    archive = open_archive(zip_of(("./", b""), ("./a/b.txt", b"inside"), ("c", b"beside")))
    assert [entry.name for entry in archive.entries] == ["a/b.txt", "c"]
    assert (archive.extract(tmp_path / "t") / "a" / "b.txt").read_bytes() == b"inside"


def test_one_file_under_two_spellings_of_its_name_is_refused(
    zip_of: Callable[..., Path], tmp_path: Path
) -> None:
    assert "entry" in refusal(zip_of(("x", b"1"), ("./x", b"2")), tmp_path / "t")
    assert "entry" in refusal(zip_of(("././x", b"2")), tmp_path / "u")


def test_a_name_with_nul_is_refused(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("aXb", b""))
    path.write_bytes(path.read_bytes().replace(b"aXb", b"a\0b"))
    assert "NUL" in refusal(path, tmp_path / "t")


def unicode_path(plain: bytes, name: bytes) -> bytes:
    """The extra field in which Info-ZIP writes a name of UTF-8 beside the plain one."""
    return struct.pack("<HHBI", 0x7075, 5 + len(name), 1, zlib.crc32(plain)) + name


@pytest.mark.parametrize("names", [(b"handler.py",), (b"notes.txt", b"handler.py"), (b"", b"handler.py")])
@pytest.mark.parametrize("where", ["both headers", "the directory"])
def test_a_second_name_in_an_extra_field_is_refused(
    tmp_path: Path, where: str, names: tuple[bytes, ...]
) -> None:
    path = tmp_path / "a.mar"
    field = b"".join(unicode_path(b"notes.txt", name) for name in names)
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo("notes.txt")
        entry.extra = field if where == "both headers" else b""
        archive.writestr(entry, b"text")
        entry.extra = field  # the directory is written at the end
    assert "names it 'handler.py' instead" in refusal(path, tmp_path / "t")


def test_a_second_name_that_says_the_same_is_allowed(tmp_path: Path) -> None:
    name = "\u00fcber.txt"
    entry = zipfile.ZipInfo(name)
    entry.extra = unicode_path(name.encode(), name.encode())
    with zipfile.ZipFile(tmp_path / "a.mar", "w") as archive:
        archive.writestr(entry, b"text")
    assert [entry.name for entry in open_archive(tmp_path / "a.mar").entries] == [name]


def test_a_name_that_is_not_utf8_is_refused(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("aXb", b""))
    path.write_bytes(path.read_bytes().replace(b"aXb", b"a\xffb"))
    assert "not UTF-8" in refusal(path, tmp_path / "t")


@pytest.mark.parametrize(
    ("one", "other"), [("a", "a"), ("a", "A"), ("é", "e\u0301"), ("a", "a/b"), ("A/b", "a")]
)
def test_entries_that_are_one_file_somewhere_are_refused(
    zip_of: Callable[..., Path], tmp_path: Path, one: str, other: str
) -> None:
    assert refusal(zip_of((one, b"1"), (other, b"2")), tmp_path / "t")


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (stat.S_IFLNK, "link"),
        (stat.S_IFIFO, "FIFO"),
        (stat.S_IFCHR, "device"),
        (stat.S_IFSOCK, "socket"),
        (stat.S_IFDIR, "named like a file"),
    ],
)
def test_what_is_not_a_plain_file_is_refused(
    zip_of: Callable[..., Path], tmp_path: Path, mode: int, said: str
) -> None:
    info = zipfile.ZipInfo("x")
    info.create_system = 3
    info.external_attr = (mode | 0o777) << 16
    assert said in refusal(zip_of((info, b"/etc/passwd")), tmp_path / "t")


def test_modes_of_the_archive_are_not_used(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    info = zipfile.ZipInfo("x")
    info.external_attr = (stat.S_IFREG | 0o4777) << 16
    folder = open_archive(zip_of((info, b"data"))).extract(tmp_path / "t")
    assert stat.S_IMODE((folder / "x").stat().st_mode) & 0o7111 == 0


def test_an_encrypted_entry_is_refused(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("x", b"data"))
    patched(path, b"PK\3\4", 6, b"\1\0")
    assert "encrypted" in refusal(patched(path, b"PK\1\2", 8, b"\1\0"), tmp_path / "t")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_unknown_compression_is_refused(zip_of: Callable[..., Path], tmp_path: Path, method: int) -> None:
    assert "unknown compression method" in refusal(zip_of(("x", b"data"), method=method), tmp_path / "t")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_wrong_crc_is_refused(zip_of: Callable[..., Path], tmp_path: Path, method: int) -> None:
    path = zip_of(("x", b"data"), method=method)
    patched(path, b"PK\3\4", 14, b"abcd")
    assert "CRC" in refusal(patched(path, b"PK\1\2", 16, b"abcd"), tmp_path / "t")


@pytest.mark.parametrize(
    ("field_offset", "value", "said"),
    [
        (6, b"\0\x10", "flags"),
        (8, b"\0\0", "method"),
        (14, b"abcd", "crc"),
        (14, bytes(12), "crc, stored_size, size"),
        (18, b"\0\0\0\1", "stored_size"),
        (22, b"\0\0\0\1", "size"),
        (30, b"y", "raw_name"),
    ],
)
def test_a_local_header_that_says_something_else_is_refused(
    zip_of: Callable[..., Path], tmp_path: Path, field_offset: int, value: bytes, said: str
) -> None:
    path = patched(zip_of(("x", b"data" * 9)), b"PK\3\4", field_offset, value)
    assert f"differs from the central directory in {said}" in refusal(path, tmp_path / "t")


@pytest.mark.parametrize(("name", "is_read"), [("x", True), ("é", False)])
def test_the_flag_of_utf_8_may_differ_where_the_name_is_ascii(
    zip_of: Callable[..., Path], tmp_path: Path, name: str, is_read: bool
) -> None:
    flags = b"\0\x08" if is_read else b"\0\0"  # of the local header alone, as Python 3.14 leaves them
    path = patched(zip_of((name, b"data")), b"PK\3\4", 6, flags)
    if is_read:
        assert (open_archive(path).extract(tmp_path / "t") / name).read_bytes() == b"data"
    else:
        assert "in flags" in refusal(path, tmp_path / "t")


@pytest.mark.parametrize("size", [1, 35, 37, 10_000_000])
def test_a_declared_size_that_is_a_lie_is_caught_while_unpacking(
    zip_of: Callable[..., Path], tmp_path: Path, size: int
) -> None:
    path = zip_of(("x", b"data" * 9))
    patched(path, b"PK\3\4", 22, size.to_bytes(4, "little"))
    said = refusal(patched(path, b"PK\1\2", 24, size.to_bytes(4, "little")), tmp_path / "t")
    assert f"than the {size} bytes declared" in said


def test_a_bomb_stops_soon_after_the_size_it_declared(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("x", bytes(50_000_000)))
    patched(path, b"PK\3\4", 22, b"\x10\0\0\0")
    patched(path, b"PK\1\2", 24, b"\x10\0\0\0")
    taken = 0
    with pytest.raises(ArchiveError, match="more than the 16 bytes"):
        for _, chunks in open_archive(path).chunks():
            for chunk in chunks:
                taken += len(chunk)
    assert taken <= 16


@pytest.mark.parametrize(
    ("limits", "said"),
    [(ArchiveLimits(max_entries=2), "more than 2 entries"), (ArchiveLimits(max_total_bytes=29), "29 bytes")],
)
def test_limits_hold(zip_of: Callable[..., Path], tmp_path: Path, limits: ArchiveLimits, said: str) -> None:
    path = zip_of(*((f"f{number}", b"0123456789") for number in range(3)))
    assert said in refusal(path, tmp_path / "t", limits)


def test_overlapping_entries_are_refused(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("a", b"1"), ("b", b"2"))
    assert "overlaps" in refusal(patched(path, b"PK\1\2", 42, bytes(4), nth=1), tmp_path / "t")


def test_entries_that_share_one_piece_of_data_are_refused(tmp_path: Path) -> None:
    """The quoted-overlap bomb: one entry's data holds the next entry."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("inner", b"x" * 100)
    local = inner.getvalue()[: inner.getvalue().index(b"PK\1\2")]
    path = tmp_path / "overlap.mar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("outer", local)
    data = path.read_bytes()
    at = data.index(b"PK\1\2")
    central = data[at : data.index(b"PK\5\6")]
    inner_central = bytearray(inner.getvalue()[inner.getvalue().index(b"PK\1\2") : -22])
    inner_central[42:46] = (35).to_bytes(4, "little")
    directory = central + bytes(inner_central)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(directory), at, 0)
    path.write_bytes(data[:at] + directory + end)
    assert "overlaps" in refusal(path, tmp_path / "t")


def test_bytes_before_between_or_behind_the_entries_are_refused(
    zip_of: Callable[..., Path], tmp_path: Path
) -> None:
    path = zip_of(("a", b"1"), ("b", b"2"))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    assert "put behind it" in refusal(path, tmp_path / "t")
    path.write_bytes(b"#!/bin/sh\n" + whole)
    assert "neither zip nor gzip" in refusal(path, tmp_path / "t")
    path.write_bytes(b"PK\3\4" + whole)
    assert "the central directory does not end" in refusal(path, tmp_path / "t")


def test_an_entry_that_only_a_sequential_reader_would_see_is_refused(
    zip_of: Callable[..., Path], tmp_path: Path
) -> None:
    path = zip_of(("hidden", b"1"), ("b", b"2"))
    data = path.read_bytes()
    at = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", at + 1)
    directory = data[second : data.index(b"PK\5\6")]
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), at, 0)
    path.write_bytes(data[:at] + directory + end)
    assert "belong to no entry" in refusal(path, tmp_path / "t")


@pytest.mark.parametrize("keep", [0, 3, 4, 21, 30, 60, 100])
def test_a_file_cut_off_anywhere_is_refused(zip_of: Callable[..., Path], tmp_path: Path, keep: int) -> None:
    path = zip_of(("x", b"data" * 100))
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(path, tmp_path / "t")


def test_more_data_behind_the_compressed_data_is_refused(tmp_path: Path) -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    packed = packer.compress(b"data") + packer.flush() + b"hidden"
    crc = zlib.crc32(b"data")
    local = LOCAL.pack(b"PK\3\4", 20, 0, 8, 0, 33, crc, len(packed), 4, 1, 0) + b"x" + packed
    central = CENTRAL.pack(b"PK\1\2", 20, 20, 0, 8, 0, 33, crc, len(packed), 4, 1, 0, 0, 0, 0, 0, 0) + b"x"
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local), 0)
    path = tmp_path / "x.mar"
    path.write_bytes(local + central + end)
    assert "behind the compressed data" in refusal(path, tmp_path / "t")


def test_damaged_compressed_data_is_refused(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("x", b"data" * 100))
    assert "damaged" in refusal(patched(path, b"PK\3\4", 31, b"\xff\xff"), tmp_path / "t")


def test_a_file_replaced_after_it_was_opened_is_refused(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("x", b"data"))
    archive = open_archive(path)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    os.replace(other, path)
    with pytest.raises(ArchiveError, match="changed after it was opened"):
        archive.extract(tmp_path / "t")


class _Unseekable(io.RawIOBase):
    """A pipe: zipfile writes data descriptors to it."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


@pytest.mark.parametrize("wide", [False, True])
def test_archives_written_to_a_pipe_are_read(tmp_path: Path, wide: bool) -> None:
    pipe = _Unseekable()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a", "b"):
            with archive.open(name, "w", force_zip64=wide) as entry:
                entry.write(b"data" * 50)
    path = tmp_path / "pipe.mar"
    path.write_bytes(pipe.data)
    folder = open_archive(path).extract(tmp_path / "t")
    assert (folder / "b").read_bytes() == b"data" * 50
    damaged = tmp_path / "damaged.mar"
    damaged.write_bytes(pipe.data.replace(b"PK\7\x08", b"PK\7\x09", 1))
    assert "data descriptor" in refusal(damaged, tmp_path / "u")


def test_directories_in_a_zip_are_allowed(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = open_archive(zip_of(("d/", b""), ("d/x", b"1"))).extract(tmp_path / "t")
    assert (folder / "d" / "x").read_bytes() == b"1"


def test_the_64_bit_end_record_is_read_and_must_agree(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    path = zip_of(("x", b"data"))
    data = path.read_bytes()
    at, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, end - at, at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    path.write_bytes(data[:end] + wide + locator + data[end:])
    assert [entry.name for entry in open_archive(path).entries] == ["x"]
    assert "end records differ" in refusal(patched(path, b"PK\5\6", 16, b"\1\0\0\0"), tmp_path / "t")
