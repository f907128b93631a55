"""The processes here are real; a stand-in waits for signals under a server's name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from torchere.serving.commands import cli, serve_options
from torchere.serving.commands import torchserve as launcher
from torchere.serving.commands.torchserve import PROCESS_NAME
from torchere.serving.config.properties import ConfigurationError

WAITS = "import signal; print('up', flush=True); signal.pause()"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"

Spawn = Callable[..., subprocess.Popen[bytes]]
Said = Callable[[], list[str]]


@pytest.fixture
def pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".model_server.pid"


@pytest.fixture
def spawn(pid_file: Path) -> Iterator[Spawn]:
    """Start a process that counts as a server (or not) and is in the pid file; it is up on return."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str = WAITS, name: str = PROCESS_NAME) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        launcher.write_pid(pid_file, process.pid)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """A function that returns the lines of standard output since its last call."""

    def lines() -> list[str]:
        return capsys.readouterr().out.splitlines()

    return lines


def test_the_pid_file_is_in_the_temporary_directory() -> None:
    assert launcher.pid_file({"TMPDIR": "/some/where"}) == Path("/some/where/.model_server.pid")


def test_the_command_runs_our_serve_and_carries_the_name_tools_look_for() -> None:
    command = launcher.server_command(["--model-store=/m"])
    module = command.index("-m")
    assert command[module : module + 3] == ["-m", "torchere.serving", "serve"]
    assert command[-1] == "--model-store=/m"
    assert PROCESS_NAME in command


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has -P since 3.11")
def test_no_server_imports_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('imported from the current directory')\n")
    commands = [launcher.server_command(["--help"])]
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    serve_options.become_server(["--help"])
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_server_may_start_where_none_is_known(pid_file: Path, said: Said) -> None:
    assert launcher.may_start(pid_file)
    assert said() == []


def test_a_second_server_is_refused(pid_file: Path, spawn: Spawn, said: Said) -> None:
    spawn()
    assert not launcher.may_start(pid_file)
    assert said() == [launcher.ALREADY_RUNNING]
    assert pid_file.exists()


@pytest.mark.parametrize("content", ["", "garbage", "0", "-1", "99999999\n", "9" * 30])
def test_an_orphan_pid_file_is_removed_with_a_word(pid_file: Path, content: str, said: Said) -> None:
    pid_file.write_text(content)
    assert launcher.may_start(pid_file)
    assert said() == ["Removing orphan pid file."]
    assert not pid_file.exists()


def test_an_orphan_that_cannot_be_removed_is_named_with_what_to_do(pid_file: Path) -> None:
    pid_file.mkdir()  # no unlink takes it, not even root's
    for command in (launcher.may_start, launcher.stop):
        with pytest.raises(
            ConfigurationError, match="the pid file must be writable: remove it, or set TMPDIR"
        ):
            command(pid_file)


def test_another_program_with_that_pid_is_no_server(pid_file: Path, spawn: Spawn, said: Said) -> None:
    spawn(name="an editor")
    assert launcher.may_start(pid_file)
    assert said() == ["Removing orphan pid file."]


def test_stopping_ends_the_server_and_leaves_keys_of_another_one(
    pid_file: Path, spawn: Spawn, capsys: pytest.CaptureFixture[str]
) -> None:
    process = spawn()
    keys = pid_file.with_name("key_file.json")  # in the current folder, which need not be the server's
    keys.write_text("{}")
    assert launcher.stop(pid_file) == 0
    out, err = capsys.readouterr()
    assert out == "TorchServe has stopped.\n"
    assert f"(process {process.pid}, started in {Path.cwd()})" in err
    assert process.wait() == -15
    assert not pid_file.exists()
    assert keys.read_text() == "{}"


def test_a_server_whose_pid_file_was_cleaned_up_is_found(
    pid_file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setenv("TMPDIR", str(pid_file.parent))
    process = spawn()
    pid_file.unlink()
    assert not launcher.may_start(pid_file)
    assert launcher.stop(pid_file.with_name("of-another-folder")) == 0
    assert process.poll() is None
    assert launcher.stop(pid_file) == 0
    assert said() == [launcher.ALREADY_RUNNING, launcher.NOT_RUNNING, launcher.STOPPED]
    assert process.wait() == -15


@pytest.mark.parametrize("content", ["garbage", "99999999"])
def test_a_server_whose_pid_file_is_invalid_is_found(
    pid_file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, content: str, said: Said
) -> None:
    monkeypatch.setenv("TMPDIR", str(pid_file.parent))
    process = spawn()
    pid_file.write_text(content)
    assert not launcher.may_start(pid_file)
    pid_file.write_text(content)
    assert launcher.stop(pid_file) == 0
    assert said() == [launcher.ORPHAN, launcher.ALREADY_RUNNING, launcher.ORPHAN, launcher.STOPPED]
    assert process.wait() == -15


def test_a_server_of_the_default_folder_is_no_server_of_another_one(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Two servers on one machine have a TMPDIR each; the first one may have been started without."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    process = spawn()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what a look before has cached
    (tmp_path / "other").mkdir()
    mine = launcher.pid_file(os.environ)
    assert launcher.may_start(mine)
    assert launcher.stop(mine) == 0
    assert said() == [launcher.NOT_RUNNING]
    assert process.poll() is None


FINISHES_LATER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(3)))
print("up", flush=True)
while True:
    time.sleep(0.1)  # a signal between print and sleep is handled after the sleep
"""


