"""The server's side of the fork server: requests workers, and receives their pids and exit codes.

Protocol, over a Unix socket that keeps message boundaries: the server sends `F` with the descriptors of a
worker (its lanes socket, its control socket, its page, the pipe for its output), `C` with the same for a
worker that needs torch's compiler (the first one lets the fork server import it), or `R` with those of a
process for several versions (its room socket, the pipe). The fork server answers each, in order, with
`P <pid>`, or with `E <errno>` if the fork failed. It sends `X <pid> <exit code>` when a worker has ended.
At its start it sends `I <number>` before it imports each module of `preload_modules`, and after the last one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchere.serving.io.watchdog import within

if TYPE_CHECKING:  # the fork server imports this module, and needs no settings
    from torchere.serving.workers.spawn import Spawned

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64
WORKER = b"F"
COMPILER_WORKER = b"C"  # has imported torch's compiler; the first one takes 2 s
ROOM = b"R"  # for several versions; inherits its room socket
DESCRIPTORS = {WORKER: 4, COMPILER_WORKER: 4, ROOM: 2}  # number in a request
FORK_TIMEOUT_S = 120.0  # the first fork waits for imports; a fork server that hangs for longer is given up


class ForkServer:
    """One running fork server. Use it on the event loop that it was constructed on."""

    def __init__(self, spawned: Spawned) -> None:
        self._spawned = spawned
        self._process = spawned.process
        self._control = spawned.control
        self._loop = asyncio.get_running_loop()
        self._forks: deque[asyncio.Future[tuple[int, asyncio.Future[int]]]] = deque()  # answered in order
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._importing = ""  # the module of `preload_modules` that is imported now
        self.lost = False
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._receive)

    async def fork(
        self, descriptors: Sequence[int], output: int, kind: bytes = WORKER
    ) -> tuple[int, asyncio.Future[int]]:
        """Fork a process that inherits the descriptors; return its pid and the future of its exit code.

        Raises:
            OSError: the fork server is lost or hangs, or the system can't create a process.
        """
        if self.lost:
            raise OSError(self._said("the fork server is lost"))
        forked: asyncio.Future[tuple[int, asyncio.Future[int]]] = self._loop.create_future()
        try:
            socket.send_fds(self._control, [kind], [*descriptors, output])
        except ConnectionError:  # it has ended; its last messages name the module it was importing
            while not self.lost:
                self._receive()
            raise OSError(self._said("the fork server was lost")) from None
        self._forks.append(forked)
        try:
            return await within(forked, FORK_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._process.kill()  # its socket closes, which fails all pending forks
            late = self._said(f"the fork server did not answer within {FORK_TIMEOUT_S:g} s")
            raise OSError(late if self._importing else f"{late}; it imports torch first") from None

    def _said(self, text: str) -> str:
        """Return the text of an error, with the module that is to blame if an import was under way."""
        if not self._importing:
            return text
        return f"{text} while it imported {self._importing}: take it out of preload_modules"

    async def close(self) -> None:
        """Terminate the fork server; its remaining workers end with it."""
        self._lose()
        await asyncio.to_thread(self._spawned.end)

    def _receive(self) -> None:
        message = b""
        for _ in range(2):  # a reset is reported once, ahead of messages that are still queued
            try:
                message = self._control.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            break
        if not message:
            text = "the process that workers are forked from was lost, and all workers with it: process %d"
            logger.error(text, self._process.pid)
            self._lose()
            return
        kind, number, *code = message.split()
        if kind == b"P":
            self._forked(int(number))
        elif kind == b"E":
            self._not_forked(int(number))
        elif kind == b"I":
            modules = self._spawned.modules
            self._importing = modules[int(number)] if int(number) < len(modules) else ""
        elif int(number) in self._exits:
            self._settle(self._exits.pop(int(number)), int(code[0]))

    def _forked(self, pid: int) -> None:
        self._exits[pid] = self._loop.create_future()
        forked = self._forks.popleft()
        if not forked.done():
            forked.set_result((pid, self._exits[pid]))

    def _not_forked(self, error_number: int) -> None:
        forked = self._forks.popleft()
        if not forked.done():
            forked.set_exception(OSError(error_number, os.strerror(error_number)))

    def _lose(self) -> None:
        """Mark the fork server as lost and settle all futures; the kernel kills its workers by SIGKILL."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._control)
        self._control.close()
        for forked in self._forks:
            if not forked.done():
                forked.set_exception(OSError(self._said("the fork server was lost")))
        self._forks.clear()
        for exited in self._exits.values():
            self._settle(exited, -9)
        self._exits.clear()

    @staticmethod
    def _settle(exited: asyncio.Future[int], code: int) -> None:
        if not exited.done():
            exited.set_result(code)
