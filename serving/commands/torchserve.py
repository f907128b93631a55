"""Starts and stops the server from another process, by its pid file.

A pid file is valid only if the process with this pid has the command line of a server: pids are reused, and
an unrelated process must not receive the SIGTERM.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from torchere.serving.commands.serve_options import serve_command
from torchere.serving.config.properties import ConfigurationError

# Tools detect a running TorchServe by this text in a command line. SageMaker's toolkit requires it as a
# separate argument of exactly one process.
PROCESS_NAME = "org.pytorch.serve.ModelServer"
STOP_WAIT_S = 60.0  # TorchServe's
_LOOK_S = 0.05  # poll interval: the server may not be a child process, for which wait() would work

ALREADY_RUNNING = "TorchServe is already running, please use torchserve --stop to stop TorchServe."
ORPHAN = "Removing orphan pid file."
NOT_RUNNING = "TorchServe is not currently running."
STOPPING = "Stopping TorchServe (process {}, started in {})."
STOPPED = "TorchServe has stopped."
ALREADY_STOPPED = "TorchServe already stopped."
TOO_LONG = "Stopping TorchServe took too long."
FINISHING = "TorchServe (process {}) is finishing its requests; waiting for its end."


def pid_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the pid file of a server with this environment: `$TMPDIR/.model_server.pid`.

    As in `tempfile.gettempdir`, which is not used because it reads this process's own environment.
    """
    named = next((environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), None)
    default = "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()
    return Path(named or default) / ".model_server.pid"


def server_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of `torchere serve` with these arguments, marked with `PROCESS_NAME`."""
    return serve_command(["--process-name", PROCESS_NAME, *arguments])


@contextmanager
def starts_in_turn(file: Path) -> Iterator[None]:
    """Serialise this user's starts with this pid file: each waits until the one before it can be found."""
    path = file.with_name(f"{file.name}.lock")  # the pid file itself is replaced
    with ExitStack() as stack:
        with suppress(OSError):  # another user's file, or a file system without locks: start all the same
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = stack.enter_context(os.fdopen(os.open(path, flags, 0o600), "rb"))  # `become` closes it
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def may_start(file: Path, wait_s: float = STOP_WAIT_S) -> bool:
    """Return whether no server is running; remove an orphaned pid file and print a line about it.

    A server that was stopped and still answers its last requests is waited for, `wait_s` at most, so that
    `torchserve --stop; torchserve --start` is a restart.

    Raises:
        ConfigurationError: the orphaned pid file can't be removed.
    """
    if not running(read_pid(file)) and not _finished(file, wait_s):
        print(TOO_LONG)
        return False
    if _found(file) is not None:
        print(ALREADY_RUNNING)
        return False
    return True


def _found(file: Path) -> int | None:
    """Return the pid of the running server, by its file or else, after removing an orphan, by a search."""
    pid = read_pid(file)
    if running(pid):
        return pid
    _remove_orphan(file)
    return pid_without_file(file)


def _stopping(file: Path) -> Path:
    """Return the file with the pid of the server that was stopped last, which may still be finishing."""
    return file.with_name(f"{file.name}.stopping")


def _finished(file: Path, wait_s: float) -> bool:
    """Wait for the end of the server that was stopped last; return False if it takes too long."""
    pid = read_pid(_stopping(file))
    if pid is not None and running(pid):
        print(FINISHING.format(pid))
        if not _ends(psutil.Process(pid), wait_s):
            return False
    with suppress(OSError):
        _stopping(file).unlink(missing_ok=True)
    return True


def _remove_orphan(file: Path) -> None:
    """Remove the file, if there is one, and print a line about it."""
    if not file.exists():
        return
    print(ORPHAN)
    try:
        file.unlink(missing_ok=True)
    except OSError as err:  # another user's file in the shared temporary directory
        raise _not_ours(file, err) from err