def test_a_start_behind_a_stop_waits_for_the_last_requests_of_the_server(
    pid_file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setenv("TMPDIR", str(pid_file.parent))
    process = spawn(FINISHES_LATER)
    assert launcher.stop(pid_file) == 0
    assert not pid_file.exists()
    assert not launcher.may_start(pid_file, wait_s=0.0)
    assert launcher.may_start(pid_file)
    finishing = launcher.FINISHING.format(process.pid)
    assert said() == [launcher.STOPPED, finishing, launcher.TOO_LONG, finishing]
    assert process.wait() == 3  # in its own time


def test_a_second_stop_waits_and_cuts_no_request_off(
    pid_file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setenv("TMPDIR", str(pid_file.parent))
    process = spawn(FINISHES_LATER)
    launcher.stop(pid_file)
    launcher.stop(pid_file)
    assert said() == [launcher.STOPPED, launcher.FINISHING.format(process.pid), launcher.STOPPED]
    assert process.wait() == 3


def test_stopping_in_the_foreground_waits_for_the_end(pid_file: Path, spawn: Spawn, said: Said) -> None:
    process = spawn()
    launcher.stop(pid_file, wait_s=30)
    assert said() == ["TorchServe has stopped."]
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE  # ended; its parent is in no hurry


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
def test_a_pid_file_that_cannot_be_removed_after_the_signal_is_named(
    pid_file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, wait_s: float, said: Said
) -> None:
    process = spawn(IGNORES_SIGTERM if not wait_s else WAITS)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace" if not wait_s else "unlink", refuse)  # a file system gone read-only
    with pytest.raises(ConfigurationError, match="Read-only file system; the pid file must be writable"):
        launcher.stop(pid_file, wait_s)
    assert said() == ["TorchServe has stopped."]
    monkeypatch.undo()
    assert launcher.running(process.pid) == (not wait_s)


def test_a_server_that_will_not_end_takes_too_long(pid_file: Path, spawn: Spawn, said: Said) -> None:
    spawn(IGNORES_SIGTERM)
    assert launcher.stop(pid_file, wait_s=0.01) == 0
    assert said() == ["Stopping TorchServe took too long."]


def test_a_program_that_took_over_the_pid_is_left_alone(pid_file: Path, spawn: Spawn, said: Said) -> None:
    process = spawn(name="an editor")
    assert launcher.stop(pid_file) == 0
    assert said() == ["Removing orphan pid file.", "TorchServe is not currently running."]
    assert process.poll() is None
    assert not pid_file.exists()


def test_a_background_start_notes_the_pid_and_leaves_our_session(pid_file: Path) -> None:
    process = launcher.start_in_background([sys.executable, "-c", WAITS, PROCESS_NAME], pid_file)
    try:
        assert launcher.read_pid(pid_file) == process.pid
        assert os.getsid(process.pid) == process.pid
        assert launcher.running(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("flags", [[], ["--foreground"]], ids=["background", "foreground"])
def test_of_starts_at_the_same_time_one_starts_the_server(pid_file: Path, flags: list[str]) -> None:
    code = f"""
import sys, time
from torchere.serving.commands import cli, torchserve as launcher
may_start = launcher.may_start
launcher.may_start = lambda file: may_start(file) and not time.sleep(0.5)  # the others look meanwhile
launcher.server_command = lambda _: [sys.executable, "-c", {WAITS!r}, launcher.PROCESS_NAME]
sys.exit(cli.torchserve_main(["--start", "--model-store", ".", *{flags!r}]))
"""
    environ = {**os.environ, "TMPDIR": str(pid_file.parent)}
    starts = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ, text=True)
        for _ in range(3)
    ]
    lines = []
    try:
        for start in starts:
            assert start.stdout
            lines.append(start.stdout.readline())
        assert sorted(lines) == sorted(["up\n", *2 * [f"{launcher.ALREADY_RUNNING}\n"]])
        assert launcher.running(launcher.read_pid(pid_file))
    finally:
        pid = launcher.pid_without_file(pid_file)
        while pid is not None:
            psutil.Process(pid).kill()
            pid = launcher.pid_without_file(pid_file)
        for start in starts:
            start.communicate(timeout=30)


def test_becoming_the_server_keeps_the_pid(pid_file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from torchere.serving.commands.torchserve import become;"
        "become([sys.executable, '-c', 'import os; print(os.getpid())'], Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(pid_file)], capture_output=True, check=True)
    assert int(done.stdout) == launcher.read_pid(pid_file)


def test_a_link_in_place_of_the_pid_file_is_not_followed(pid_file: Path) -> None:
    target = pid_file.with_name("target")
    target.write_text("mine")
    pid_file.symlink_to(target)
    with pytest.raises(ConfigurationError, match=r"the pid file must be writable: remove it, or set TMPDIR"):
        launcher.write_pid(pid_file, 1)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (cli.torchserve_main, ["--start", "--model-store", "."]),
        (cli.torchserve_main, ["--stop"]),
        (cli.main, ["serve", "--model-store", "."]),
        (cli.main, ["join", "leader.example"]),
    ],
)
def test_windows_is_refused_before_modules_that_it_does_not_have(
    command: Callable[[list[str]], int],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr("torchere.serving.commands.torchserve")
    for name in ("torchere.serving.commands.torchserve", "fcntl", "resource"):
        monkeypatch.setitem(sys.modules, name, None)
    assert command(arguments) == 1
    assert capsys.readouterr().out == (
        "The server runs on Linux and macOS; on Windows use WSL or the image.\n"
    )
