"""Rooms, as the server sees them: worker processes that several versions share, for density.

To its `Worker` a tenant of a room looks like any process: it has sockets and a page of its own. What differs
is how it ends. A tenant that is stopped, or did not load, leaves, and its room stays. Anything else
that ends it ends the room with all its tenants, and each comes back by its own restart rule, into a new room.
A version that has lost two rooms gets a process of its own from then on.

`room_process.py` has the other end, and the messages between them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torchere.serving.logs.worker_lines import new_token, relay_all
from torchere.serving.types import ModelKey
from torchere.serving.workers.launch import (
    ForkLauncher,
    Launched,
    LaunchedRoom,
    channels,
)
from torchere.serving.workers.loss import Loss, LossKind, loss_of_exit
from torchere.serving.workers.oom import OomWatch

logger = logging.getLogger(__name__)
output_logger = logging.getLogger("torchere.worker")  # of what a worker prints, wherever it runs

MAX_TENANTS = 256  # of a room: each takes three descriptors of the 1,024 that a process has by default
MAX_LOSSES = 2  # rooms that a version loses before it gets a process of its own
ENDING_GRACE_S = 2.0  # to end by itself once its socket is closed
LAST_WORDS_S = 0.5  # for the rest of its output, where a process that it started keeps the pipe open
LEAVING_S = 60.0  # for a run that a tenant began before it was stopped; then its room is ended
NAMED = 4  # models of a room that its log lines name
_BUSY_S = 0.01  # until the room reads its socket again, which is full
_MAX_MESSAGE_BYTES = 64
_QUIET = frozenset({LossKind.STOPPED, LossKind.LOAD})  # ends of one tenant alone


@dataclass(frozen=True, slots=True)
class LaunchedTenant(Launched):
    """A version in a room, which waits for its first message."""

    room: Room
    number: int

    @property
    def is_shared(self) -> bool:
        """See `Launched`. True also for a room's last tenant: its mates have ended with the room before."""
        return True

    def loss(self, code: int, oom: OomWatch) -> Loss:
        """Why it ended: for the same reason as its room, unless that goes on."""
        return self.room.loss(code, oom) if self.room.is_over else loss_of_exit(code)

    def kill(self, reason: Loss) -> None:
        """End its room at once, with all mates; when the version is stopped or not loaded, only itself."""
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
    """One process and the versions in it. Lives on the event loop.

    Args:
        process: the process.
        server: our end of its room socket; closed by this.
    """

    def __init__(self, process: LaunchedRoom, server: socket.socket) -> None:
        self._process = process
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._token = new_token()
        self._numbers = itertools.count(1)
        self._tenants: dict[int, tuple[RoomTenancy, asyncio.Future[int]]] = {}
        self._leaving: dict[int, asyncio.TimerHandle] = {}  # tenants whose version is stopped, not gone yet
        self._coming = 0  # tenants that are on their way
        self._reason: Loss | None = None  # why it is over, or will be at once
        self.is_closed = False  # takes no further tenant
        self.is_over = False  # the process is gone
        server.setblocking(False)
        self._loop.add_reader(server, self._receive)
        self._output = asyncio.ensure_future(
            relay_all(process.output, self._token, self._origin, output_logger)
        )
        self._reader: asyncio.Task[None] | None = None  # of the last lines, once the process is gone
        process.exit_code.add_done_callback(self._ended)

    @property
    def takes_more(self) -> bool:
        """Whether another version may come in."""
        count = len(self._tenants) + len(self._leaving) + self._coming
        return not self.is_closed and count < MAX_TENANTS

    def holds(self, tenancy: RoomTenancy) -> bool:
        """Whether the version has a tenant here that is not about to leave."""
        return any(each is tenancy for each, _ in self._tenants.values())

    def _origin(self) -> Mapping[str, object]:
        names = sorted({tenancy.key.name for tenancy, _ in self._tenants.values()})
        model = ",".join(names) if 0 < len(names) <= NAMED else "shared"
        return {"model": model, "version": "", "executor": self._process.pid}

    async def take_in(self, tenancy: RoomTenancy, requests: int) -> LaunchedTenant:
        """Send a new tenant to the process.

        Raises:
            OSError: no descriptor is left, or the process has just ended.
        """
        number = next(self._numbers)
        self._coming += 1
        try:
            with channels(requests) as (ours, theirs):
                await self._send(b"%d %s" % (number, self._token.encode()), theirs)
                exit_code: asyncio.Future[int] = self._loop.create_future()
                self._tenants[number] = (tenancy, exit_code)
        finally:
            self._coming -= 1
        output = asyncio.StreamReader()  # the room's has no single origin, and is logged here
        output.feed_eof()
        return LaunchedTenant(
            self._process.pid, *ours, output, exit_code, close=_nothing, room=self, number=number
        )

    async def _send(self, message: bytes, descriptors: list[int]) -> None:
        while not self.is_closed:
            with suppress(BlockingIOError):
                socket.send_fds(self._server, [message], descriptors)
                return
            await asyncio.sleep(_BUSY_S)
        raise BrokenPipeError("the shared worker process has just ended")

    def _receive(self) -> None:
        """Read which tenant has ended."""
        try:
            message = self._server.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            message = b""
        if not message:
            self._close()
            return
        number, code = map(int, message.split())
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
        """Let one tenant leave; if it takes too long, because it hangs, the room is ended."""
        tenancy = self._tenants[number][0]
        self._end_tenant(number, 0)
        reason = Loss(LossKind.HANG, f"{_name(tenancy)} was stopped {LEAVING_S:g} s ago and did not end")
        self._leaving[number] = self._loop.call_later(LEAVING_S, self._kill, reason)

    def kill(self, number: int, reason: Loss) -> None:
        """End the process because of one of its tenants."""
        words = f"{reason.cause} ({_name(self._tenants[number][0])}, with which it shares a process)"
        self._kill(Loss(reason.kind, words))

    def _kill(self, reason: Loss) -> None:
        self.is_closed = True
        self._reason = self._reason or reason
        if not self._process.exit_code.done():
            with suppress(ProcessLookupError):  # gone, and its exit code is on the way
                os.kill(self._process.pid, signal.SIGKILL)

    def loss(self, code: int, oom: OomWatch) -> Loss:
        """Why the process ended; the first tenant that asks finds it out for all."""
        if self._reason is None:
            loss = loss_of_exit(code, code == -signal.SIGKILL and oom.claim())
            self._reason = Loss(loss.kind, f"{loss.cause} (its process is a shared one)")
        return self._reason

    def close_to_newcomers(self) -> None:
        """Take no further tenant; those that are in stay."""
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

    def _ended(self, exit_code: asyncio.Future[int]) -> None:
        """The process is gone; so are all its tenants."""
        self.is_over = True
        self._close()
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()
        for number, (tenancy, _) in list(self._tenants.items()):
            tenancy.room_lost()
            self._end_tenant(number, exit_code.result())
        self._reader = asyncio.ensure_future(self._read_out())

    async def _read_out(self) -> None:
        """Log what it printed last; but a child it left behind may keep the pipe open."""
        await asyncio.wait([self._output], timeout=LAST_WORDS_S)
        self._output.cancel()
        self._process.close()

    async def end(self) -> None:
        """End the process, and wait until all that it printed is logged."""
        self._close()
        try:
            await asyncio.wait_for(asyncio.shield(self._process.exit_code), ENDING_GRACE_S)
        except asyncio.TimeoutError:
            self._kill(Loss(LossKind.STOPPED, "stopped by the server"))
            await self._process.exit_code
        await asyncio.sleep(0)  # `_ended` is called
        if self._reader is not None:
            await self._reader


