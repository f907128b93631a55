from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchere.archiver import open_archive
from torchere.serving.commands import cli
from torchere.serving.commands.new_handler import FILES, class_name
from torchere.serving.config.model_settings import config_of


def make(folder: Path, *goals: str) -> str:
    """Run `make` in the folder with this interpreter; fail with its output."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    variables = [f"PYTHON={sys.executable}", f"TORCHERE={sys.executable} -m torchere.serving"]
    done = subprocess.run(
        ["make", *variables, *goals],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_new_handler_passes_its_test_and_is_packed_as_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "handler", "my-net"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: cd my-net && make test && make && make serve"
    folder = tmp_path / "my-net"
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert "8 passed" in make(folder, "test")
    make(folder)
    model = open_archive(folder / "my-net.mar").manifest
    assert (model.model_name, model.handler, model.config_file) == (
        "my-net",
        "handler.py",
        "model-config.yaml",
    )
    assert "up to date" in make(folder)
    config = config_of(open_archive(folder / "my-net.mar"))
    assert config.raw["exampleRequest"] == {"values": [1, 2, 3, 4]}  # what the handler's docstring has
    assert config.ignored == {}


def test_make_test_without_pytest_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "handler", "net"]) == 0
    bare = tmp_path / "bare"  # Python without packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(AssertionError, match=rf"{bare} -m pip install pytest"):
        make(tmp_path / "net", "test", f"PYTHON={bare}")


@pytest.mark.parametrize(
    ("name", "expected"), [("my-net", "MyNetHandler"), ("2.0", "Model20Handler"), ("a_b", "ABHandler")]
)
def test_the_class_is_named_after_the_model(name: str, expected: str) -> None:
    assert class_name(name) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [("a/b", "'a/b' can't be a model's name"), ("there", "there can't be made: File exists")],
)
def test_a_name_that_cannot_be_used_is_refused(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    assert cli.main(["new", "handler", name]) == 1
    assert capsys.readouterr().out.startswith(said)


def test_a_full_disk_is_one_line_and_leaves_no_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fill_disk: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    fill_disk()
    assert cli.main(["new", "handler", "net"]) == 1
    assert capsys.readouterr() == ("net can't be made: No space left on device\n", "")
    assert os.listdir(tmp_path) == []
