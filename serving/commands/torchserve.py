"""Starting and stopping the server from another process, by its pid file.

The pid file counts only if that process is a server, which its command line tells: a pid is soon given to
another process, and nobody's editor should get our SIGTERM.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from torchere.serving.config.properties import ConfigurationError

# Tools that look for a running TorchServe search command lines for this. SageMaker's toolkit wants it as a
# word of its own, in one process and no more.
PROCESS_NAME = "org.pytorch.serve.ModelServer"
STOP_WAIT_S = 60.0  # TorchServe's
_LOOK_S = 0.05  # between two looks whether it has ended: it may be no child of ours, that tells

ALREADY_RUNNING = "TorchServe is already running, please use torchserve --stop to stop TorchServe."
ORPHAN = "Removing orphan pid file."
NOT_RUNNING = "TorchServe is not currently running."
STOPPED = "TorchServe has stopped."
ALREADY_STOPPED = "TorchServe already stopped."
TOO_LONG = "Stopping TorchServe took too long."


def pid_file(environ: Mapping[str, str]) -> Path:
    """Where the pid of this machine's server is kept: `$TMPDIR/.model_server.pid`."""
    return Path(environ.get("TMPDIR") or tempfile.gettempdir()) / ".model_server.pid"


def server_command(arguments: Sequence[str]) -> list[str]:
    """The command that runs `torchere serve` with these arguments, to be found by `PROCESS_NAME`."""
    # -P keeps the current directory off the import path: a stray torch.py there must not be ours.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    module = ["-m", "torchere.serving", "serve", "--process-name", PROCESS_NAME]
    return [sys.executable, *safe_path, *module, *arguments]


def may_start(file: Path, say: Callable[[str], None] = print) -> bool:
    """Whether no server runs; an orphan pid file is removed, with a word.

    Raises:
        ConfigurationError: it can't be removed.
    """
    if not file.exists():
        return True
    if running(read_pid(file)):
        say(ALREADY_RUNNING)
        return False
    _remove_orphan(file, say)
    return True


def _remove_orphan(file: Path, say: Callable[[str], None]) -> None:
    say(ORPHAN)
    try:
        file.unlink(missing_ok=True)
    except OSError as err:  # a file of another user, in the directory that is everybody's
        raise _not_ours(file, err) from err


def start_in_background(command: Sequence[str], file: Path) -> subprocess.Popen[bytes]:
    """Spawn the server, in a session of its own and on our standard output, and note its pid."""
    write_pid(file, 0)  # before there is a server that could not be found again
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    write_pid(file, process.pid)
    return process


def become(command: Sequence[str], file: Path) -> None:
    """Turn this process into the server: signals and the exit status need no go-between. Never returns."""
    write_pid(file, os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def stop(file: Path, wait_s: float = 0.0, say: Callable[[str], None] = print) -> int:
    """Ask the server of the pid file to end (SIGTERM) and forget it, its keys of this directory too.

    Args:
        file: The pid file.
        wait_s: Seconds to wait for its end; 0 does not wait.
        say: Gets the one line to print.

    Returns:
        The exit status: 0, or 1 when the server belongs to another user.

    Raises:
        ConfigurationError: the pid file is an orphan and can't be removed.
    """
    pid = read_pid(file)
    if pid is None or not running(pid):
        if file.exists():
            _remove_orphan(file, say)
        say(NOT_RUNNING)
        return 0
    try:
        say(_terminate(pid, wait_s))
    except psutil.AccessDenied:
        say(f"TorchServe (process {pid}) belongs to another user; stop it as that user.")
        return 1
    file.unlink(missing_ok=True)
    Path("key_file.json").unlink(missing_ok=True)
    return 0


def _terminate(pid: int, wait_s: float) -> str:
    try:
        process = psutil.Process(pid)
        process.terminate()
    except psutil.NoSuchProcess:
        return ALREADY_STOPPED
    given_up_s = time.monotonic() + wait_s
    while wait_s and not _has_ended(process):
        if time.monotonic() > given_up_s:
            return TOO_LONG
        time.sleep(_LOOK_S)
    return STOPPED


def _has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or waits for its parent to ask what became of it: its ports are free."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def running(pid: int | None) -> bool:
    """Whether that process is there and is a server."""
    if pid is None:
        return False
    try:
        return any(PROCESS_NAME in word for word in psutil.Process(pid).cmdline())
    except psutil.AccessDenied:
        return True  # there, and not ours to look into: rather no second server
    except psutil.Error:
        return False


def read_pid(file: Path) -> int | None:
    """The pid in the file; None without a file, or with something else in it."""
    try:
        pid = int(file.read_text(encoding="ascii").split("\n")[0])
    except (OSError, ValueError):
        return None
    return pid if 0 < pid < 2**31 else None  # 0 and below address groups of processes


def write_pid(file: Path, pid: int) -> None:
    """Write the pid file in one step, so that nobody reads half of it.

    Raises:
        ConfigurationError: it can't be written, or is a link (the directory is everybody's).
    """
    draft = file.with_name(f"{file.name}.{pid}")
    try:
        if file.is_symlink():
            raise OSError(errno.ELOOP, "it is a link")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, 0o644), "w", encoding="ascii") as opened:
            opened.write(f"{pid}\n")
        os.replace(draft, file)
    except OSError as err:
        raise _not_ours(file, err) from err


def _not_ours(file: Path, err: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{file}: {err.strerror}; the pid file must be writable: remove it, or set TMPDIR"
    )
