"""How a worker process comes to be: forked from a process that has torch already, or started afresh."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torchere.serving.execution.fork_client import ForkServer, Spawned, spawn

FORKS_AT_ONCE = 64  # each holds six descriptors until it is there; a socket takes 278 requests at most


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker process that has just been started and waits for its first message."""

    pid: int
    connection: socket.socket  # our end of its socket
    output: asyncio.StreamReader  # what it prints, standard error included
    exit_code: asyncio.Future[int]  # negative: the number of the signal that ended it
    close: Callable[[], None]  # let go of the output pipe, once the process is gone

    def kill(self) -> None:
        """End it at once; without effect when it has ended."""
        if not self.exit_code.done():
            with suppress(ProcessLookupError):  # gone, and its exit code is on the way
                os.kill(self.pid, signal.SIGKILL)


class Launcher(Protocol):
    """Starts worker processes. Used on the event loop."""

    async def launch(self) -> Launched:
        """Start one.

        Raises:
            OSError: the system would not (no process, memory or descriptor left).
        """


class ExecLauncher:
    """Starts a fresh interpreter for each worker: slower, and the only way into another environment.

    Args:
        environment: see `worker_environment`.
        python: the interpreter to run; None for the server's own.
    """

    def __init__(self, environment: Mapping[str, str], python: str | None = None) -> None:
        self._environment = environment
        self._python = python or sys.executable

    async def launch(self) -> Launched:
        """Start an interpreter that imports everything itself."""
        return await _launched(self._start)

    async def _start(self, worker_socket: int, output: int) -> tuple[int, asyncio.Future[int]]:
        process = await asyncio.create_subprocess_exec(
            *(self._python, "-m", "torchere.serving.execution.worker", str(worker_socket)),
            pass_fds=(worker_socket,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,  # asyncio's own pipe would stay open as long as what the worker has started lives
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # Ctrl+C in the terminal is for the server, which drains first
        )
        return process.pid, asyncio.ensure_future(process.wait())


class ForkLauncher:
    """Forks workers from one process that imported torch: a worker is there in a few milliseconds.

    One for a server. The process is started by the first launch, and again when it was lost.

    Args:
        environment: see `worker_environment`.
        spawned: a process that was started already, with the same environment; the launcher's from now on.
    """

    def __init__(self, environment: Mapping[str, str], spawned: Spawned | None = None) -> None:
        self._environment = environment
        self._spawned = spawned
        self._fork_server: ForkServer | None = None
        self._turns = asyncio.Semaphore(FORKS_AT_ONCE)

    async def launch(self) -> Launched:
        """Have the fork server make one, when it is its turn."""
        async with self._turns:
            return await self._launch()

    async def _launch(self) -> Launched:
        if self._fork_server is None or self._fork_server.lost:
            self._fork_server = ForkServer(self._spawned or spawn(self._environment))
            self._spawned = None
        return await _launched(self._fork_server.fork)

    async def close(self) -> None:
        """End the fork server, and with it every worker that is left."""
        if self._fork_server is not None:
            await self._fork_server.close()
        if self._spawned is not None:
            await asyncio.to_thread(self._spawned.end)


def worker_environment(hidden: str | None = None) -> dict[str, str]:
    """The environment of a worker: the server's, without what `hidden` (a regex) names as a whole."""
    kept = {name: value for name, value in os.environ.items() if not (hidden and re.fullmatch(hidden, name))}
    # The folder the server was started in must not shadow modules of torchere or torch (Python 3.11 on).
    return {**kept, "PYTHONSAFEPATH": "1"}


async def _launched(start: Callable[[int, int], Awaitable[tuple[int, asyncio.Future[int]]]]) -> Launched:
    """A worker that `start` starts with its ends of a socket and of the pipe for its output."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    read_end, write_end = os.pipe()
    try:
        pid, exit_code = await start(theirs.fileno(), write_end)
    except BaseException:
        ours.close()
        os.close(read_end)
        raise
    finally:
        theirs.close()
        os.close(write_end)
    try:
        output, transport = await _read_from(read_end)
    except BaseException:
        ours.close()
        raise
    return Launched(pid, ours, output, exit_code, close=transport.close)


async def _read_from(read_end: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Read a pipe as a stream; the transport owns the descriptor, and closes it if this raises."""
    loop = asyncio.get_running_loop()
    # asyncio's transport closes the file object only. uvloop's closes the descriptor first: a file object
    # that closed it again would close the file that another thread has opened under that number meanwhile.
    file = os.fdopen(read_end, "rb", 0, closefd=isinstance(loop, asyncio.BaseEventLoop))
    output = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), file)
    return output, transport
