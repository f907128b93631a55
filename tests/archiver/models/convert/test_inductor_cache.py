"""What Inductor caches while a model is compiled is gone afterwards."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from torchere.archiver.models.convert.aotinductor import private_cache

VALID_ISA = "torch._inductor.cpu_vec_isa.valid_vec_isa_list"


def cache_dir() -> str:
    """Inductor's folder of now. Importing it takes a second, which only this file's process needs."""
    from torch._inductor.runtime.runtime_utils import cache_dir as inductors  # type: ignore[attr-defined]

    return str(inductors())


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instruction sets are known: torch would compile for 10 s to test them."""
    monkeypatch.setattr(VALID_ISA, list)


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_the_cache_lies_in_the_folder_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if before:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
    used = []
    for _ in range(2):
        with private_cache(tmp_path):
            used.append(Path(cache_dir()))
            assert used[-1].parent == tmp_path
            assert used[-1].stat().st_mode & 0o077 == 0
            Path(cache_dir(), "weights.so").write_bytes(b"numbers")
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
        assert list(tmp_path.iterdir()) == []
    assert used[0] != used[1]


def test_the_cache_goes_when_compiling_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no compiler"), private_cache(tmp_path):
        Path(cache_dir(), "weights.so").write_bytes(b"numbers")
        raise RuntimeError("no compiler")
    assert list(tmp_path.iterdir()) == []


def test_tests_of_the_instruction_sets_are_kept_for_the_next_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (usual := tmp_path / "usual").mkdir()
    (private := tmp_path / "private").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(usual))
    asked_in = []
    found = cache(lambda: asked_in.append(cache_dir()))  # as torch does, which compiles for 10 s at first
    monkeypatch.setattr(VALID_ISA, found)
    with private_cache(private):
        found()
    assert asked_in == [str(usual)]


def test_a_usual_cache_that_is_read_only_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(VALID_ISA, refuse)
    with private_cache(tmp_path):
        assert Path(cache_dir()).parent == tmp_path
