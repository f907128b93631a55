"""The command lines, as commands: exit codes, texts, and what they need to start."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.cli import add_inspect_arguments, main, run_inspect
from torchere.archiver.reader import open_archive

SCRIPT = Path(sys.executable).with_name("torch-model-archiver")
COMMANDS = [[str(SCRIPT)], [sys.executable, "-m", "torchere.archiver"]]


def run(
    *arguments: str, command: list[str] = COMMANDS[1], **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.fixture
def arguments(sources: Path, tmp_path: Path) -> list[str]:
    return [
        "--model-name=mlp",
        "--version=1.0",
        f"--handler={sources}/service.py",
        f"--export-path={tmp_path}/out",
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=["script", "module"])
def test_every_flag_is_taken_and_success_is_silent(
    arguments: list[str], sources: Path, tmp_path: Path, command: list[str]
) -> None:
    (sources / "requirements.txt").write_text("six\n")
    (sources / "model.py").write_text("class M: ...\n")
    done = run(
        *arguments,
        *("--serialized-file", f"{sources}/model.pt"),
        *("--model-file", f"{sources}/model.py"),
        *("--extra-files", f"{sources}/extra,{sources}/extra/*.json"),
        *("--runtime", "python3"),
        *("--archive-format", "default"),
        "-f",
        *("-r", f"{sources}/requirements.txt"),
        *("-c", f"{sources}/model-config.yaml"),
        command=command,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    manifest = open_archive(tmp_path / "out" / "mlp.mar").manifest
    assert (manifest.runtime, manifest.requirements_file, manifest.config_file, manifest.model_file) == (
        "python3",
        "requirements.txt",
        "model-config.yaml",
        "model.py",
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "--model-name=m lp",
            "Model name contains special characters.\nThe allowed regular expression filter",
        ),
        ("--handler=nowhere.py", "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.py'"),
        ("--extra-files=gone", "FileNotFoundError: File does not exist: gone"),
        ("--serialized-file=gone.pt", "FileNotFoundError: [Errno 2] No such file or directory: 'gone.pt'"),
        ("--export-path=/dev/null", "Given export-path /dev/null is not a directory. Point to a valid"),
    ],
)
def test_a_failure_exits_with_1_and_a_text_without_a_traceback(
    arguments: list[str], change: str, said: str
) -> None:
    done = run(*arguments, change)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("version", ["a/b", "1\n2", " ", "1" * 256])
def test_a_version_that_the_server_refuses_is_packed_with_a_warning(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    assert main([*arguments, f"--version={version}"]) == 0
    warning = f"torch-model-archiver: warning: --version {version[:80]!r}: torchere's server refuses"
    assert warning in capsys.readouterr().err
    assert open_archive(tmp_path / "out" / "mlp.mar").manifest.model_version == version


def test_an_existing_output_exits_with_1_and_force_overwrites_with_a_warning(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 0
    again = run(*arguments)
    assert again.returncode == 1
    assert "already exists.\nPlease specify --force/-f option" in again.stderr
    forced = run(*arguments, "--force")
    assert forced.returncode == 0
    assert forced.stderr.startswith("WARNING - Overwriting ")


@pytest.mark.parametrize(
    "given", [["--runtime=ruby"], ["--archive-format=rar"], ["--nonsense"], ["--model-name"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], given: list[str]) -> None:
    done = run(*arguments, *given)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: torch-model-archiver")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_required_flag_exits_with_2(arguments: list[str], missing: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main([argument for number, argument in enumerate(arguments) if number != missing])
    assert caught.value.code == 2


def test_the_date_comes_from_source_date_epoch(arguments: list[str], tmp_path: Path) -> None:
    assert run(*arguments, SOURCE_DATE_EPOCH="1735689599").returncode == 0
    assert open_archive(tmp_path / "out" / "mlp.mar").manifest.created_on == "31/12/2024 23:59:59"


@pytest.mark.parametrize("value", ["yesterday", "-1", "9" * 30, "²"])
def test_a_source_date_epoch_that_is_none_is_refused(arguments: list[str], value: str) -> None:
    done = run(*arguments, SOURCE_DATE_EPOCH=value)
    assert done.returncode == 1
    assert "SOURCE_DATE_EPOCH is" in done.stderr


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """What we start does as a rule; not where we were started by nohup."""
    ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, ours)


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize(
    ("before", "sent", "by"),
    [
        ([], [signal.SIGTERM], signal.SIGTERM),
        ([], [signal.SIGHUP], signal.SIGHUP),  # its terminal is gone
        (["nohup"], [signal.SIGHUP, signal.SIGTERM], signal.SIGTERM),
    ],
)
def test_ended_by_a_signal_it_leaves_nothing_behind(
    arguments: list[str], tmp_path: Path, before: list[str], sent: list[int], by: int
) -> None:
    out = tmp_path / "out"
    big = tmp_path / "big.pt"
    with open(big, "wb") as file:
        file.truncate(40 << 30)  # takes no room, and longer to read than this test lasts
    command = [*before, *COMMANDS[1], *arguments, f"--serialized-file={big}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    while process.poll() is None and not (out.is_dir() and os.listdir(out)):
        os.sched_yield()
    for number in sent:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + by
    assert (stderr, os.listdir(out)) == (b"", [])


ARCHIVE = """
import argparse, signal, sys
from torchere.archiver.cli import run_model_archive
from torchere.archiver.model_flags import add_archive_arguments
signal.signal(signal.SIGINT, signal.default_int_handler)
parser = argparse.ArgumentParser()
add_archive_arguments(parser, models=True)
sys.exit(run_model_archive(parser.parse_args()))
"""
TORCH = """
import signal
try:
    signal.raise_signal({})
