"""The bytes of the formats themselves."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.container import sinks
from torchere.archiver.container.sinks import ALIGNMENT, open_sink
from torchere.archiver.reader import open_archive


def data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the data of an entry begins, by its local header."""
    name_length, extra_length = struct.unpack_from("<HH", path.read_bytes(), info.header_offset + 26)
    return int(info.header_offset + 30 + name_length + extra_length)


@pytest.mark.parametrize("name_length", [1, 7, 33, 34, 35, 64, 200])
@pytest.mark.parametrize("wide", [False, True])
def test_stored_data_is_aligned_whatever_the_names(
    tmp_path: Path, monkeypatch: Any, name_length: int, wide: bool
) -> None:
    if wide:
        monkeypatch.setattr(sinks, "WIDE_FROM_BYTES", 0)  # 64-bit sizes, as above 1.9 GB
    path = tmp_path / "x.mar"
    with open_sink("default", path, "x") as sink:
        for number in range(3):
            sink.add(f"{number}{'n' * name_length}", 11, io.BytesIO(b"hello world"), True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(data_offset(path, info) % ALIGNMENT == 0 for info in archive.infolist())
        assert all(info.extra == b"" for info in archive.infolist())
    assert [entry.size for entry in open_archive(path).entries] == [11, 11, 11]


def test_large_entries_begin_at_a_page(tmp_path: Path) -> None:
    path, large = tmp_path / "x.mar", bytes(sinks.PAGED_FROM_BYTES)
    with open_sink("default", path, "x") as sink:
        for name in ("a", "bb", "c" * 90):
            sink.add(name, len(large), io.BytesIO(large), True)
    entries = open_archive(path).entries
    assert [entry.offset is not None and entry.offset % sinks.PAGE_BYTES for entry in entries] == [0, 0, 0]
    open_archive(path).verify()


def test_the_padding_is_one_well_formed_extra_field(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    with open_sink("default", path, "x") as sink:
        sink.add("a", 1, io.BytesIO(b"a"), True)
    data = path.read_bytes()
    name_length, extra_length = struct.unpack_from("<HH", data, 26)
    kind, length, alignment = struct.unpack_from("<HHH", data, 30 + name_length)
    assert (kind, length, alignment) == (0xD935, extra_length - 4, ALIGNMENT)


class Interrupted:
    """Raises what a signal's handler raises, at the moment that is asked for."""

    def read(self, size: int = -1, /) -> bytes:
        raise SystemExit(143)


def test_a_zip_that_is_given_up_says_why_and_no_more(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(SystemExit), open_sink("default", tmp_path / "reading.mar", "x") as sink:
        sink.add("a", 1, Interrupted(), True)
    entries = []

    class LateZip(sinks._Zip):
        """Is interrupted between an entry's beginning and whoever is to end it."""

        def open(self, *given: Any, **named: Any) -> Any:
            entries.append(super().open(*given, **named))
            raise SystemExit(143)

    monkeypatch.setattr(sinks, "_Zip", LateZip)
    with pytest.raises(SystemExit), open_sink("default", tmp_path / "beginning.mar", "x") as sink:
        sink.add("a", 1, io.BytesIO(b"a"), True)
    assert len(entries) == 1
    with contextlib.suppress(ValueError):
        entries.pop().close()  # from Python 3.13 on it would complain as it goes that its file is closed


def test_entries_carry_no_time_user_or_machine(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    with open_sink("default", path, "x") as sink:
        sink.add("a", 1, io.BytesIO(b"a"), False)
    with zipfile.ZipFile(path) as archive:
        (info,) = archive.infolist()
    assert info.date_time == (1980, 1, 1, 0, 0, 0)
    assert info.external_attr >> 16 == 0o100644
    assert info.create_system == 3
