"""How a worker process comes to be: forked from a process that has torch already, or started afresh."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from torchere.serving.execution import lanes
from torchere.serving.execution.fork_client import ForkServer, Spawned, spawn
from torchere.serving.execution.lanes import LanePage

FORKS_AT_ONCE = 64  # each holds eight descriptors until it is there; a socket takes 278 requests at most


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker process that has just been started and waits for its first message."""

    pid: int
    data: socket.socket  # the server's end of its data socket
    control: socket.socket  # the server's end of its control socket
    page: LanePage  # shared with it
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

    async def launch(self, requests: int) -> Launched:
        """Start one whose runs have at most so many requests.

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

    async def launch(self, requests: int) -> Launched:
        """Start an interpreter that imports everything itself."""
        return await _launched(self._start, requests)

    async def _start(self, descriptors: Sequence[int], output: int) -> tuple[int, asyncio.Future[int]]:
        process = await asyncio.create_subprocess_exec(
            *(self._python, "-m", "torchere.serving.execution.process", *map(str, descriptors)),
            pass_fds=descriptors,
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

    async def launch(self, requests: int) -> Launched:
        """Have the fork server make one, when it is its turn."""
        async with self._turns:
            return await self._launch(requests)

    async def _launch(self, requests: int) -> Launched:
        if self._fork_server is None or self._fork_server.lost:
            self._fork_server = ForkServer(self._spawned or spawn(self._environment))
            self._spawned = None
        return await _launched(self._fork_server.fork, requests)

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


async def _launched(
    start: Callable[[Sequence[int], int], Awaitable[tuple[int, asyncio.Future[int]]]], requests: int
) -> Launched:
    """A worker that `start` starts with its ends of two sockets, its page, and the pipe for its output."""
    with ExitStack() as theirs, ExitStack() as ours:
        page_descriptor = lanes.create(requests)
        theirs.callback(os.close, page_descriptor)
        page = lanes.LanePage(page_descriptor, requests)
        ours.callback(page.close)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
        for our_end, their_end in pairs:
            ours.callback(our_end.close)
            theirs.callback(their_end.close)
        read_end, write_end = os.pipe()
        theirs.callback(os.close, write_end)
        pipe = ours.enter_context(ExitStack())
        pipe.callback(os.close, read_end)
        descriptors = (*(their_end.fileno() for _, their_end in pairs), page_descriptor)
        pid, exit_code = await start(descriptors, write_end)
        pipe.pop_all()
        output, transport = await _read_from(read_end)
        ours.pop_all()
    return Launched(pid, pairs[0][0], pairs[1][0], page, output, exit_code, close=transport.close)


async def _read_from(read_end: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Read a pipe as a stream; the transport owns the descriptor, and closes it if this raises."""
    loop = asyncio.get_running_loop()
    # asyncio's transport closes the file object only. uvloop's closes the descriptor first: a file object
    # that closed it again would close the file that another thread has opened under that number meanwhile.
    file = os.fdopen(read_end, "rb", 0, closefd=isinstance(loop, asyncio.BaseEventLoop))
    output = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), file)
    return output, transport
