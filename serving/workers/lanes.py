"""What the server and a lane of a worker share: a data socket, and a page of memory.

The page has begin marks and cancelled requests.

A message about a crash can be late or lost; a read of shared memory can not. Each lane (a thread of the
worker that runs batches) has a cell, in which it writes the run it begins and when it last gave a sign of it.
Each place (a run inside the worker, from its sending to its report) has a row of bytes that the server sets:
one that holds the run's streamed answers back, and one for each request that is cancelled.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from functools import partial

from torchere.serving.workers.frames import FrameSocket

MAX_LANES = 1024
LANES_A_MESSAGE = 128  # sockets that go to a worker together; the system takes 253
MAX_PLACES = 8192  # runs inside one worker
_CELL = struct.Struct("<dQ")  # last sign (monotonic seconds), run id; 0: none was begun yet
_CELLS_BYTES = MAX_LANES * _CELL.size
_PAGE_BYTES = 4096


def requests_of(batch_size: int) -> int:
    """How many requests a run has at most: sequences and continuous batching may double the batch."""
    return 2 * batch_size


def _size(requests: int) -> int:
    size = _CELLS_BYTES + MAX_PLACES * (1 + requests)
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def create(requests: int) -> int:
    """A descriptor of zeroed shared memory for runs of at most `requests` requests.

    The memory is sparse. Its size is sealed where the system can seal: a worker that truncated it would end
    the server with SIGBUS.

    Raises:
        OSError: the system has no descriptor or no memory left.
    """
    if hasattr(os, "memfd_create"):
        import fcntl  # noqa: PLC0415 - not to be had on Windows

        descriptor = os.memfd_create("torchere-lanes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _size(requests))
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        return descriptor
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _size(requests))
    return descriptor


class LanePage:
    """One mapping of the page. Any thread may use it: each cell and each row has one writer.

    Args:
        descriptor: of `create`, with the same `requests`; it may be closed afterwards.
        requests: how many a run has at most.
    """

    def __init__(self, descriptor: int, requests: int) -> None:
        self._row_bytes = 1 + requests
        self._memory = mmap.mmap(descriptor, _size(requests))

    def mark(self, lane: int, run_id: int, now_s: float) -> None:
        """Say that a lane begins with a run, or is still at it (in the worker)."""
        _CELL.pack_into(self._memory, lane * _CELL.size, now_s, run_id)

    def begun(self, lanes: int) -> dict[int, float]:
        """The last run that each of so many lanes began, with its last sign (in the server)."""
        cells = (_CELL.unpack_from(self._memory, lane * _CELL.size) for lane in range(lanes))
        return {run_id: sign_s for sign_s, run_id in cells if run_id}

    def clear(self, place: int) -> None:
        """Make a place ready for its next run (in the server)."""
        start = _CELLS_BYTES + place * self._row_bytes
        self._memory[start : start + self._row_bytes] = bytes(self._row_bytes)

    def cancel(self, place: int, index: int) -> None:
        """Say that request `index` of the run in a place is cancelled (in the server)."""
        if index + 1 < self._row_bytes:
            self._memory[_CELLS_BYTES + place * self._row_bytes + 1 + index] = 1

    def cancelled(self, place: int, count: int) -> list[int]:
        """Which of the `count` requests of the run in a place are cancelled (in the worker)."""
        start = _CELLS_BYTES + place * self._row_bytes + 1
        row = self._memory[start : start + min(count, self._row_bytes - 1)]
        return [index for index, byte in enumerate(row) if byte] if any(row) else []

    def all_cancelled(self, place: int, count: int) -> bool:
        """Whether every one of the `count` requests of the run in a place is cancelled (in the worker)."""
        start = _CELLS_BYTES + place * self._row_bytes + 1
        return 0 not in self._memory[start : start + min(count, self._row_bytes - 1)]

    def hold(self, place: int, *, held: bool) -> None:
        """Hold back further parts of the run in a place, or let them go on (in the server)."""
        self._memory[_CELLS_BYTES + place * self._row_bytes] = held

    def is_held(self, place: int) -> bool:
        """Whether the run in a place is to send no further part for now (in the worker)."""
        return bool(self._memory[_CELLS_BYTES + place * self._row_bytes])

    def close(self) -> None:
        """Unmap the page."""
        self._memory.close()


class LaneSocket:
    """The server's end of one lane: its data socket, and how many runs are inside.

    Args:
        data: the socket; closed by `frames`.
        on_data: gets the lane and each payload.
        on_end: gets the lane and the fault, once, when the stream has ended.
    """

    __slots__ = ("ended", "frames", "inside", "since_s")

    def __init__(
        self,
        data: socket.socket,
        on_data: Callable[[LaneSocket, memoryview], None],
        on_end: Callable[[LaneSocket, str], None],
    ) -> None:
        self.inside = 0
        self.since_s = 0.0  # monotonic, when it was sent a run while it had none
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(fault: str) -> None:
            if not self.ended.done():
                self.ended.set_result(None)
            on_end(self, fault)

        self.frames = FrameSocket(data, partial(on_data, self), end)


def load_of_lane(lane: LaneSocket) -> tuple[int, float]:
    """How much a lane has to do; of equals, the one that is free first has less."""
    return lane.inside, lane.since_s
