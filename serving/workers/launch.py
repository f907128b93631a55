"""Starts worker processes: forked from a process that has imported torch, or as fresh interpreters."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol, TypeAlias

from torchere.serving.workers import lanes
from torchere.serving.workers.fork_client import COMPILER_WORKER, ROOM, WORKER, ForkServer
from torchere.serving.workers.lanes import LanePage
from torchere.serving.workers.loss import Loss, loss_of_exit
from torchere.serving.workers.oom import OomWatch
from torchere.serving.workers.sandbox import Sandbox, entered_by
from torchere.serving.workers.spawn import Spawned, spawn

# Send buffers of data sockets, as far as the system allows; Linux doubles them. The server's holds a batch of
# images. A worker's holds one large answer: a streamed answer can be ahead of its client by as much.
RUN_BUFFER_BYTES = 4 * 2**20
REPORT_BUFFER_BYTES = 2**20
ENDING_GRACE_S = 2.0  # for a process to end by itself after its sockets are closed
LAST_WORDS_S = 0.5  # for the rest of a process's output, if a child keeps the pipe open
FORKS_AT_ONCE = 64  # each holds eight descriptors until it is started; a socket queues at most 278 requests


# Starts a process that inherits descriptors and an output pipe; returns its pid and its exit code to come.
Start: TypeAlias = Callable[[Sequence[int], int], Awaitable[tuple[int, asyncio.Future[int]]]]


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """A process that has just been started: a worker, or a room of several versions."""

    pid: int
    output: asyncio.StreamReader  # its standard output and standard error
    exit_code: asyncio.Future[int]  # negative: the number of the signal that ended it
    close: Callable[[], None]  # closes the output pipe, after the process has ended

    def loss(self, code: int, oom: OomWatch) -> Loss:
        """Return the cause of an exit with this code that the server did not ask for."""
        return loss_of_exit(code, code == -signal.SIGKILL and oom.claim())

    def kill(self, reason: Loss) -> None:
        """Kill the process, for the given reason; without effect if it has ended."""
        if not self.exit_code.done():
            with suppress(ProcessLookupError):  # gone, and its exit code is on the way
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Launched(LaunchedProcess):
    """A worker process that waits for its first message."""

    lanes: socket.socket  # the server's end of the socket that passes the data sockets of lanes
    control: socket.socket  # the server's end of its control socket
    page: LanePage  # shared with the process
    is_shared: ClassVar[bool] = False  # whether the process may host other versions


class Launcher(Protocol):
    """Starts worker processes. Used on the event loop."""

    has_own_process: bool  # the next process is for this version alone; once set, it stays set

    async def launch(self, requests: int) -> Launched:
        """Start a worker process whose runs have at most `requests` requests.

        Raises:
            OSError: the system has no process, memory or descriptor left.
        """


class ExecLauncher:
    """Starts a fresh interpreter for each worker: slower, but the only way to another Python environment.

    Args:
        environment: see `worker_environment`.
        python: the interpreter to run; None for the server's own.
        sandbox: entered before the interpreter starts; None: none.
        packages: a folder that the interpreter searches first; the code that enters the sandbox does not.
    """

    has_own_process = True

    def __init__(
        self,
        environment: Mapping[str, str],
        python: str | None = None,
        *,
        sandbox: Sandbox | None = None,
        packages: str | None = None,
    ) -> None:
        self._environment = dict(environment)
        self._sandbox = sandbox
        self._command = [python or sys.executable, "-m", "torchere.serving.workers.process"]
        self._search: dict[str, str] = {}
        if packages:
            search_path = [packages, environment.get("PYTHONPATH")]
            self._search["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))

    async def launch(self, requests: int) -> Launched:
        """Start a fresh interpreter, which imports everything itself."""
        return await _launched(self._start, requests)

    async def _start(self, descriptors: Sequence[int], output: int) -> tuple[int, asyncio.Future[int]]:
        command, environment = [*self._command, *map(str, descriptors)], self._environment
        if self._sandbox is not None:
            command = entered_by(self._sandbox, self._search, command)
        else:
            environment = {**environment, **self._search}
        process = await asyncio.create_subprocess_exec(
            *command,
            pass_fds=descriptors,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,  # asyncio's own pipe would stay open as long as the worker's children live
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl+C in the terminal is for the server, which drains first
        )
        return process.pid, asyncio.ensure_future(process.wait())


class ForkLauncher:
    """Forks workers from one process that imported torch: a worker starts in a few milliseconds.

    A server has one. The first launch starts the process, and a later one restarts it if it was lost.

    Args:
        environment: see `worker_environment`.
        spawned: an already started process with the same environment; the launcher takes ownership.
        modules: the process imports these for all workers.
    """

    has_own_process = True

    def __init__(
        self, environment: Mapping[str, str], spawned: Spawned | None = None, modules: Sequence[str] = ()
    ) -> None:
        self._environment = environment
        self._spawned = spawned
        self._modules = modules
        self._fork_server: ForkServer | None = None
        self._turns = asyncio.Semaphore(FORKS_AT_ONCE)

    async def launch(self, requests: int, *, with_compiler: bool = False) -> Launched:
        """Fork a worker; at most `FORKS_AT_ONCE` launches run at a time."""
        kind = COMPILER_WORKER if with_compiler else WORKER
        async with self._turns:
            return await _launched(partial(self._running().fork, kind=kind), requests)

    async def launch_room(self, descriptor: int) -> LaunchedProcess:
        """Fork a process for several versions, with `descriptor` as its room socket; raises as `launch`."""
        async with self._turns:
            return await _started(partial(self._running().fork, kind=ROOM), [descriptor])

    def _running(self) -> ForkServer:
        if self._fork_server is None or self._fork_server.lost:
            self._fork_server = ForkServer(self._spawned or spawn(self._environment, self._modules))
            self._spawned = None
        return self._fork_server

    async def close(self) -> None:
        """Terminate the fork server, and with it all remaining workers."""
        if self._fork_server is not None:
            await self._fork_server.close()
        if self._spawned is not None:
            await asyncio.to_thread(self._spawned.end)


class CompilerLauncher:
    """Launches the workers of a version whose model needs torch's compiler to load or to run."""

    has_own_process = True

    def __init__(self, forks: ForkLauncher) -> None:
        self._forks = forks

    async def launch(self, requests: int) -> Launched:
        """Fork a worker that has imported the compiler; see `Launcher`."""
        return await self._forks.launch(requests, with_compiler=True)


