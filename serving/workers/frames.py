"""Framing of a byte stream: `FrameSocket` in the server, `FrameReader` in a worker.

A frame is a 4-byte big-endian length and as many bytes. Nothing is unpickled. Raw bytes may follow a frame,
whose message states their number, so that a large value is sent and received without an intermediate copy.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from torchere.serving.io.loop_time import TURN_S, LoopShare

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 2**31  # a longer one is a protocol error
_ROOM_BYTES = 65_536  # buffer of a reader: holds all batches that are sent ahead, unless they are large
_RECEIVE_BYTES = 262_144
_RECEIVES_A_TURN = 16  # limit for a worker that writes without pause, so that other sockets get a turn
FRAMES_A_LOOK = 32  # between two looks at the clock
BYTES_A_LOOK = 4096  # the same in bytes of frames: a long frame may hold thousands of values
_SEND_PARTS = 64  # buffers that go out with one system call, far below IOV_MAX

Parts: TypeAlias = Sequence[bytes | bytearray | memoryview]  # a frame and the raw bytes that follow it


class _OfThread(threading.local):
    """The receive buffer that the sockets of a thread share: each empties it before another one receives."""

    def __init__(self) -> None:
        self.room = bytearray(_RECEIVE_BYTES)


_of_thread = _OfThread()
_share = LoopShare()  # for all workers that send more frames at once than fit into a turn


class FrameSocket:
    """The server's end of a worker's stream. Lives on the event loop.

    It uses the socket itself, not a transport: asyncio and uvloop drop unread bytes when a write fails, and
    the last report of a worker that has just died must be read to its end.

    Args:
        connection: a stream socket; closed with this.
        on_frame: gets each payload, which is valid until it returns.
        on_end: called once, in its own turn of the event loop, after the last byte was read, with a
            description of the protocol error that ended the stream, or "".
        max_frame_bytes: a longer frame is a protocol error.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_frame: Callable[[memoryview], None],
        on_end: Callable[[str], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._connection = connection
        self._on_frame = on_frame
        self._on_end = on_end
        self._max_frame_bytes = max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._room = _of_thread.room
        self._begun = bytearray()  # the beginning of a frame
        self._large: memoryview | None = None  # the buffer of a large frame, or of raw bytes, being received
        self._filled = 0  # bytes of `_large` received so far
        self._then: Callable[[memoryview], None] | None = None  # gets the raw bytes
        self._unsent: deque[memoryview] = deque()
        self._sent_this_turn = False
        self._writer_waits = False
        self._finishing = False  # writing closes once all unsent bytes are sent
        self._turn_ends_s = 0.0  # monotonic; frames that are read later wait
        self._waits = False  # frames wait in `_begun` for another turn, and the socket is not read
        self.open = True  # frames may be sent
        connection.setblocking(False)
        self._descriptor = connection.fileno()
        self._loop.add_reader(self._descriptor, self._readable)

    def send(self, parts: Parts) -> None:
        """Send a frame with its raw bytes: the first of a turn at once, later ones at the end of the turn."""
        if not self.open:
            return
        self._unsent.extend(map(memoryview, parts))
        if self._writer_waits:
            return
        if not self._sent_this_turn:
            self._sent_this_turn = True
            self._loop.call_soon(self._turn_over)
            self._flush()

    def _turn_over(self) -> None:
        self._sent_this_turn = False
        if self._unsent and not self._writer_waits:
            self._flush()

    def _flush(self) -> None:
        """Send as much as the socket accepts now, and the rest when it is writable."""
        unsent = self._unsent
        try:
            while unsent:
                _send_once(self._connection, unsent)
        except BlockingIOError:
            if not self._writer_waits:
                self._writer_waits = True
                self._loop.add_writer(self._descriptor, self._flush)
            return
        except OSError:  # the worker is gone, but its last messages must still be read
            self._stop_writing()
            return
        if self._writer_waits:
            self._writer_waits = False
            self._loop.remove_writer(self._descriptor)
        if self._finishing:
            self.close_writing()

    def _stop_writing(self) -> None:
        self.open = False
        self._unsent.clear()
        if self._writer_waits:
            self._writer_waits = False
            self._loop.remove_writer(self._descriptor)

    def _readable(self) -> None:
        self.begin_turn()
        for _ in range(_RECEIVES_A_TURN):
            target = self._room if self._large is None else self._large[self._filled :]
            try:
                count = self._connection.recv_into(target)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # reset: no more bytes can arrive
                count = 0
            if not count:
                self.fail("")
                return
            if not self._take(count) or count < len(target):
                return

    def begin_turn(self) -> None:
        """Restart the time limit of the turn. Call it from `on_frame` after a frame that was requested."""
        self._turn_ends_s = time.monotonic() + TURN_S

    def take(self, count: int, then: Callable[[memoryview], None]) -> None:
        """Pass the next `count` bytes, which are raw bytes, to `then`, which may keep them.

        Call it from `on_frame`, with a count above 0.
        """
        self._then = then
        self._begin_large(count)

    def _take(self, count: int) -> bool:
        """Pass on the frames that are complete with `count` more bytes; False: the stream has ended."""
        if self._large is not None:
            self._filled += count
            if self._filled == len(self._large):
                self._complete(self._large)
            return self._is_reading and not self._waits
        with memoryview(self._room) as room:
            if not self._begun:
                with room[:count] as view:
                    return self._cut(view)
            self._begun += room[:count]
        return self._cut_begun()

    def _cut_begun(self) -> bool:
        begun, self._begun = self._begun, bytearray()
        with memoryview(begun) as view:
            return self._cut(view)

    def _go_on(self) -> None:
        """Pass on the frames that had to wait, and read the socket again when none is left."""
        if not self._is_reading:
            return
        if (wait_s := _share.wait_s()) > 0:
            self._loop.call_later(wait_s, self._go_on)
            return
        self._waits = False
        self.begin_turn()
        if self._cut_begun():
            self._loop.add_reader(self._descriptor, self._readable)

    def _cut(self, view: memoryview) -> bool:
        """Pass on the frames in `view`; False: the stream has ended, or the rest waits for another turn."""
        start, size, frames, looked = 0, len(view), 0, 0
        while self._is_reading and not self._waits:
            if self._large is not None:
                some = min(len(self._large) - self._filled, size - start)
                self._large[self._filled : self._filled + some] = view[start : start + some]
                self._filled += some
                start += some
                if self._filled < len(self._large):
                    return True
                self._complete(self._large)
                continue
            begin = start + HEADER.size
            if begin > size:
                break
            (length,) = HEADER.unpack_from(view, start)
            if length > self._max_frame_bytes:
                self.fail(f"sent a frame of {length} bytes, expected at most {self._max_frame_bytes}")
            elif begin + length <= size:
                start = begin + length
                self._on_frame(view[begin:start])
                frames += 1
                if frames % FRAMES_A_LOOK == 0 or start - looked > BYTES_A_LOOK:
                    looked = start
                    self._look()
            elif length > _RECEIVE_BYTES:
                start = begin
                self._begin_large(length)
            else:
                break
        if self._is_reading:
            self._begun += view[start:]
        return self._is_reading and not self._waits

    def _look(self) -> None:
        """If this turn is over, leave further frames and the socket's unread bytes for a later one."""
        if self._is_reading and (late_s := time.monotonic() - self._turn_ends_s) > 0:
            _share.spend(late_s + TURN_S)
            self._waits = True
            self._loop.remove_reader(self._descriptor)
            self._loop.call_soon(self._go_on)

    def _begin_large(self, length: int) -> None:
        try:
            self._large = room_for(length)
        except MemoryError:
            self.fail(f"sent {length} bytes, for which there is no memory")
        self._filled = 0

    def _complete(self, large: memoryview) -> None:
        then, self._then, self._large = self._then, None, None
        if then is not None:
            then(large)
            return
        self.begin_turn()  # the time that the kernel took to receive it does not count
        self._on_frame(large)
        self._look()

    @property
    def _is_reading(self) -> bool:
        return self._descriptor >= 0

    def fail(self, fault: str) -> None:
        """End the stream; `on_end` is called with the error ("": none)."""
        if self._is_reading:
            self.close()
            self._loop.call_soon(self._on_end, fault)

    def close(self) -> None:
        """Stop reading and writing, and close the socket, without calling `on_end`."""
        if self._is_reading:
            self._stop_writing()
            self._loop.remove_reader(self._descriptor)
            self._descriptor = -1
            self._connection.close()
            self._large = self._then = None

    def finish(self) -> None:
        """Call `close_writing` once all unsent bytes are sent."""
        self._finishing = True
        if not self._unsent:
            self.close_writing()

    def close_writing(self) -> None:
        """Shut down writing, which ends the worker; its last messages are still read."""
        if self.open:
            self._stop_writing()
            with suppress(OSError):  # the worker is gone
                self._connection.shutdown(socket.SHUT_WR)


def room_for(length: int) -> memoryview:
    """Allocate a buffer of `length` bytes without touching its pages.

    A `bytearray` is filled with zeros at once: a header that announced 2 GiB blocked the loop for 2.7 s and
    took as much memory.

    Raises:
        MemoryError: there is not enough memory.
    """
    import numpy as np  # noqa: PLC0415 - 0.1 s, which the start of the fork server need not wait for

    return np.empty(length, dtype=np.uint8).data


def _send_once(connection: socket.socket, unsent: deque[memoryview]) -> None:
    """Send buffers with one system call, and remove the bytes that the kernel accepted from `unsent`."""
    if len(unsent) == 1:
        sent = connection.send(unsent[0])
    else:
        sent = connection.sendmsg([unsent[at] for at in range(min(len(unsent), _SEND_PARTS))])
    while unsent and sent >= len(unsent[0]):
        sent -= len(unsent.popleft())
    if sent:
        unsent[0] = unsent[0][sent:]


def send_all(connection: socket.socket, parts: Parts) -> None:
    """Send a frame with its raw bytes through a blocking socket; raise `OSError` if that fails."""
    unsent = deque(memoryview(part) for part in parts)
    while unsent:
        _send_once(connection, unsent)


class FrameReader:
    """Reads frames from a blocking socket, all available ones in one system call. Not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._room = memoryview(mmap.mmap(-1, _ROOM_BYTES, flags))  # only pages ever written take memory
        self._start = 0  # of the bytes not handed out yet
        self._end = 0

    @property
    def has_more(self) -> bool:
        """Whether bytes of the next frame are buffered: polling the socket does not show these."""
        return self._end > self._start

    def next(self) -> memoryview | None:
        """Return the payload of the next frame, valid until the next call; None: the stream has ended."""
        while True:
            held = self._end - self._start
            if held >= HEADER.size:
                (length,) = HEADER.unpack_from(self._room, self._start)
                begin = self._start + HEADER.size
                if begin + length <= self._end:
                    self._start = begin + length
                    return self._room[begin : self._start]
                if HEADER.size + length > _ROOM_BYTES:
                    self._start = begin
                    return self.raw(length)
            if not self._read_more():
                return None

    def _read_more(self) -> bool:
        """Receive more bytes into the buffer; return False at the end of the stream."""
        if self._start:  # the rest, if any, is the beginning of a frame
            rest = bytes(self._room[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._room[: self._end] = rest
        count = self._connection.recv_into(self._room[self._end :])
        self._end += count
        return count > 0

    def drop(self, count: int) -> bool:
        """Receive the next `count` bytes and forget them; return False at the end of the stream."""
        while True:
            held = min(count, self._end - self._start)
            self._start += held
            count -= held
            if not count:
                return True
            if not self._read_more():
                return False

    def raw(self, count: int) -> memoryview | None:
        """Return the next `count` bytes in a new buffer; None: the stream has ended.

        Raises:
            MemoryError: there is not enough memory; no byte is received.
        """
        raw = room_for(count)
        filled = min(count, self._end - self._start)
        raw[:filled] = self._room[self._start : self._start + filled]
        self._start += filled
        while filled < count:
            received = self._connection.recv_into(raw[filled:])
            if not received:
                return None
            filled += received
        return raw
