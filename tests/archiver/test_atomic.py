"""All or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchere.archiver.atomic import staged


def test_a_file_takes_its_place_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "x.mar"
    target.write_text("old")
    with staged(target) as work:
        work.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["x.mar"]


def test_a_directory_that_holds_something_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").write_text("")
    with pytest.raises(OSError, match="not empty"), staged(target) as work:
        work.mkdir()
        (work / "new").write_text("")
    assert os.listdir(target) == ["old"]
    assert os.listdir(tmp_path) == ["x"]


def test_a_directory_that_is_merged_keeps_what_the_new_one_has_not(tmp_path: Path) -> None:
    target = tmp_path / "x"
    (target / "weights").mkdir(parents=True)
    (target / "weights" / "big").write_text("big")
    (target / "handler.py").write_text("old")
    with staged(target, merge=True) as work:
        (work / "weights").mkdir(parents=True)
        (work / "weights" / "new").write_text("new")
        (work / "handler.py").write_text("new")
        (work / "fresh" / "deep").mkdir(parents=True)
        (work / "fresh" / "deep" / "x").write_text("x")
    found = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*") if p.is_file()}
    assert found == {"weights/big": "big", "weights/new": "new", "handler.py": "new", "fresh/deep/x": "x"}
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failing_block_leaves_everything_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with pytest.raises(error), staged(target) as work:
        work.mkdir()
        (work / "part").write_text("")
        raise error
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_failing_block_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="half-way"), staged(tmp_path / "x") as work:
        work.write_text("part")
        raise ValueError("half-way")
    assert os.listdir(tmp_path) == []
