"""Archives made by TorchServe's own archiver 0.12.0 open, verify and unpack."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from torchere.archiver.inspection import inspect_archive
from torchere.archiver.reader import open_archive

RECORDED = Path(__file__).parents[1] / "conformance" / "archives"
NAMES = ["base", "batched", "broken", "echo", "func", "mlp", "mlp_v2", "rich"]


def test_all_recorded_archives_are_here() -> None:
    assert sorted(path.stem for path in RECORDED.glob("*.mar")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_archive_unpacks_to_what_zipfile_reads(name: str, tmp_path: Path) -> None:
    path = RECORDED / f"{name}.mar"
    archive = open_archive(path)
    assert archive.manifest.model_name == name.removesuffix("_v2")
    assert archive.manifest.digests is None
    folder = archive.extract(tmp_path / "t")
    with zipfile.ZipFile(path) as other:
        assert {entry.name: (folder / entry.name).read_bytes() for entry in archive.entries} == {
            entry.filename: other.read(entry) for entry in other.infolist()
        }


def test_the_weights_in_a_recorded_archive_are_known() -> None:
    (weights,) = inspect_archive(RECORDED / "mlp.mar").weights
    assert (weights.name, weights.kind) == ("mlp8.pt", "TorchScript")
