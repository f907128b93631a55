"""Safetensors are mapped from the file, not read; `test_hostile.py` has damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torchere.archiver.errors import ArchiveError
from torchere.archiver.models.load.safetensors import read_safetensors


def written(path: Path, **shapes: tuple[str, int]) -> Path:
    """A file of tensors of ones, each with a dtype and a number of bytes, in this order."""
    header, end = {}, 0
    for name, (dtype, size) in shapes.items():
        items = size // (4 if dtype == "F32" else 1)
        header[name] = {"dtype": dtype, "shape": [items], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1" * end)
    return path


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_weights_are_mapped_from_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "w.safetensors", w=("U8", 1 << 20))
    tensor = read_safetensors(path)["w"]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    bounds = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    assert any(begin <= tensor.data_ptr() < end for begin, end in bounds)


def test_a_write_to_the_weights_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "w.safetensors", w=("U8", 4096))
    before = path.read_bytes()
    read_safetensors(path)["w"].zero_()
    assert path.read_bytes() == before
    assert read_safetensors(path)["w"].sum() == 4096


def test_every_tensor_has_an_address_that_suits_its_dtype(tmp_path: Path) -> None:
    path = written(
        tmp_path / "w.safetensors", a=("F32", 8), b=("U8", 1), c=("F32", 8), d=("U8", 2), e=("F32", 4)
    )
    found = read_safetensors(path)
    assert {name: tensor.data_ptr() % tensor.itemsize for name, tensor in found.items()} == dict.fromkeys(
        "abcde", 0
    )
    assert found["a"].tolist() == found["c"].tolist()


def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(ArchiveError, match="not a regular file"):
        read_safetensors(tmp_path / "w.safetensors")
