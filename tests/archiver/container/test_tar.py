"""Gzip-packed tars, honest and otherwise."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.container.entries import ArchiveLimits
from torchere.archiver.container.tar import (
    MAX_EXTENDED_BYTES,
    MAX_EXTENDED_IN_A_ROW,
    MAX_PADDING_BYTES,
    MAX_PAX_RECORDS,
)
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import open_archive

Maker = Callable[..., Path]


def refusal(path: Path, target: Path, limits: ArchiveLimits | None = None) -> str:
    with pytest.raises(ArchiveError) as caught:
        open_archive(path, limits).extract(target)
    assert not target.exists()
    assert [name for name in os.listdir(target.parent) if name.startswith(".torchere")] == []
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "")  # which has the name of the test


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_folder_everything_lies_in_is_dropped(tgz_of: Maker, tmp_path: Path, style: int) -> None:
    path = tgz_of(
        (member("mlp", tarfile.DIRTYPE), b""), ("mlp/a", b"1"), ("mlp/d/b", b"2" * 2000), style=style
    )
    folder = open_archive(path).extract(tmp_path / "t")
    assert (folder / "a").read_bytes() == b"1"
    assert (folder / "d" / "b").read_bytes() == b"2" * 2000


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["a", "d/b"], ["a", "d/b"]),
        (["./a", "./d/b"], ["a", "d/b"]),
        (["./m/a", "./m/d/b"], ["a", "d/b"]),
        (["MAR-INF/MANIFEST.txt"], ["MAR-INF/MANIFEST.txt"]),
        (["only"], ["only"]),
    ],
)
def test_files_that_lie_in_no_common_folder_keep_their_names(
    tgz_of: Maker, names: list[str], read: list[str]
) -> None:
    assert [entry.name for entry in open_archive(tgz_of(*((name, b"") for name in names))).entries] == read


def test_the_directory_that_was_packed_by_its_dot_is_no_entry(tgz_of: Maker) -> None:
    path = tgz_of((member(".", tarfile.DIRTYPE), b""), ("./a", b"1"), (member("./d", tarfile.DIRTYPE), b""))
    assert [entry.name for entry in open_archive(path).entries] == ["a"]


@pytest.mark.parametrize("name", [".", "./"])
def test_a_file_that_has_the_name_of_the_root_is_refused(tgz_of: Maker, tmp_path: Path, name: str) -> None:
    assert "the name " in refusal(tgz_of((name, b"1"), ("./a", b"1")), tmp_path / "t")


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read(tgz_of: Maker, tmp_path: Path, style: int) -> None:
    name = "m/" + "/".join(["ordner-ü" * 10] * 5)
    folder = open_archive(tgz_of((name, b"data"), ("m/x", b""), style=style)).extract(tmp_path / "t")
    assert (folder / name[2:]).read_bytes() == b"data"


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_directory_may_have_a_long_name(tgz_of: Maker, style: int) -> None:
    name = "m/" + "d" * 200
    path = tgz_of((member(name, tarfile.DIRTYPE), b""), (f"{name}/a", b""), ("m/b", b""), style=style)
    assert [entry.name for entry in open_archive(path).entries] == [f"{name[2:]}/a", "b"]


def test_a_file_whose_name_ends_like_a_directory_is_refused(tgz_of: Maker, tmp_path: Path) -> None:
    assert "empty or '.' part" in refusal(tgz_of(("m/a/", b"1"), ("m/b", b"1")), tmp_path / "t")


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("name", ["../x", "m/../../x", "/etc/x", "m/a\\b", "m/C:/../x"])
def test_names_that_leave_the_archive_are_refused(
    tgz_of: Maker, tmp_path: Path, name: str, kind: bytes
) -> None:
    assert "entry" in refusal(tgz_of(("m/a", b"1"), (member(name, kind), b"")), tmp_path / "t")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.FIFOTYPE, "FIFO"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.GNUTYPE_SPARSE, "sparse"),
        (tarfile.CONTTYPE, "unknown type"),
    ],
)
def test_what_is_not_a_plain_file_is_refused(tgz_of: Maker, tmp_path: Path, kind: bytes, said: str) -> None:
    assert said in refusal(tgz_of((member("m/x", kind, linkname="/etc/passwd"), b"")), tmp_path / "t")


@pytest.mark.parametrize(("one", "other"), [("m/a", "m/a"), ("m/a", "m/A"), ("m/a", "m/a/b"), ("m", "m/a")])
def test_entries_that_are_one_file_somewhere_are_refused(
    tgz_of: Maker, tmp_path: Path, one: str, other: str
) -> None:
    assert refusal(tgz_of((one, b"1"), (other, b"2")), tmp_path / "t")


@pytest.mark.parametrize(
    "limits", [ArchiveLimits(max_entries=2), ArchiveLimits(max_total_bytes=29)], ids=["entries", "bytes"]
)
def test_limits_hold(tgz_of: Maker, tmp_path: Path, limits: ArchiveLimits) -> None:
    path = tgz_of(*((f"m/{number}", b"0123456789") for number in range(3)))
    assert "more than 2 entries" in (said := refusal(path, tmp_path / "t", limits)) or "29 bytes" in said


def test_directories_are_counted(tgz_of: Maker, tmp_path: Path) -> None:
    path = tgz_of(*((member(f"m/{number}", tarfile.DIRTYPE), b"") for number in range(3)))
    assert "more than 2 entries" in refusal(path, tmp_path / "t", ArchiveLimits(max_entries=2))
    assert open_archive(path, ArchiveLimits(max_entries=3)).entries == ()


CHANGES = {
    "larger": [("m/x", 600), ("m/y", 0)],
    "one file more": [("m/x", 500), ("m/y", 0), ("m/z", 0)],
    "one file less": [("m/x", 500)],
}


@pytest.mark.parametrize("files", CHANGES.values(), ids=CHANGES)
def test_a_file_rewritten_in_its_place_is_refused(
    tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path, files: list[tuple[str, int]]
) -> None:
    path = tgz_of_bytes(b"")

    def rewrite(*sizes: tuple[str, int]) -> None:
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as archive:  # filled up to one length
            for name, size in sizes:
                archive.addfile(member(name, size=size), io.BytesIO(bytes(size)))
        path.write_bytes(gzip.compress(plain.getvalue(), compresslevel=0))
        os.utime(path, (0, 0))  # a clock that does not tell the difference

    rewrite(("m/x", 500), ("m/y", 0))
    archive = open_archive(path)
    rewrite(*files)
    with pytest.raises(ArchiveError, match="changed after it was opened"):
        archive.extract(tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_long_name_of_gigabytes_is_refused_before_it_is_read(
    tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path
) -> None:
    header = member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=MAX_EXTENDED_BYTES + 1)
    assert "extended header of" in refusal(
        tgz_of_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(2048)), tmp_path / "t"
    )


@pytest.mark.parametrize(
    ("headers", "refused"), [(MAX_EXTENDED_IN_A_ROW, False), (MAX_EXTENDED_IN_A_ROW + 1, True)]
)
def test_a_file_may_have_a_few_extended_headers(
    tgz_of_bytes: Callable[[bytes], Path], headers: int, refused: bool
) -> None:
    one = member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=2).tobuf(tarfile.GNU_FORMAT)
    file = member("f").tobuf(tarfile.GNU_FORMAT)
    path = tgz_of_bytes((one + b"a\0" + bytes(510)) * headers + file + bytes(1024))
    with pytest.raises(ArchiveError, match="too many") if refused else contextlib.nullcontext():
        assert [entry.name for entry in open_archive(path).entries] == ["a"]


@pytest.mark.parametrize(
    ("size", "refused"), [(0, False), (MAX_EXTENDED_BYTES, False), (MAX_EXTENDED_BYTES + 1, True), (-1, True)]
)
def test_an_extended_header_is_no_longer_than_may_be(
    tgz_of_bytes: Callable[[bytes], Path], size: int, refused: bool
) -> None:
    record = b"%d comment=%b\n" % (size, b"a" * (size - len(b"%d comment=\n" % size)))
    header = member("x", tarfile.XHDTYPE, size=size).tobuf(tarfile.GNU_FORMAT)
    data = (record if size > 0 else b"").ljust(-(-max(size, 0) // 512) * 512, b"\0")
    path = tgz_of_bytes(header + data + member("f").tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    with pytest.raises(ArchiveError, match="an extended header of") if refused else contextlib.nullcontext():
        assert [entry.name for entry in open_archive(path).entries] == ["f"]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (tarfile.GNUTYPE_LONGNAME, b"one"),
        (tarfile.XHDTYPE, b"12 path=one\n"),
        (tarfile.XGLTYPE, b"8 a=one\n"),
    ],
)
def test_a_long_name_that_two_readers_would_read_differently_is_refused(
    tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path, kind: bytes, content: bytes
) -> None:
    header = member("x", kind, size=len(content)).tobuf(tarfile.GNU_FORMAT)
    file = member("f").tobuf(tarfile.GNU_FORMAT)
    data = header + (content + b"more").ljust(512, b"\0") + file + bytes(1024)
    assert "behind the end of an extended header" in refusal(tgz_of_bytes(data), tmp_path / "t")


def extended(kind: bytes, content: bytes) -> bytes:
    header = member("x", kind, size=len(content)).tobuf(tarfile.GNU_FORMAT)
    return header + content.ljust(512, b"\0")


ONE, OTHER = extended(tarfile.XHDTYPE, b"12 path=one\n"), extended(tarfile.XHDTYPE, b"14 path=other\n")
LONG = extended(tarfile.GNUTYPE_LONGNAME, b"other\0")


@pytest.mark.parametrize(
    "headers", [ONE + LONG, LONG + ONE, ONE + OTHER], ids=["pax, GNU", "GNU, pax", "pax"]
)
def test_an_entry_with_two_extended_names_is_refused(
    tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path, headers: bytes
) -> None:
    data = headers + member("f").tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    assert "two extended headers give one entry the path" in refusal(tgz_of_bytes(data), tmp_path / "t")


def test_an_entry_with_one_extended_name_twice_is_read(tgz_of_bytes: Callable[[bytes], Path]) -> None:
    data = OTHER + LONG + member("f").tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    assert [entry.name for entry in open_archive(tgz_of_bytes(data)).entries] == ["other"]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (b"0 \n", "damaged"),
        (b"9 path=x\n9", "damaged"),
        (b"99 path=x\n", "damaged"),
        (b"8 path=x", "damaged"),
        (b"7 path\n", "damaged"),
        (b"5 =x\n", "damaged"),
        (b"x path=a\n", "not a size"),
        (b"11 size=-1\n", "not a size"),
        (b"11 size=\xc2\xb2\n", "not a size"),
        (b"28 size=" + b"9" * 19 + b"\n", "larger than"),
        (b"29 size=" + b"9" * 20 + b"\n", "not a size"),
        (b"19 GNU.sparse.a=1234", "damaged"),
        (b"21 GNU.sparse.a=1234\n", "sparse"),
        (b"10 path=\xff\n", "not UTF-8"),
        (b"5 a=\n" * (MAX_PAX_RECORDS + 1), "more than 128 pax records"),
    ],
)
def test_damaged_pax_records_are_refused(
    tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path, records: bytes, said: str
) -> None:
    header = member("x", tarfile.XHDTYPE, size=len(records)).tobuf(tarfile.USTAR_FORMAT)
    file = member("f").tobuf(tarfile.USTAR_FORMAT)
    data = header + records + bytes(-len(records) % 512) + file + bytes(1024)
    assert said in refusal(tgz_of_bytes(data), tmp_path / "t")


def test_a_global_header_may_not_rename_files(tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path) -> None:
    for records, refused in ((b"14 comment=ab\n", False), (b"10 path=a\n", True)):
        header = member("x", tarfile.XGLTYPE, size=len(records)).tobuf(tarfile.USTAR_FORMAT)
        data = header + records.ljust(512, b"\0") + member("f").tobuf(tarfile.USTAR_FORMAT) + bytes(1024)
        path = tgz_of_bytes(data)
        if refused:
            assert "global header" in refusal(path, tmp_path / "t")
        else:
            assert [entry.name for entry in open_archive(path).entries] == ["f"]


def test_something_behind_the_end_is_refused(tgz_of: Maker, tmp_path: Path) -> None:
    path = tgz_of(("m/x", b"1"))
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(plain + b"x"))
    assert "behind the end" in refusal(path, tmp_path / "t")
    path.write_bytes(gzip.compress(plain + bytes(3 << 20)))
    assert "behind the end" in refusal(path, tmp_path / "t")
    path.write_bytes(gzip.compress(plain) + b"garbage")
    assert "gzip data is damaged" in refusal(path, tmp_path / "t")


@pytest.mark.parametrize(("padding", "refused"), [(MAX_PADDING_BYTES, False), (MAX_PADDING_BYTES + 1, True)])
def test_zeros_behind_the_end_are_no_more_than_may_be(
    tgz_of_bytes: Callable[[bytes], Path], padding: int, refused: bool
) -> None:
    path = tgz_of_bytes(member("f").tobuf(tarfile.USTAR_FORMAT) + bytes(512) + bytes(padding))
    with pytest.raises(ArchiveError, match="behind the end") if refused else contextlib.nullcontext():
        assert [entry.name for entry in open_archive(path).entries] == ["f"]


@pytest.mark.parametrize("keep", [2, 9, 12, 40, -1, -9])
def test_a_file_cut_off_anywhere_is_refused(tgz_of: Maker, tmp_path: Path, keep: int) -> None:
    path = tgz_of(("m/x", os.urandom(3000)))
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(path, tmp_path / "t")


def test_a_tar_cut_off_inside_whole_gzip_data_is_refused(tgz_of: Maker, tmp_path: Path) -> None:
    path = tgz_of(("m/x", b"x" * 2000), ("m/y", b"y"))
    plain = gzip.decompress(path.read_bytes())
    for size in (100, 512, 1000, 3072):
        path.write_bytes(gzip.compress(plain[:size]))
        assert "cut off" in refusal(path, tmp_path / "t")


def test_a_damaged_header_is_refused(tgz_of: Maker, tmp_path: Path) -> None:
    path = tgz_of(("m/x", b"1"))
    plain = bytearray(gzip.decompress(path.read_bytes()))
    plain[0] ^= 1
    path.write_bytes(gzip.compress(bytes(plain)))
    assert "tar header is damaged" in refusal(path, tmp_path / "t")


def test_a_negative_size_is_refused(tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path) -> None:
    info = member("m/x", size=-1024)
    assert "the size -1024 is wrong" in refusal(
        tgz_of_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)), tmp_path / "t"
    )


def test_indexing_a_large_file_keeps_nothing_of_it(tgz_of: Maker, monkeypatch: Any) -> None:
    path = tgz_of(("m/x", bytes(20_000_000)))
    largest = 0
    true_read = gzip.GzipFile.read

    def watched(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        nonlocal largest
        data = true_read(self, size)
        largest = max(largest, len(data))
        return data

    monkeypatch.setattr(gzip.GzipFile, "read", watched)
    assert open_archive(path).entries[0].size == 20_000_000
    assert largest <= 2**20


def test_only_the_wanted_file_is_given(tgz_of: Maker) -> None:
    assert open_archive(tgz_of(("m/a", b"1"), ("m/b", b"2" * 600), ("m/c", b"3"))).read_text("b") == "2" * 600


def test_a_plain_tar_is_not_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(member("x"), io.BytesIO())
    assert "neither zip nor gzip" in refusal(path, tmp_path / "t")


@pytest.mark.parametrize(("kind", "size"), [(tarfile.REGTYPE, -1), (tarfile.DIRTYPE, 512)])
def test_a_size_that_cannot_be_is_refused(
    tgz_of_bytes: Callable[[bytes], Path], tmp_path: Path, kind: bytes, size: int
) -> None:
    header = member("x", kind, size=size).tobuf(tarfile.GNU_FORMAT)
    path = tgz_of_bytes(header + bytes(512 + 1024))
    assert f"the size {size} is wrong" in refusal(path, tmp_path / "t")


def test_a_file_named_like_the_folder_everything_lies_in_is_refused(tgz_of: Maker, tmp_path: Path) -> None:
    path = tgz_of((member("mlp", tarfile.DIRTYPE), b""), ("mlp/a", b"1"), ("mlp", b"2"))
    assert "a file and a folder have this name" in refusal(path, tmp_path / "t")