except BaseException:  # as the start of torch in C does
    pass
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_is_not_lost(sources: Path, tmp_path: Path, sent: int) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(int(sent)))
    (tmp_path / "example.json").write_text("[1.0]")
    arguments = ("--model-name=mlp", f"--serialized-file={sources}/model.pt", f"--export-path={tmp_path}/out")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(
        *(*arguments, f"--example={tmp_path}/example.json"),
        command=[sys.executable, "-c", ARCHIVE],
        PYTHONPATH=path,
    )
    assert (done.returncode, done.stderr) == (128 + sent, "")


def test_starting_loads_no_torch_and_nothing_that_is_not_in_the_standard_library() -> None:
    code = (
        "import sys; from torchere.archiver import cli; "
        "names = {name.partition('.')[0] for name in sys.modules}; "
        "print(sorted(names - sys.stdlib_module_names - {'torchere', '__main__'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [name for name in json.loads(done.stdout.replace("'", '"')) if "editable" not in name]
    assert set(found) <= {"_distutils_hack", "sitecustomize", "a1_coverage", "coverage"}


def inspected(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_inspect_arguments(parser)
    return run_inspect(parser.parse_args(arguments))


def test_inspect_prints_a_report(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(arguments) == 0
    assert inspected(f"{tmp_path}/out/mlp.mar") == 0
    assert "Digests: verified (sha256)" in capsys.readouterr().out
    assert inspected(f"{tmp_path}/out/mlp.mar", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "zip"


class FullDisk(io.BytesIO):
    """A temporary file on a disk without room."""

    def write(self, _data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_inspect_says_in_one_line_that_the_disk_is_full(
    arguments: list[str], sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main([*arguments, f"--serialized-file={sources}/model.pt"]) == 0
    monkeypatch.setattr(tempfile, "TemporaryFile", FullDisk)
    assert inspected(f"{tmp_path}/out/mlp.mar") == 1
    assert capsys.readouterr().err.startswith("torchere inspect: No space left on device: free some on")


def test_inspect_says_in_one_line_why_it_can_not(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.mar").write_bytes(b"nonsense")
    assert inspected(f"{tmp_path}/x.mar") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchere inspect: ")
    assert captured.err.count("\n") == 1