async def _launched(start: Start, requests: int) -> Launched:
    """Start a worker by `start`, with its ends of two sockets, its page, and its output pipe."""
    with channels(requests) as (ours, theirs):
        process = await _started(start, theirs)
    return Launched(process.pid, process.output, process.exit_code, process.close, *ours)


async def _started(start: Start, descriptors: Sequence[int]) -> LaunchedProcess:
    """Start a process by `start`, with descriptors and an output pipe, whose write end is closed here."""
    read_end, write_end = os.pipe()
    try:
        loop, output = asyncio.get_running_loop(), asyncio.StreamReader()
        # asyncio's transport closes the file object only. uvloop's closes the descriptor itself: a file
        # object that closed it again could close a file that another thread has opened under its number.
        file = os.fdopen(read_end, "rb", 0, closefd=isinstance(loop, asyncio.BaseEventLoop))
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), file)
        try:
            pid, exit_code = await start(descriptors, write_end)
        except BaseException:
            transport.close()
            raise
    finally:
        os.close(write_end)
    exit_code.add_done_callback(partial(_end_children, pid))
    return LaunchedProcess(pid, output, exit_code, transport.close)


def _end_children(pid: int, exit_code: asyncio.Future[int]) -> None:
    """Kill the processes that a lost worker has left: they would keep its memory, GPU and output.

    A worker leads a process group of its own. One that exits with code 0 may leave processes on purpose.
    """
    if not exit_code.cancelled() and not exit_code.exception() and exit_code.result():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@contextmanager
def channels(requests: int) -> Iterator[tuple[tuple[socket.socket, socket.socket, LanePage], list[int]]]:
    """Open a worker's lanes socket, control socket and page; yield them and the worker's descriptors.

    The lanes socket passes the data sockets of lanes to the worker, because the number of lanes changes.

    The worker's ends are closed at the end of the block, the server's ends only if the block raises.

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


def open_lanes(launched: Launched, count: int) -> list[socket.socket]:
    """Open the data sockets of `count` lanes and send the worker its ends; return the server's ends.

    Raises:
        OSError: the system has no descriptor left, or the worker is gone.
    """
    with ExitStack() as theirs, ExitStack() as ours:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(count)]
        for our_end, their_end in pairs:
            our_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, RUN_BUFFER_BYTES)
            their_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REPORT_BUFFER_BYTES)
            ours.callback(our_end.close)
            theirs.callback(their_end.close)
        for first in range(0, count, lanes.LANES_A_MESSAGE):
            some = pairs[first : first + lanes.LANES_A_MESSAGE]
            socket.send_fds(launched.lanes, [b"L"], [their_end.fileno() for _, their_end in some])
        ours.pop_all()
    return [our_end for our_end, _ in pairs]
