"""The memory of models: one process for all files, a child for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.verify.memory import resident_bytes
from torchere.archiver.torchscript_options import TorchScriptOptions

EXAMPLE = (torch.randn(2, 8),)
PLAIN = TorchScriptOptions()


class Printing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("12345")
        return x


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 0:
            raise ValueError("refused")
        return x


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of processes that were started."""
    commands: list[Any] = []
    run = subprocess.run

    def noting(command: Any, **more: Any) -> Any:
        commands.append(command)
        return run(command, **more)

    monkeypatch.setattr(subprocess, "run", noting)
    return commands


def test_one_process_measures_all_files(started: list[Any], tmp_path: Path) -> None:
    files = [tmp_path / "small.pt", tmp_path / "large.pt", tmp_path / "small_again.pt"]
    for file, width in zip(files, (4, 1_000_000, 4), strict=True):  # the large one has 32 MB
        to_torchscript(nn.Linear(8, width, bias=False), EXAMPLE).save(str(file))

    small, large, again = resident_bytes(files, [PLAIN] * 3, EXAMPLE)

    assert len(started) == 1
    assert small is not None
    assert large is not None
    assert again is not None
    assert large > small + 30e6
    assert again < small + 2e6  # the child of the file before it has taken its memory along


def test_a_file_that_fails_spoils_no_other(started: list[Any], tmp_path: Path) -> None:
    files = [tmp_path / "failing.pt", tmp_path / "printing.pt"]
    for file, module in zip(files, (Failing(), Printing()), strict=True):
        torch.jit.script(module).save(str(file))

    failing, printing = resident_bytes(files, [PLAIN] * 2, EXAMPLE)

    assert len(started) == 1
    assert failing is None
    assert printing is not None
    assert printing < 30e6


def test_a_file_that_takes_too_long_has_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.jit.script(nn.Linear(8, 4)).save(str(tmp_path / "slow.pt"))
    monkeypatch.setattr("torchere.archiver.models.verify.memory._TIMEOUT_S", 0.01)
    assert resident_bytes([tmp_path / "slow.pt"], [PLAIN], EXAMPLE) == [None]


def test_without_torchscript_no_process_is_started(started: list[Any], tmp_path: Path) -> None:
    other = tmp_path / "state.pt"
    torch.save({"weight": torch.zeros(2)}, other)

    assert resident_bytes([None, other], [PLAIN] * 2, EXAMPLE) == [None, None]
    assert started == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_python_files_in_the_current_folder_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.jit.script(nn.Linear(8, 4)).save("here.pt")
    (tmp_path / "ctypes.py").write_text("open('ran', 'w').close()\nraise SystemExit(3)\n")

    (found,) = resident_bytes([Path("here.pt")], [PLAIN], EXAMPLE)

    assert found is not None
    assert not (tmp_path / "ran").exists()
