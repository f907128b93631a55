"""Whatever the bytes: an archive or an ArchiveError, and never a file outside the target."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
import zipfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchere.archiver.container.entries import ArchiveLimits, first_clash, problem_with
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import open_archive
from torchere.archiver.request import ArchiveFormat, ArchiveRequest
from torchere.archiver.writer import write_archive

LIMITS = ArchiveLimits(max_entries=100, max_total_bytes=10**6)
NAMES = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\\"), min_size=1, max_size=12
)
TREES = st.dictionaries(NAMES, st.binary(max_size=3000), max_size=6).filter(
    lambda tree: (
        all(problem_with(name) is None for name in tree)
        and first_clash(["service.py", "MAR-INF/MANIFEST.json", *tree]) is None
    )
)
# Hidden folders are not packed, so no part of a name but the last may begin with a dot.
PACKABLE = TREES.filter(
    lambda tree: (
        not any(
            part.startswith(".") or part in ("__pycache__", "__MACOSX")
            for name in tree
            for part in name.split("/")[:-1]
        )
    )
)
FORMATS: st.SearchStrategy[ArchiveFormat] = st.sampled_from(["default", "zip-store", "tgz", "no-archive"])


def packed(folder: Path, tree: dict[str, bytes], archive_format: ArchiveFormat) -> Path:
    extra = folder / "extra"
    extra.mkdir()
    (folder / "service.py").write_text("x = 1\n")
    for name, data in tree.items():
        (extra / name).parent.mkdir(parents=True, exist_ok=True)
        (extra / name).write_bytes(data)
    return write_archive(
        ArchiveRequest(
            model_name="m",
            version="1",
            handler=str(folder / "service.py"),
            extra_files=(extra,),
            export_path=folder / "out",
            archive_format=archive_format,
        )
    )


def survives(path: Path, folder: Path) -> None:
    """Open and unpack; whatever happens, nothing but the target may come to be."""
    before = sorted(os.listdir(folder))
    target = folder / "target"
    try:
        open_archive(path, LIMITS).extract(target)
    except ArchiveError as error:
        assert str(error).isprintable()
        assert sorted(os.listdir(folder)) == before
    else:
        assert sorted(os.listdir(folder)) == sorted([*before, "target"])


@settings(max_examples=60, deadline=None)
@given(tree=PACKABLE, archive_format=FORMATS)
def test_what_is_packed_comes_back(tree: dict[str, bytes], archive_format: ArchiveFormat) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        archive = open_archive(packed(folder, tree, archive_format))
        target = archive.extract(folder / "target")
        assert {name: (target / name).read_bytes() for name in tree} == tree
        assert {entry.name for entry in archive.entries} == {*tree, "service.py", "MAR-INF/MANIFEST.json"}


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=2000), start=st.sampled_from([b"", b"PK\3\4", b"PK\5\6", b"\x1f\x8b\x08\0"]))
@example(data=bytes(18), start=b"PK\5\6")
def test_arbitrary_bytes_are_an_archive_or_an_archive_error(data: bytes, start: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "x.mar")
        path.write_bytes(start + data)
        survives(path, Path(place))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=3000))
def test_arbitrary_bytes_in_gzip_are_an_archive_or_an_archive_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "x.tar.gz")
        path.write_bytes(gzip.compress(data))
        survives(path, Path(place))


EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.booleans()), min_size=1, max_size=4
)


def edited(data: bytes, edits: list[tuple[int, bytes, bool]]) -> bytes:
    """Overwrite or insert a few bytes at a few places."""
    for place, new, inserts in edits:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + (0 if inserts else len(new)) :]
    return data


@settings(max_examples=200, deadline=None)
@given(tree=PACKABLE, archive_format=st.sampled_from(["default", "zip-store"]), edits=EDITS)
def test_an_edited_mar_writes_nothing_outside_the_target(
    tree: dict[str, bytes], archive_format: ArchiveFormat, edits: list[tuple[int, bytes, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = packed(Path(place), tree, archive_format)
        path.write_bytes(edited(path.read_bytes(), edits))
        survives(path, Path(place))


@settings(max_examples=150, deadline=None)
@given(tree=PACKABLE, edits=EDITS)
def test_an_edited_tar_writes_nothing_outside_the_target(
    tree: dict[str, bytes], edits: list[tuple[int, bytes, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = packed(Path(place), tree, "tgz")
        path.write_bytes(gzip.compress(edited(gzip.decompress(path.read_bytes()), edits)))
        survives(path, Path(place))


@settings(max_examples=150, deadline=None)
@given(names=st.lists(st.text(st.sampled_from("aA./\\:\0é"), min_size=1, max_size=6), min_size=1, max_size=4))
def test_hostile_names_write_nothing_outside_the_target(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place, contextlib.suppress(UserWarning):
        path = Path(place, "x.mar")
        with zipfile.ZipFile(path, "w") as archive:
            for name in dict.fromkeys(names):
                info = zipfile.ZipInfo("placeholder")
                info.filename = name
                archive.writestr(info, b"x")
        survives(path, Path(place))


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_what_zipfile_writes_is_read_as_zipfile_reads_it(tree: dict[str, bytes]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in tree.items():
            archive.writestr(name, data)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "x.mar")
        path.write_bytes(buffer.getvalue())
        found = {entry.name: b"".join(chunks) for entry, chunks in open_archive(path).chunks()}
    assert found == tree