def start_in_background(command: Sequence[str], file: Path) -> subprocess.Popen[bytes]:
    """Start the server in a new session, with this process's standard output, and write its pid file."""
    write_pid(file, 0)  # fail before the start if the pid file can't be written
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    write_pid(file, process.pid)
    while process.poll() is None and not running(process.pid):
        time.sleep(_LOOK_S)  # the kernel is still putting the new program in place
    return process


def become(command: Sequence[str], file: Path) -> None:
    """Replace this process by the server, which then gets signals and sets the status. Never returns."""
    write_pid(file, os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def stop(file: Path, wait_s: float = 0.0) -> int:
    """Send SIGTERM to the server in the pid file, and delete that file.

    Only the server deletes its key file: one in this directory may be another server's.

    Args:
        file: the pid file.
        wait_s: seconds to wait for the exit of the server; 0 does not wait.

    Returns:
        The exit status: 0, or 1 if the server belongs to another user.

    Raises:
        ConfigurationError: an orphaned pid file, or that of the stopped server, can't be removed.
    """
    pid = _found(file)
    if pid is None:
        print(NOT_RUNNING)
        return 0
    if pid == read_pid(_stopping(file)):  # a second signal would end it at once
        print(STOPPED if _finished(file, wait_s or STOP_WAIT_S) else TOO_LONG)
        return 0
    try:
        print(_terminate(pid, wait_s))
    except psutil.AccessDenied:
        print(f"TorchServe (process {pid}) belongs to another user; stop it as that user.")
        return 1
    try:
        if running(pid):
            os.replace(file, _stopping(file))
        else:
            file.unlink(missing_ok=True)
    except FileNotFoundError:  # it was found without its file
        with suppress(ConfigurationError):
            write_pid(_stopping(file), pid)
    except OSError as err:  # read-only by now
        raise _not_ours(file, err) from err
    return 0


def _terminate(pid: int, wait_s: float) -> str:
    try:
        process = psutil.Process(pid)
        folder = process.cwd()
        process.terminate()
        # Others may have started it. To standard error: scripts compare TorchServe's line.
        print(STOPPING.format(pid, folder), file=sys.stderr)
    except psutil.NoSuchProcess:
        return ALREADY_STOPPED
    return STOPPED if not wait_s or _ends(process, wait_s) else TOO_LONG


def _ends(process: psutil.Process, wait_s: float) -> bool:
    """Return whether the process ends within `wait_s` seconds."""
    given_up_s = time.monotonic() + wait_s
    while not _has_ended(process):
        if time.monotonic() > given_up_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _has_ended(process: psutil.Process) -> bool:
    """Return whether the process has exited or is a zombie; its ports are free in both cases."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def running(pid: int | None) -> bool:
    """Return whether a process with this pid exists and is a server."""
    if pid is None:
        return False
    try:
        return any(PROCESS_NAME in word for word in psutil.Process(pid).cmdline())
    except psutil.AccessDenied:
        return True  # unreadable: assume a server, so as not to start a second one
    except psutil.Error:
        return False


def pid_without_file(file: Path) -> int | None:
    """Return the pid of a server of this user that its pid file does not name; None if no such server runs.

    Programs that clean temporary folders delete old files, and a server may run for months.
    """
    for process in psutil.process_iter():
        try:
            is_ours = process.uids().real == os.getuid() and PROCESS_NAME in process.cmdline()
            if is_ours and pid_file(process.environ()) == file:
                return int(process.pid)
        except psutil.Error:  # it has ended, or can't be read
            continue
    return None


def read_pid(file: Path) -> int | None:
    """Return the pid in the file; None if there is no file or no valid pid."""
    try:
        pid = int(file.read_text(encoding="ascii").split("\n")[0])
    except (OSError, ValueError):
        return None
    return pid if 0 < pid < 2**31 else None  # 0 and negative numbers address process groups


def write_pid(file: Path, pid: int) -> None:
    """Write the pid file atomically, so that readers never see a partial file.

    Raises:
        ConfigurationError: the file can't be written, or is a link (the directory is shared by all users).
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
