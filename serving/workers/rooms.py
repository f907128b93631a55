"""The server's side of rooms: worker processes that several versions share, for higher density.

For its `Worker`, a tenant of a room is like any process: it has its own sockets and page. Only its end
differs. A tenant that is stopped, or fails to load, leaves, and its room stays. Any other loss of a tenant
ends the room with all its tenants; each is restarted by its own restart rule, in a new room. A version that
has lost two rooms gets its own process from then on; so does one in its first load when its room crashes.

`room_process.py` has the process's side, and the messages between the two.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from torchere.serving.logs.worker_lines import new_token, relay_all
from torchere.serving.types import ModelKey
from torchere.serving.workers.launch import (
    ENDING_GRACE_S,
    LAST_WORDS_S,
    ForkLauncher,
    Launched,
    LaunchedProcess,
    channels,
)
from torchere.serving.workers.loss import Loss, LossKind, loss_of_exit
from torchere.serving.workers.oom import OomWatch

logger = logging.getLogger(__name__)
output_logger = logging.getLogger("torchere.worker")  # for the output of any worker

MAX_TENANTS = 256  # in a room: each takes three of the 1,024 descriptors that a process has by default
MAX_LOSSES = 2  # rooms that a version loses before it gets its own process
LEAVING_S = 60.0  # time for a stopped tenant to finish its run; then its room is killed
NAMED = 4  # at most this many models of a room are named in its log lines
_BUSY_S = 0.01  # between attempts to send on the full socket of the room, and looks for tenants that leave
_MAX_MESSAGE_BYTES = 64
_QUIET = frozenset({LossKind.STOPPED, LossKind.LOAD})  # losses that end one tenant only


@dataclass(frozen=True, slots=True)
class LaunchedTenant(Launched):
    """A version in a shared worker process that waits for its first message."""

    room: Room
    number: int
    is_shared: ClassVar[bool] = True  # even for the last tenant: the others of a lost room end before it

    def loss(self, code: int, oom: OomWatch) -> Loss:
        """Return the cause of the loss: that of its room, or its exit code if the room is still running."""
        return replace(self.room.loss(code, oom), of_room=True) if self.room.is_over else loss_of_exit(code)

    def kill(self, reason: Loss) -> None:
        """Kill the room with all tenants; if the version is stopped or not loaded, end this tenant only."""
        if self.exit_code.done():
            return
        if reason.kind not in _QUIET:
            self.room.kill(self.number, reason)
            return
        for each in (self.lanes, self.control):
            with suppress(OSError):  # it is closed
                each.shutdown(socket.SHUT_RDWR)
        self.room.let_go(self.number)


class Room:
    """One process and the versions in it, with the server's end of its room socket, which is closed here.

    Lives on the event loop.
    """

    def __init__(self, process: LaunchedProcess, server: socket.socket) -> None:
        self._process = process
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._token = new_token()
        self._numbers = itertools.count(1)
        self._tenants: dict[int, tuple[RoomTenancy, asyncio.Future[int]]] = {}
        self._leaving: dict[int, asyncio.TimerHandle] = {}  # tenants that are stopped but have not ended yet
        self._coming = 0  # tenants being added
        self._reason: Loss | None = None  # why the process has ended, or is being killed
        self.is_closed = False  # accepts no further tenants
        server.setblocking(False)
        self._loop.add_reader(server, self._receive)
        self._output = asyncio.ensure_future(
            relay_all(process.output, self._token, self._origin, output_logger, process.exit_code.done)
        )
        self._life = asyncio.ensure_future(self._live())

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._process.exit_code.done()

    async def takes_more(self) -> bool:
        """Return whether another tenant may be added; wait until those that are leaving have ended.

        If one does not end within `ENDING_GRACE_S`, none may: it may keep the GIL, so that no other can load.
        """
        while self._leaving and self._has_place:
            first_s = min(timer.when() for timer in self._leaving.values()) - LEAVING_S
            if self._loop.time() - first_s > ENDING_GRACE_S:
                return False
            await asyncio.sleep(_BUSY_S)
        return self._has_place

    @property
    def _has_place(self) -> bool:
        count = len(self._tenants) + len(self._leaving) + self._coming
        return not self.is_closed and count < MAX_TENANTS

    def holds(self, tenancy: RoomTenancy) -> bool:
        """Whether the version has a tenant here that is not leaving."""
        return any(each is tenancy for each, _ in self._tenants.values())

    def _origin(self) -> Mapping[str, object]:
        names = sorted({tenancy.key.name for tenancy, _ in self._tenants.values()})
        model = ",".join(names) if 0 < len(names) <= NAMED else "shared"
        return {"model": model, "version": "", "executor": self._process.pid}

    async def take_in(self, tenancy: RoomTenancy, requests: int) -> LaunchedTenant:
        """Send a new tenant to the process; raise `OSError` if it has ended, or no descriptor is left."""
        number = next(self._numbers)
        self._coming += 1
        try:
            with channels(requests) as (ours, theirs):
                await self._send(b"%d %s" % (number, self._token.encode()), theirs)
                exit_code: asyncio.Future[int] = self._loop.create_future()
                self._tenants[number] = (tenancy, exit_code)
        finally:
            self._coming -= 1
        output = asyncio.StreamReader()  # empty: the room's output has no single origin, and is logged here
        output.feed_eof()
        return LaunchedTenant(self._process.pid, output, exit_code, lambda: None, *ours, self, number)

    async def _send(self, message: bytes, descriptors: list[int]) -> None:
        while not self.is_closed:
            with suppress(BlockingIOError):
                socket.send_fds(self._server, [message], descriptors)
                return
            await asyncio.sleep(_BUSY_S)
        raise BrokenPipeError("the shared worker process has just ended")

    def _receive(self) -> None:
        """Read a message that a tenant has ended."""
        try:
            message = self._server.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            message = b""
        if not message:
            self._close()
            return
        try:
            number, code = map(int, message.split())
        except ValueError:
            self._kill(Loss(LossKind.PROTOCOL, "sent a message of its room that is none"))
            self._close()
            return
        if number in self._leaving:
            self._leaving.pop(number).cancel()
        else:
            self._end_tenant(number, code)
        self._close_if_empty()

    def _end_tenant(self, number: int, code: int) -> None:
        if number in self._tenants:
            _, exit_code = self._tenants.pop(number)
            if not exit_code.done():
                exit_code.set_result(code)

    def let_go(self, number: int) -> None:
        """Let one tenant leave; if it does not end within `LEAVING_S`, kill the room."""
        tenancy = self._tenants[number][0]
        self._end_tenant(number, 0)
        reason = Loss(LossKind.HANG, f"{_name(tenancy)} was stopped {LEAVING_S:g} s ago and did not end")
        self._leaving[number] = self._loop.call_later(LEAVING_S, self._kill, reason)

    def kill(self, number: int, reason: Loss) -> None:
        """Kill the process because of one of its tenants."""
        words = f"{reason.cause} ({_name(self._tenants[number][0])}, with which it shares a process)"
        self._kill(replace(reason, cause=words, silent_s=0.0))  # the others gave signs of life

    def _kill(self, reason: Loss) -> None:
        self.is_closed = True
        self._reason = self._reason or reason
        self._process.kill(reason)

    def loss(self, code: int, oom: OomWatch) -> Loss:
        """Return why the process ended; determined by the first call and kept for the other tenants."""
        if self._reason is None:
            loss = self._process.loss(code, oom)
            self._reason = replace(loss, cause=f"{loss.cause} (its process is a shared one)")
        return self._reason

    def close_to_newcomers(self) -> None:
        """Accept no further tenants; the present ones stay."""
        self.is_closed = True
        self._close_if_empty()

    def _close_if_empty(self) -> None:
        if not self._tenants and not self._leaving and not self._coming:
            self._close()

    def _close(self) -> None:
        """Close the socket, which ends the process."""
        self.is_closed = True
        if self._server.fileno() >= 0:
            self._loop.remove_reader(self._server)
            self._server.close()

    async def _live(self) -> None:
        """Wait for the end of the process, which is that of all its tenants, and for its last output."""
        code = await self._process.exit_code
        self._close()
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()
        for number, (tenancy, _) in list(self._tenants.items()):
            tenancy.room_lost()
            self._end_tenant(number, code)
        await asyncio.wait([self._output], timeout=LAST_WORDS_S)
        self._output.cancel()
        self._process.close()

    async def end(self) -> None:
        """End the process, and wait until its output is logged."""
        self._close()
        try:
            await asyncio.wait_for(asyncio.shield(self._process.exit_code), ENDING_GRACE_S)
        except asyncio.TimeoutError:
            self._kill(Loss(LossKind.STOPPED, "stopped by the server"))
        await self._life


class RoomLauncher:
    """Finds a room for each version that may share a process; one for a server. Lives on the event loop."""

    def __init__(self, forks: ForkLauncher) -> None:
        self._forks = forks
        self._rooms: list[Room] = []
        self._choosing = asyncio.Lock()  # otherwise concurrent versions would each start a room

    def of(self, key: ModelKey) -> RoomTenancy:
        """Return the launcher of one version."""
        return RoomTenancy(key, self, self._forks)

    async def take_in(self, tenancy: RoomTenancy, requests: int) -> Launched:
        """Add a version to a room with space, or to a new one.

        Raises:
            OSError: the system has no process, memory or descriptor left.
        """
        room = await self._choose(tenancy)
        try:
            return await room.take_in(tenancy, requests)
        except ConnectionError:  # the room has just ended
            room.close_to_newcomers()
            return await (await self._choose(tenancy)).take_in(tenancy, requests)

    async def _choose(self, tenancy: RoomTenancy) -> Room:
        async with self._choosing:
            for room in self._rooms:
                if room.holds(tenancy):  # its old lane there hangs: no more tenants, so that the room ends
                    room.close_to_newcomers()
            self._rooms = [room for room in self._rooms if not room.is_over]
            for room in self._rooms:
                if await room.takes_more():
                    return room
            return await self._make()

    async def close(self) -> None:
        """End all rooms."""
        rooms, self._rooms = self._rooms, []
        await asyncio.gather(*(room.end() for room in rooms if not room.is_over))

    async def _make(self) -> Room:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                room = Room(await self._forks.launch_room(theirs.fileno()), ours)
            except BaseException:
                ours.close()
                raise
        self._rooms.append(room)
        return room


class RoomTenancy:
    """The launcher of one version that may share a process. Lives on the event loop."""

    def __init__(self, key: ModelKey, rooms: RoomLauncher, forks: ForkLauncher) -> None:
        self.key = key
        self._rooms = rooms
        self._forks = forks
        self._losses = 0
        self.has_own_process = False  # whether the next launch is outside a room

    async def launch(self, requests: int) -> Launched:
        """Add the version to a room, or start a process for it alone; see `Launcher`."""
        if self.has_own_process:
            return await self._forks.launch(requests)
        return await self._rooms.take_in(self, requests)

    def room_lost(self) -> None:
        """Count the loss of a room that held this version."""
        self._losses += 1
        if self._losses >= MAX_LOSSES and not self.has_own_process:
            self.has_own_process = True
            logger.warning(
                "%s gets a process of its own: the one it shared was lost %d times", _name(self), self._losses
            )


def _name(tenancy: RoomTenancy) -> str:
    return f"model {tenancy.key.name} version {tenancy.key.version}"
