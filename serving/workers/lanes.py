"""The channel between the server and the lanes of a worker: data sockets and a page of shared memory.

The page holds the begin marks of lanes and the cancellation flags of requests. It is shared memory because a
message can be late or lost when the worker crashes. Each lane (a worker thread that runs batches) has a cell,
in which it writes the id of the run that it begins, and the time of its last progress. Each place (the slot
of a run inside the worker, from its sending to its report) has a row of bytes that the server sets: one to
hold back the run's streamed answers, and one for each request to cancel it. The byte before the rows is the
number of intra-op threads that lanes use for the next run. Behind the rows are the slots of large values.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torchere.serving.errors import NoRoom
from torchere.serving.workers import slots
from torchere.serving.workers.executor import BatchReport, LoadSpec
from torchere.serving.workers.frames import FrameReader, FrameSocket
from torchere.serving.workers.messages import Run, data_to_worker, most_report_bytes, raw_bytes, run_with_raw

logger = logging.getLogger(__name__)

MAX_LANES = 1024
LANES_A_MESSAGE = 128  # sockets sent to a worker in one message; the kernel allows 253
MAX_PLACES = 8192  # runs inside one worker
_CELL = struct.Struct("<dQ")  # last progress (monotonic seconds), run id; 0: no run was begun yet
_CELLS_BYTES = MAX_LANES * _CELL.size
_ROWS = _CELLS_BYTES + 1
_MOST_THREADS = 255  # in a byte


def _size(requests: int) -> int:
    size = _ROWS + MAX_PLACES * (1 + requests)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def create(requests: int) -> int:
    """Create zeroed shared memory for runs of at most `requests` requests; return its descriptor.

    The memory is sparse. Its size is sealed if the system supports it: a worker that truncated the memory
    would crash the server with SIGBUS. Where files may not be so large (`ulimit -f`), it has no slots.

    Raises:
        OSError: the system has no descriptor or no memory left.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("torchere-lanes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _size(requests) + slots.BYTES)
        except OSError:
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

    `to_worker` and `to_server` are the slots of each direction.

    Args:
        descriptor: from `create`, with the same `requests`; it may be closed afterwards.
        requests: the maximum number of requests in a run.
    """

    def __init__(self, descriptor: int, requests: int) -> None:
        self._row_bytes = 1 + requests
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.to_worker = slots.Slots(self._memory, _size(requests), 0)
        self.to_server = slots.Slots(self._memory, _size(requests), 1)

    def mark(self, lane: int, run_id: int, now_s: float) -> None:
        """Record that a lane begins a run (0: it has begun none) or still works on it (in the worker)."""
        _CELL.pack_into(self._memory, lane * _CELL.size, now_s, run_id)

    def begun(self, lanes: int) -> dict[int, float]:
        """Map the last run of each of the first `lanes` lanes to its last progress (in the server)."""
        cells = (_CELL.unpack_from(self._memory, lane * _CELL.size) for lane in range(lanes))
        return {run_id: sign_s for sign_s, run_id in cells if run_id}

    def prepare(self, place: int, threads: int = 0) -> None:
        """Clear the row of a place, and set the intra-op threads; 0: those of the load (in the server)."""
        start = _ROWS + place * self._row_bytes
        self._memory[start : start + self._row_bytes] = bytes(self._row_bytes)
        self._memory[_CELLS_BYTES] = min(threads, _MOST_THREADS)

    @property
    def threads(self) -> int:
        """The number of intra-op threads for the next run; 0: those of the load (in the worker)."""
        return self._memory[_CELLS_BYTES]

    def cancel(self, place: int, index: int) -> None:
        """Mark request `index` of the run in a place as cancelled (in the server)."""
        if index + 1 < self._row_bytes:
            self._memory[_ROWS + place * self._row_bytes + 1 + index] = 1

    def cancelled(self, place: int, count: int) -> list[int]:
        """Return the indices of the cancelled ones of `count` requests in a place (in the worker)."""
        start = _ROWS + place * self._row_bytes + 1
        row = self._memory[start : start + min(count, self._row_bytes - 1)]
        return [index for index, byte in enumerate(row) if byte] if any(row) else []

    def all_cancelled(self, place: int, count: int) -> bool:
        """Whether all `count` requests of the run in a place are cancelled (in the worker)."""
        start = _ROWS + place * self._row_bytes + 1
        return 0 not in self._memory[start : start + min(count, self._row_bytes - 1)]

    def hold(self, place: int, *, held: bool) -> None:
        """Hold back further parts of the run in a place, or release them (in the server)."""
        self._memory[_ROWS + place * self._row_bytes] = held

    def is_held(self, place: int) -> bool:
        """Whether the run in a place must not send further parts for now (in the worker)."""
        return bool(self._memory[_ROWS + place * self._row_bytes])

    def close(self) -> None:
        """Unmap the page, or let the last view of a slot unmap it."""
        with suppress(BufferError):
            self._memory.close()


def receive_lanes(connection: socket.socket, count: int, spec: LoadSpec) -> list[socket.socket]:
    """Receive the data sockets of `count` lanes from the server (in the worker).

    Raises:
        LoadFailed: the process is not allowed to open so many files.
        ConnectionResetError: the server is gone.
    """
    descriptors: list[int] = []
    for _ in range(0, count, LANES_A_MESSAGE):
        message, more, _, _ = socket.recv_fds(connection, 1, LANES_A_MESSAGE)
        if not message:
            raise ConnectionResetError("the server is gone")
        descriptors += more
    data = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(data) < count:  # the kernel has left out those that would exceed the limit
        for each in data:
            each.close()
        raise spec.failed(os.strerror(errno.EMFILE).lower())
    for each in data:
        each.set_inheritable(False)
    return data


def next_run(batches: FrameReader, page: LanePage, begin: Callable[[Run], None]) -> Run | None:
    """Wait for the next run of a lane (in the worker); None: the server has ended the lane, or is gone.

    If there is no memory for its large values, the run is returned without them: its `large` is not empty.

    Args:
        batches: reads the data socket of the lane.
        page: has the slots of large values.
        begin: writes the begin mark. It is called before large values are received: they may take so much
            memory that the kernel ends the process, and the next process would get them, too.
    """
    try:
        payload = batches.next()
        if payload is None:
            return None
        run = data_to_worker.decode(payload)
        if not run.large:
            return run
        begin(run)
        count = raw_bytes(run)
        try:
            raw = batches.raw(count) if run.slot < 0 else page.to_worker.take(run.slot, count)
        except MemoryError:
            return run if run.slot >= 0 or batches.drop(count) else None
    except OSError:  # reset
        return None
    try:
        return None if raw is None else run_with_raw(run, raw)
    except MemoryError:  # each of many values takes some more memory
        return run


def report_without_room(run: Run) -> BatchReport:
    """Log and report that there is no memory for the large values of a run (in the worker)."""
    detail = f"the worker has no memory for {raw_bytes(run)} bytes of values"
    logger.error("%s of %s", detail, ",".join(request.request_id for request in run.requests))
    failed = NoRoom("Out of resources", detail)
    return BatchReport([failed] * len(run.requests), began_s=time.monotonic())


class LaneSocket:
    """The server's end of one lane: its data socket, which `frames` closes, and its number of runs."""

    __slots__ = ("ended", "frames", "inside", "since_s")

    def __init__(
        self,
        data: socket.socket,
        on_data: Callable[[LaneSocket, memoryview], None],  # gets the lane and each payload
        on_end: Callable[[LaneSocket, str], None],  # gets the lane and the fault, once, after the last byte
        spec: LoadSpec,
    ) -> None:
        self.inside = 0
        self.since_s = 0.0  # monotonic, when it last got a run while it had none
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(fault: str) -> None:
            if not self.ended.done():
                self.ended.set_result(None)
            on_end(self, fault)

        self.frames = FrameSocket(data, partial(on_data, self), end, most_report_bytes(spec))