class RoomLauncher:
    """Finds a room for each version that may share one; one for a server. Lives on the event loop.

    Args:
        forks: makes the processes.
    """

    def __init__(self, forks: ForkLauncher) -> None:
        self._forks = forks
        self._rooms: list[Room] = []
        self._choosing = asyncio.Lock()  # or several versions that come at once would each make a room

    def of(self, key: ModelKey) -> RoomTenancy:
        """The launcher of one version."""
        return RoomTenancy(key, self, self._forks)

    async def take_in(self, tenancy: RoomTenancy, requests: int) -> Launched:
        """Find a room for a version, or make one.

        Raises:
            OSError: the system has no process, memory or descriptor left.
        """
        room = await self._choose(tenancy)
        try:
            return await room.take_in(tenancy, requests)
        except ConnectionError:  # it has just ended
            room.close_to_newcomers()
            return await (await self._choose(tenancy)).take_in(tenancy, requests)

    async def _choose(self, tenancy: RoomTenancy) -> Room:
        async with self._choosing:
            for room in self._rooms:
                if room.holds(tenancy):  # a lane there hangs: the room ends when the others are done
                    room.close_to_newcomers()
            self._rooms = [room for room in self._rooms if not room.is_over]
            for room in self._rooms:
                if room.takes_more:
                    return room
            return await self._make()

    async def close(self) -> None:
        """End the rooms that are left."""
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
        self.has_own_process = False  # from the next launch on

    async def launch(self, requests: int) -> Launched:
        """Have the version taken into a room, or start a process of its own; see `Launcher`."""
        if self.has_own_process:
            return await self._forks.launch(requests)
        return await self._rooms.take_in(self, requests)

    def room_lost(self) -> None:
        """Count a room that was lost with this version in it."""
        self._losses += 1
        if self._losses >= MAX_LOSSES and not self.has_own_process:
            self.has_own_process = True
            logger.warning(
                "%s gets a process of its own: the one it shared was lost %d times", _name(self), self._losses
            )


def _name(tenancy: RoomTenancy) -> str:
    return f"model {tenancy.key.name} version {tenancy.key.version}"


def _nothing() -> None:
    pass
