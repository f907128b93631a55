"""What goes out on a connection, no faster than the client takes it in (RFC 9113, 5.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchere.serving.frontend.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    ConnectionBroken,
    ErrorCode,
    Setting,
    StreamBroken,
    head,
    read_settings,
)
from torchere.serving.frontend.unread import untaken_bytes
from torchere.serving.turn_writes import Buffers

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.stream import Stream

MOST_FRAME_BYTES = 2**20  # of one stream's, before another one gets its turn
MOST_WRITTEN_BYTES = 2**20  # at once: then the socket may say that it is full
DEFAULT_TABLE_BYTES = 4096  # of HPACK's table, which this end does not use
# To be said when a client lowers the table's size (RFC 7541, 4.2): it is 0 from here on.
TABLE_UNUSED = b"\x20"


class Outflow:
    """The windows of one connection, and the streams that wait for room in them. Lives on the event loop."""

    __slots__ = (
        *("_finished", "_hold", "_table_note", "_waiting", "_window", "_write"),
        *("frame_bytes", "held_bytes", "initial_window", "sends", "sent_bytes", "stopped"),
    )

    def __init__(
        self,
        write: Callable[[Buffers], None],
        finished: Callable[[Stream], None],
        hold: Callable[[], None],
    ) -> None:
        self._write = write
        self._finished = finished
        self._hold = hold  # called when something has to wait for the client
        self._window = DEFAULT_WINDOW
        self._waiting: dict[int, Stream] = {}  # in the order in which they began to wait, and some that did
        self.initial_window = DEFAULT_WINDOW  # of streams, as the client said
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self.stopped = False  # the socket takes no more for now
        self.sends = self.sent_bytes = 0  # of what had to wait, or was long, or one of several
        self.held_bytes = 0  # of answers that wait in their streams
        self._table_note = b""  # what the next header block has to begin with

    def take_room(self, stream: Stream, size: int) -> bool:
        """Take the room for all data of a stream, to go out at once in one frame; whether there was room."""
        if (
            size > self._window
            or size > stream.window
            or size > self.frame_bytes
            or self.stopped
            or self._table_note
        ):
            return False
        self._window -= size
        return True

    def pump(self, stream: Stream) -> None:
        """Send what the windows let through, and the trailers when nothing is left before them."""
        buffers: list[bytes | memoryview] = []
        sent = unwritten = 0
        outbox = stream.outbox
        while outbox and not self.stopped:
            part = outbox[0]
            size = min(len(part), MOST_WRITTEN_BYTES, self._window, stream.window)
            if size <= 0:
                break
            self._cut(part, size, stream.id, buffers)
            self._window -= size
            stream.window -= size
            sent += size
            unwritten += size
            if size == len(part):
                outbox.popleft()
            else:
                outbox[0] = part[size:]
            if unwritten >= MOST_WRITTEN_BYTES:
                self._write(buffers)
                buffers, unwritten = [], 0
        is_last = not outbox and stream.trailers is not None
        if stream.trailers is not None and is_last:
            block = self.noted(stream.trailers)
            buffers += (head(len(block), HEADERS, END_STREAM | END_HEADERS, stream.id), block)
        if outbox:
            self._wait(stream)
        if buffers:
            self._write(buffers)
        if sent:
            self.sends += 1
            self.sent_bytes += sent
            stream.sent(sent)
        if is_last:
            self._finished(stream)

    def _wait(self, stream: Stream) -> None:
        if stream.window > 0:  # what waits for its own window alone is pumped when that grows
            self._waiting[stream.id] = stream
        self._hold()

    def _cut(
        self, part: bytes | memoryview, size: int, stream_id: int, buffers: list[bytes | memoryview]
    ) -> None:
        """Put the first `size` bytes of a part into frames."""
        whole = head(self.frame_bytes, DATA, 0, stream_id)
        rest = size % self.frame_bytes
        for start in range(0, size - rest, self.frame_bytes):
            buffers += (whole, part[start : start + self.frame_bytes])
        if rest:
            buffers += (head(rest, DATA, 0, stream_id), part[size - rest : size])

    def noted(self, block: bytes) -> bytes:
        """A header block that goes out now, behind what the client has to be told before it."""
        note, self._table_note = self._table_note, b""
        return note + block

    def forget(self, stream: Stream) -> None:
        """Nothing more of a stream is to go out."""
        self._waiting.pop(stream.id, None)

    def resume(self) -> None:
        """The socket takes more again, or the connection's window has grown: each stream gets its turn."""
        self.stopped = False
        for _ in range(len(self._waiting)):
            if self._window <= 0 or self.stopped:
                break  # a client that gives leave for a byte must not have all streams looked at
            # To the end of the line, or the first stream would have all of each new window.
            self.pump(self._waiting.pop(next(iter(self._waiting))))

    def waiting(
        self, streams: Mapping[int, Stream], transport: asyncio.WriteTransport
    ) -> dict[int, tuple[int, int]]:
        """What changes as soon as the client takes a byte, for each stream that waits for leave of its own.

        Under 0 the same for the connection, while streams wait for the whole of it: for leave, or for the
        socket. Which of them moves then is not the client's to say.
        """
        wait = [stream for stream in streams.values() if stream.outbox]
        waiting = {stream.id: (stream.sent_bytes, 0) for stream in wait if stream.window <= 0}
        if self.stopped:
            untaken = untaken_bytes(transport)
            if untaken is not None:
                waiting[0] = (self.sent_bytes, untaken)
        elif wait and self._window <= 0:
            waiting[0] = (self.sent_bytes, 0)
        return waiting

    def widen(self, increment: int) -> None:
        """The client takes in so much more on the whole connection.

        Raises:
            ConnectionBroken: it says nothing, or more than can be.
        """
        self._window += increment
        if not increment or self._window > MAX_WINDOW:
            code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
            raise ConnectionBroken(code, f"WINDOW_UPDATE of {increment} on the connection")
        if not self.stopped:
            self.resume()

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """The same for one stream.

        Raises:
            StreamBroken: it says nothing, or more than can be.
        """
        stream.window += increment
        if not increment or stream.window > MAX_WINDOW:
            code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
            raise StreamBroken(stream.id, code, f"WINDOW_UPDATE of {increment}")
        if stream.outbox:
            self.pump(stream)

    def configure(self, settings: bytes, streams: Sequence[Stream]) -> None:
        """The client says what it takes in; this counts for streams that are open, too.

        Raises:
            ConnectionBroken: a value can't be.
        """
        told = list(read_settings(settings))
        if any(name == Setting.HEADER_TABLE_SIZE and value < DEFAULT_TABLE_BYTES for name, value in told):
            self._table_note = TABLE_UNUSED  # even if it grows again behind that
        # One that is told again and again counts once: each may concern a thousand streams.
        wanted = dict(told)
        frame_bytes = wanted.get(Setting.MAX_FRAME_SIZE)
        if frame_bytes is not None:
            self.frame_bytes = min(frame_bytes, MOST_FRAME_BYTES)
        initial_window = wanted.get(Setting.INITIAL_WINDOW_SIZE)
        if initial_window is not None:
            self._set_initial_window(initial_window, streams)

    def _set_initial_window(self, size: int, streams: Sequence[Stream]) -> None:
        change = size - self.initial_window
        self.initial_window = size
        for stream in streams:
            stream.window += change
            if stream.window > MAX_WINDOW:
                raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS overflow a stream's window")
            if change > 0 and stream.outbox:
                self.pump(stream)
