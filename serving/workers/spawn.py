"""Starts the fork server, the process that imports torch and forks workers, and makes their environment.

The import is the slowest part of a server's start. So the process starts as soon as the settings are known,
ahead of the server's own imports, and this module imports little.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torchere.serving.config.server_settings import SequenceHeaders, ServerSettings

END_TIMEOUT_S = 5.0
# Imports make many objects and little garbage: collections would take a sixth of their time.
_START = "import gc; gc.disable(); from torchere.serving.workers import fork_server; fork_server.main()"


@dataclass(frozen=True, slots=True)
class Spawned:
    """A fork server process, which may still be importing torch, and the server's end of its socket."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    modules: tuple[str, ...] = ()  # imported first

    def end(self) -> None:
        """Terminate the process and reap it; idempotent. Blocks for a moment."""
        self.control.close()
        self.process.terminate()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a module that it imports ignores the signal
            self.process.kill()
            self.process.wait()


def spawn(environment: Mapping[str, str], modules: Sequence[str] = ()) -> Spawned:
    """Start the process of a fork server, which imports the modules first; needs no event loop.

    The kernel kills the process when the calling thread ends (`die_with_parent`), so the thread must live as
    long as the process.

    Raises:
        OSError: the system can't start the process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _START, str(theirs.fileno()), *modules]
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl+C in the terminal must reach the server only, which drains first
        )
    return Spawned(process, ours, tuple(modules))


# How often a thread of OpenMP looks whether the others are done before it sleeps (libgomp: GOMP_SPINCOUNT).
# By default it looks 300,000 times, for milliseconds, while the thread that it waits for may have no core:
# other models and the server itself need cores, and a container limits them (docs/decisions/0041).
SPIN_COUNT = 1000


def worker_environment(hidden: str | None = None, settings: ServerSettings | None = None) -> dict[str, str]:
    """Return the server's environment without the variables whose whole name matches the regex `hidden`.

    It limits how long OpenMP threads spin, unless the operator has done so (`SPIN_COUNT`). With `settings`
    it also has the variables that TorchServe gives its workers, for handlers that read them, and lacks the
    variables whose values `env_values_hidden_from_workers` matches.
    """
    kept = {name: value for name, value in os.environ.items() if not (hidden and re.fullmatch(hidden, name))}
    if settings is not None and (secret := settings.env_values_hidden_from_workers):
        kept = {name: value for name, value in kept.items() if not re.search(secret, value)}
    given = _of_torchserve(settings, kept) if settings is not None else {}
    given |= spin_bound(kept)
    # Files in the current folder must not shadow torchere or torch (has an effect from Python 3.11 on).
    return {**kept, **given, "PYTHONSAFEPATH": "1"}


def spin_bound(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that bounds how long threads of OpenMP spin; {} if the operator has set one."""
    is_set = "GOMP_SPINCOUNT" in environment or "OMP_WAIT_POLICY" in environment
    return {} if is_set else {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def _of_torchserve(settings: ServerSettings, kept: Mapping[str, str]) -> dict[str, str]:
    switches = {
        "TS_DECODE_INPUT_REQUEST": settings.decode_input,
        "TS_IPEX_ENABLE": settings.ipex_enabled,
        "TS_IPEX_GPU_ENABLE": settings.ipex_gpu_enabled,
    }
    given = {name: str(value).lower() for name, value in switches.items()}
    for which in ("id", "start", "end"):  # read by `Context`; with TorchServe an operator must set them, too
        name, header = f"TS_REQUEST_SEQUENCE_{which.upper()}", getattr(settings.sequence_headers, which)
        if header != getattr(SequenceHeaders(), which) and name not in kept:
            given[name] = header
    return given


@contextmanager
def fork_server_ahead(settings: ServerSettings) -> Iterator[Spawned | None]:
    """Start the fork server if the settings name models; it ends with the block.

    Yields None if they name no models, or if the process can't be started; a later launch then tries again.
    """
    spawned = None
    of_snapshot = settings.snapshot_models or settings.snapshot_workflows
    if settings.load_models or settings.load_workflows or of_snapshot:
        with suppress(OSError):
            environment = worker_environment(settings.env_vars_hidden_from_workers, settings)
            spawned = spawn(environment, settings.preload_modules)
    try:
        yield spawned
    finally:
        if spawned is not None:
            spawned.end()
