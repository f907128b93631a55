"""Inputs to pack and archives to read, made afresh for each test."""

from __future__ import annotations

import gzip
import io
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from torchere.archiver.request import ArchiveRequest

WEIGHTS = bytes(range(256)) * 40


class RequestMaker(Protocol):
    def __call__(self, **fields: object) -> ArchiveRequest: ...


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a handler, weights, a config, and a folder of extra files."""
    folder = tmp_path / "sources"
    (folder / "extra" / "deep").mkdir(parents=True)
    (folder / "service.py").write_text("def handle(data, context):\n    return data\n")
    (folder / "model.pt").write_bytes(WEIGHTS)
    (folder / "model-config.yaml").write_text("minWorkers: 1\n")
    (folder / "extra" / "names.json").write_text('{"0": "cat"}')
    (folder / "extra" / "deep" / "vocab.txt").write_text("a\nb\n" * 100)
    return folder


@pytest.fixture
def request_for(sources: Path, tmp_path: Path) -> RequestMaker:
    """Make a request that packs all of `sources` into `tmp_path / "out"`, with some fields changed."""

    def make(**fields: object) -> ArchiveRequest:
        given: dict[str, object] = {
            "model_name": "mlp",
            "version": "1.0",
            "handler": str(sources / "service.py"),
            "serialized_file": sources / "model.pt",
            "config_file": sources / "model-config.yaml",
            "extra_files": (sources / "extra",),
            "export_path": tmp_path / "out",
        }
        return ArchiveRequest(**{**given, **fields})  # type: ignore[arg-type]

    return make


@pytest.fixture
def zip_of(tmp_path: Path) -> Callable[..., Path]:
    """Write a zip with these entries, in this order; an entry may be given as a ZipInfo."""

    def make(*entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
        path = tmp_path / "made.mar"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zipfile warns of duplicate names, which are wanted here
            with zipfile.ZipFile(path, "w", method) as archive:
                for name, data in entries:
                    archive.writestr(name, data)
        return path

    return make


@pytest.fixture
def tgz_of(tmp_path: Path) -> Callable[..., Path]:
    """Write a tar.gz with these members, in this order."""

    def make(*members: tuple[tarfile.TarInfo | str, bytes], style: int = tarfile.PAX_FORMAT) -> Path:
        path = tmp_path / "made.tar.gz"
        with tarfile.open(path, "w:gz", format=style) as archive:
            for member, data in members:
                info = tarfile.TarInfo(member) if isinstance(member, str) else member
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    return make


@pytest.fixture
def tgz_of_bytes(tmp_path: Path) -> Callable[[bytes], Path]:
    """Write these bytes, gzip-packed, as they are."""

    def make(data: bytes) -> Path:
        path = tmp_path / "raw.tar.gz"
        path.write_bytes(gzip.compress(data))
        return path

    return make
