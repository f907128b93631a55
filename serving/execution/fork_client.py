"""The server's side of the fork server: asks for workers, learns their process ids and how they ended.

Protocol, over a Unix socket that keeps message boundaries: the server sends an empty request with two
descriptors (the worker's socket, the pipe for its output); the fork server answers each, in order, with
`P <pid>`, and sends `X <pid> <exit code>` when a worker has ended.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping

MAX_MESSAGE_BYTES = 64


class ForkServer:
    """One running fork server. Use it on the event loop that started it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._forks: deque[asyncio.Future[int]] = deque()  # answered in order
        self._exits: dict[int, asyncio.Future[int]] = {}
        self.lost = False
        control.setblocking(False)
        self._loop.add_reader(control, self._receive)

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> ForkServer:
        """Start the process; it imports torch while the first request already waits for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "torchere.serving.execution.fork_server", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl+C in the terminal is for the server, which drains first
        )
        theirs.close()
        return cls(process, ours)

    async def fork(self, worker_socket: int, output: int) -> tuple[int, asyncio.Future[int]]:
        """Fork a worker that inherits both descriptors; returns its pid and the future of its exit code.

        Raises:
            OSError: the fork server is lost.
        """
        if self.lost:
            raise OSError("the fork server is lost")
        forked: asyncio.Future[int] = self._loop.create_future()
        self._forks.append(forked)
        socket.send_fds(self._control, [b"F"], [worker_socket, output])
        pid = await forked
        return pid, self._exits[pid]

    async def close(self) -> None:
        """End it; workers that are left end with it."""
        self._lose()
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)

    def _receive(self) -> None:
        try:
            message = self._control.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            message = b""
        if not message:
            self._lose()
            return
        kind, pid, *code = message.split()
        if kind == b"P":
            self._forked(int(pid))
        elif int(pid) in self._exits:
            self._settle(self._exits.pop(int(pid)), int(code[0]))

    def _forked(self, pid: int) -> None:
        self._exits[pid] = self._loop.create_future()
        forked = self._forks.popleft()
        if not forked.done():
            forked.set_result(pid)

    def _lose(self) -> None:
        """Nothing more will come from it: its workers are ended by the kernel, which is signal 9."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._control)
        self._control.close()
        for forked in self._forks:
            if not forked.done():
                forked.set_exception(OSError("the fork server was lost"))
        self._forks.clear()
        for exited in self._exits.values():
            self._settle(exited, -9)
        self._exits.clear()

    @staticmethod
    def _settle(exited: asyncio.Future[int], code: int) -> None:
        if not exited.done():
            exited.set_result(code)
