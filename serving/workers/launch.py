"""How a worker process comes to be: forked from a process that has torch already, or started afresh."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from torchere.serving.workers import lanes
from torchere.serving.workers.fork_client import ForkServer, Spawned, spawn
from torchere.serving.workers.lanes import LanePage
from torchere.serving.workers.loss import Loss, loss_of_exit
from torchere.serving.workers.oom import OomWatch

SENT_AT_ONCE_BYTES = 4 * 2**20  # that a data socket takes before its reader reads: a batch of pictures
FORKS_AT_ONCE = 64  # each holds eight descriptors until it is there; a socket takes 278 requests at most


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker process that has just been started and waits for its first message."""

    pid: int
    lanes: socket.socket  # the server's end of the socket that takes the data sockets of lanes there
    control: socket.socket  # the server's end of its control socket
    page: LanePage  # shared with it
    output: asyncio.StreamReader  # what it prints, standard error included
    exit_code: asyncio.Future[int]  # negative: the number of the signal that ended it
    close: Callable[[], None]  # let go of the output pipe, once the process is gone

    @property
    def is_shared(self) -> bool:
        """Whether other versions are in the same process."""
        return False

    def loss(self, code: int, oom: OomWatch) -> Loss:
        """Why it ended with this exit code, if not by the server's will."""
        return loss_of_exit(code, code == -signal.SIGKILL and oom.claim())

    def kill(self, reason: Loss) -> None:
        """End it at once, for the reason given; without effect when it has ended."""
        if not self.exit_code.done():
            with suppress(ProcessLookupError):  # gone, and its exit code is on the way
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class LaunchedRoom:
    """A process for several versions that has just been started; the fields are those of `Launched`."""

    pid: int
    output: asyncio.StreamReader
    exit_code: asyncio.Future[int]
    close: Callable[[], None]


class Launcher(Protocol):
    """Starts worker processes. Used on the event loop.

    Attributes:
        has_own_process: the next one is for this version alone; set where that must be, and stays set.
    """

    has_own_process: bool

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

    has_own_process = True

    def __init__(self, environment: Mapping[str, str], python: str | None = None) -> None:
        self._environment = environment
        self._python = python or sys.executable

    async def launch(self, requests: int) -> Launched:
        """Start an interpreter that imports everything itself."""
        return await _launched(self._start, requests)

    async def _start(self, descriptors: Sequence[int], output: int) -> tuple[int, asyncio.Future[int]]:
        process = await asyncio.create_subprocess_exec(
            *(self._python, "-m", "torchere.serving.workers.process", *map(str, descriptors)),
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

    has_own_process = True

    def __init__(self, environment: Mapping[str, str], spawned: Spawned | None = None) -> None:
        self._environment = environment
        self._spawned = spawned
        self._fork_server: ForkServer | None = None
        self._turns = asyncio.Semaphore(FORKS_AT_ONCE)

    async def launch(self, requests: int) -> Launched:
        """Have the fork server make one, when it is its turn."""
        async with self._turns:
            return await self._launch(requests)

    async def launch_room(self, descriptor: int) -> LaunchedRoom:
        """Have the fork server make a process for several versions, at the other end of a room socket.

        Raises:
            OSError: as `launch`.
        """
        async with self._turns, _output_pipe() as (write_end, output, close):
            pid, exit_code = await self._running().fork_room(descriptor, write_end)
            return LaunchedRoom(pid, output, exit_code, close)

    async def _launch(self, requests: int) -> Launched:
        return await _launched(self._running().fork, requests)

    def _running(self) -> ForkServer:
        if self._fork_server is None or self._fork_server.lost:
            self._fork_server = ForkServer(self._spawned or spawn(self._environment))
            self._spawned = None
        return self._fork_server

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
    with channels(requests) as (ours, theirs):
        async with _output_pipe() as (write_end, output, close):
            pid, exit_code = await start(theirs, write_end)
    return Launched(pid, *ours, output, exit_code, close)


@contextmanager
def channels(requests: int) -> Iterator[tuple[tuple[socket.socket, socket.socket, LanePage], list[int]]]:
    """What a worker talks through: lanes socket, control socket and page, and the descriptors of its ends.

    The lanes socket takes the data sockets of its lanes to it, for their number changes.

    Its ends are closed at the end of the block, ours only when the block raises.

    Raises:
        OSError: the system has no descriptor or no memory left.
    """
    with ExitStack() as theirs, ExitStack() as ours:
        page_descriptor = lanes.create(requests)
        theirs.callback(os.close, page_descriptor)
        page = lanes.LanePage(page_descriptor, requests)
        ours.callback(page.close)
        kinds = (socket.SOCK_SEQPACKET, socket.SOCK_STREAM)
        pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
        for our_end, their_end in pairs:
            ours.callback(our_end.close)
            theirs.callback(their_end.close)
        descriptors = [*(their_end.fileno() for _, their_end in pairs), page_descriptor]
        yield (pairs[0][0], pairs[1][0], page), descriptors
        ours.pop_all()


@asynccontextmanager
async def _output_pipe() -> AsyncIterator[tuple[int, asyncio.StreamReader, Callable[[], None]]]:
    """The write end of a pipe, closed at the end of the block; what reads it, and what closes that.

    The read end is closed only when the block raises.
    """
    read_end, write_end = os.pipe()
    try:
        output, transport = await _read_from(read_end)
        try:
            yield write_end, output, transport.close
        except BaseException:
            transport.close()
            raise
    finally:
        os.close(write_end)


async def _read_from(read_end: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Read a pipe as a stream; the transport owns the descriptor, and closes it if this raises."""
    loop = asyncio.get_running_loop()
    # asyncio's transport closes the file object only. uvloop's closes the descriptor first: a file object
    # that closed it again would close the file that another thread has opened under that number meanwhile.
    file = os.fdopen(read_end, "rb", 0, closefd=isinstance(loop, asyncio.BaseEventLoop))
    output = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), file)
    return output, transport


def open_lanes(launched: Launched, count: int) -> list[socket.socket]:
    """Make the data sockets of so many lanes, and send the worker its ends; returns ours.

    Raises:
        OSError: the system has no descriptor left, or the worker is gone.
    """
    with ExitStack() as theirs, ExitStack() as ours:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(count)]
        for our_end, their_end in pairs:
            for end in (our_end, their_end):  # as far as the system lets us
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_AT_ONCE_BYTES)
            ours.callback(our_end.close)
            theirs.callback(their_end.close)
        for first in range(0, count, lanes.LANES_A_MESSAGE):
            some = pairs[first : first + lanes.LANES_A_MESSAGE]
            socket.send_fds(launched.lanes, [b"L"], [their_end.fileno() for _, their_end in some])
        ours.pop_all()
    return [our_end for our_end, _ in pairs]
