"""Commands whose standard streams are closed, or read by nobody."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchere.serving.commands import cli


def closing(*descriptors: int) -> Callable[[], None]:
    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return close


def run(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torchere.serving", *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, text=True, env=environ, timeout=120, check=False, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["predict", "--help"]])
def test_who_reads_no_further_gets_no_traceback(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(*arguments, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["config", "check"]])
def test_a_full_disk_of_standard_output_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text("a=b\n" * 5000)  # an output that passes any buffer
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("The command can't go on: No space left on device: free some on the disk")
    assert done.stderr.count("\n") == 1


def test_closed_streams_are_open_for_what_a_command_opens() -> None:
    code = (
        "import os, sys; from torchere.serving.commands.cli import open_standard_streams as opened; opened();"
        "print('unseen'); print('unseen', file=sys.stderr); assert sys.stdin.read() == '';"
        "os._exit(os.open(os.devnull, os.O_RDONLY))"
    )
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=closing(0, 1, 2), check=False)
    assert done.returncode == 3


def test_a_server_without_standard_output_starts(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text("inference_address=http://192.0.2.1:8080\n")
    arguments = ("serve", "--ncs", "--model-store", ".")
    done = run(*arguments, preexec_fn=closing(1), stderr=subprocess.PIPE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")  # no machine has that address, which the log says


def test_ctrl_c_is_status_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_options: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr("torchere.serving.commands.tools._version", interrupted)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts us may have it ignored
    try:
        assert cli.main(["version"]) == 130
    finally:
        signal.signal(signal.SIGINT, ours)


def test_names_that_are_no_text_are_printed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.mar")).write_bytes(b"")
    done = run("migrate", "check", "--model-store", str(tmp_path), stdout=subprocess.PIPE)
    assert "\\udcff.mar" in done.stdout
