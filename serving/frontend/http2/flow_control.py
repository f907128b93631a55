"""Flow control of one connection and its streams, in both directions (RFC 9113, 5.2)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchere.serving.frontend.budgets import Budgets, ConnectionBudget
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
    window_update,
)
from torchere.serving.frontend.http2.messages import MessageFailed, StatusCode
from torchere.serving.io.turn_writes import Buffers

# Receiving: how much a client may send before it has to wait for WINDOW_UPDATE.
STREAM_WINDOW_BYTES = 4 * 2**20
CONNECTION_WINDOW_BYTES = 16 * 2**20  # of all streams together; four whole windows

# Sending.
MOST_FRAME_BYTES = 2**20  # of one frame, even if the client accepts longer ones
MOST_WRITTEN_BYTES = 2**20  # limit of one write, after which the socket may report a full buffer
HIGH_WATER_BYTES = 65_536  # of a stream's unsent bytes; above it the producer has to wait
DEFAULT_TABLE_BYTES = 4096  # size of the HPACK table, which our encoder does not use
# A table size update to 0, sent when a client lowers the table's maximum size (RFC 7541, 4.2).
TABLE_UNUSED = b"\x20"


class StreamFlow:
    """The flow-control state of one stream."""

    __slots__ = (
        *("_drained", "allowed_bytes", "arrived_bytes", "held_bytes", "id", "kept_bytes", "key_free"),
        *("outbox", "paused", "received_bytes", "remote_open", "sent_bytes", "trailers"),
        *("unsent_bytes", "window"),
    )

    def __init__(self, stream_id: int, window: int) -> None:
        self.id = stream_id
        self.remote_open = True  # the client has not ended its side
        # Receiving.
        self.allowed_bytes = STREAM_WINDOW_BYTES  # total that the client may send, as announced to it
        self.received_bytes = 0  # total of DATA frames; a frame counts when it begins
        self.arrived_bytes = 0  # total of message bytes that arrived before the call was complete
        self.held_bytes = 0  # the part of them in the budget, until it is consumed or the call is complete
        self.kept_bytes = 0  # of consumed messages, in the budget until they are answered
        self.key_free = False  # the call needs no key: its bytes count for a smaller budget
        self.paused = False  # messages are not consumed, so the window is not extended
        # Sending.
        self.window = window  # number of bytes that the client accepts now
        self.sent_bytes = 0  # of answers that went through the outbox
        self.unsent_bytes = 0
        self.outbox: deque[bytes | memoryview] = deque()
        self.trailers: bytes | None = None  # the last header block, as soon as it is known
        self._drained: asyncio.Future[None] | None = None

    async def drained(self) -> None:
        """Wait until the unsent bytes are at most `HIGH_WATER_BYTES`; return at once if they are."""
        if self.unsent_bytes > HIGH_WATER_BYTES:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def count_unsent(self, size: int) -> None:
        """Add `size`, which may be negative, to the unsent bytes; wake a producer waiting in `drained`."""
        self.unsent_bytes += size
        if size <= 0 and self._drained is not None and self.unsent_bytes <= HIGH_WATER_BYTES:
            if not self._drained.done():
                self._drained.set_result(None)
            self._drained = None


class InboundFlow:
    """Receive windows of one connection and its streams. Used on the event loop only.

    Args:
        limit_bytes: maximum size of a received message.
        write: sends a frame.
        budget: for the bytes of calls that have not ended, and of streamed messages that are not consumed.

    Attributes:
        key_free_streams: how many open streams need no key.
    """

    __slots__ = ("_unread_bytes", "_window", "_write", "budget", "key_free_streams", "limit_bytes")

    def __init__(self, limit_bytes: int, write: Callable[[bytes], None], budget: ConnectionBudget) -> None:
        self.limit_bytes = limit_bytes
        self.budget = budget
        self._write = write
        self._window = CONNECTION_WINDOW_BYTES
        self._unread_bytes = 0
        self.key_free_streams = 0

    def consume(self, stream: StreamFlow | None, size: int) -> None:
        """Count DATA that arrived; extend the connection's window (not the stream's) once half is used up.

        Raises:
            ConnectionBroken: the client sent more than the window allows.
        """
        self._window -= size
        self._unread_bytes += size
        if self._window < 0:
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than there was leave for")
        if self._unread_bytes >= CONNECTION_WINDOW_BYTES // 2:
            self._window += self._unread_bytes
            self._write(window_update(0, self._unread_bytes))
            self._unread_bytes = 0
        if stream is not None:
            stream.received_bytes += size

    def extend(self, stream: StreamFlow) -> None:
        """Extend a stream's window once half of it is used up."""
        left_bytes = stream.allowed_bytes - stream.received_bytes
        if left_bytes <= STREAM_WINDOW_BYTES // 2 and stream.remote_open and not stream.paused:
            increment = STREAM_WINDOW_BYTES - left_bytes
            stream.allowed_bytes += increment
            self._write(window_update(stream.id, increment))


class OutboundFlow:
    """Sends answers no faster than the client and the socket accept them. Used on the event loop only.

    Args:
        limit_bytes: maximum size of a sent message.
        write: sends whole frames from one buffer.
        write_all: sends whole frames from several buffers.
        finished: called after a stream's last frame was written.
        waits: called when a stream has to wait for the client.
        budgets: count the unsent answers of all connections.
    """

    __slots__ = (
        *("_budgets", "_ending", "_table_note", "_waiting", "_waits", "_window", "_write_all", "finished"),
        *("ahead_bytes", "frame_bytes", "held_bytes", "initial_window", "limit_bytes", "sends", "sent_bytes"),
        *("stopped", "write"),
    )

    def __init__(
        self,
        limit_bytes: int,
        write: Callable[[bytes], None],
        write_all: Callable[[Buffers], None],
        finished: Callable[[Any], None],
        waits: Callable[[], None],
        *,
        budgets: Budgets,
    ) -> None:
        self._budgets = budgets
        self.limit_bytes = limit_bytes
        self.write = write
        self._write_all = write_all
        self.finished = finished
        self._waits = waits
        self._window = DEFAULT_WINDOW
        self._waiting: dict[int, StreamFlow] = {}  # in the order of their waits; some may no longer wait
        self._ending: dict[int, StreamFlow] = {}  # only the trailers of these streams wait
        self.initial_window = DEFAULT_WINDOW  # of streams, as the client configured it
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self.stopped = False  # the socket's buffer is full
        self.sends = self.sent_bytes = 0  # by `pump`; answers that passed `take_room` are not counted
        self.held_bytes = 0  # of unsent answers
        self.ahead_bytes = 0  # the part of them that waits for other answers of its stream
        self._table_note = b""  # HPACK table size update that has to precede the next header block

    def take_room(self, stream: StreamFlow, size: int) -> bool:
        """Reserve the connection's window for all data of a stream in one frame; False if it must wait."""
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

    def check(self, size: int) -> None:
        """Raise `MessageFailed` for a message over the limit, or a long one if all connections hold too much.

        Calls are admitted before their answers exist, so answers are checked here, too.
        """
        if size > self.limit_bytes:
            raise MessageFailed(
                StatusCode.RESOURCE_EXHAUSTED,
                f"SERVER: Sent message larger than max ({size} vs. {self.limit_bytes})",
            )
        self.check_room(size)

    def check_room(self, size: int, *, ahead: bool = False) -> None:
        """Raise `MessageFailed` for a long answer if all connections hold too much, and this one some of it.

        `ahead`: it has to wait for other answers of its stream. Answers that wait do not count against the
        one whose turn it is, because the client can't take them before it.
        """
        held_bytes = self.held_bytes if ahead else self.held_bytes - self.ahead_bytes
        if size > HIGH_WATER_BYTES and held_bytes and (flaw := self.flaw_of_all()):
            raise MessageFailed(StatusCode.RESOURCE_EXHAUSTED, flaw)

    def flaw_of_all(self) -> str:
        """Return an error if all connections together have too many unsent bytes of answers; else ""."""
        flaw = self._budgets.flaw_of_answers(self.limit_bytes)
        return f"SERVER: {flaw}" if flaw else ""

    def queue(self, stream: StreamFlow, parts: Iterable[bytes | memoryview], size: int) -> None:
        """Append parts to a stream's outbox, `size` bytes in all; `pump` sends them."""
        stream.outbox += parts
        stream.count_unsent(size)
        self.hold(size)

    def drop(self, stream: StreamFlow) -> None:
        """Discard a stream's unsent bytes."""
        stream.outbox.clear()
        self.hold(-stream.unsent_bytes)
        stream.count_unsent(-stream.unsent_bytes)

    def hold(self, size: int) -> None:
        """Add to the count of response bytes that the client has not taken; `size` < 0: taken or dropped."""
        self.held_bytes += size
        self._budgets.unsent_bytes += size

    def pump(self, stream: StreamFlow) -> None:
        """Send as many queued bytes as the windows allow, then the trailers when the outbox is empty.

        Trailers wait for the socket, too, although no window counts them. Otherwise a client that reads
        nothing could fill its buffer with refusals; while they wait, the limit on streams applies to them.
        """
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
                self._write_all(buffers)
                buffers, unwritten = [], 0
        is_last = stream.trailers is not None and not (outbox or self.stopped)
        if stream.trailers is not None and is_last:
            block = self.with_note(stream.trailers)
            buffers += (head(len(block), HEADERS, END_STREAM | END_HEADERS, stream.id), block)
        elif outbox or stream.trailers is not None:
            self._wait(stream)
        if buffers:
            self._write_all(buffers)
        if sent:
            self.sends += 1
            self.sent_bytes += sent
            self.hold(-sent)
            stream.sent_bytes += sent
            stream.count_unsent(-sent)
        if is_last:
            self.finished(stream)

    def _wait(self, stream: StreamFlow) -> None:
        if not stream.outbox:
            self._ending[stream.id] = stream
        elif stream.window > 0:  # a stream that waits only for its own window is pumped when that grows
            self._waiting[stream.id] = stream
        self._waits()

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

    def with_note(self, block: bytes) -> bytes:
        """Return a header block to be sent next, preceded by a pending HPACK table size update."""
        note, self._table_note = self._table_note, b""
        return note + block

    def forget(self, stream: StreamFlow) -> None:
        """Remove a stream from those that wait for the socket or the connection's window."""
        self._waiting.pop(stream.id, None)
        if self._ending:
            self._ending.pop(stream.id, None)

    def resume(self) -> None:
        """Pump each waiting stream once, because the socket or the connection's window has room again."""
        self.stopped = False
        while self._ending and not self.stopped:
            self.pump(self._ending.pop(next(iter(self._ending))))
        for _ in range(len(self._waiting)):
            if self._window <= 0 or self.stopped:
                break  # a client that opens the window byte by byte must not cause a pass over all streams
            # Popped, so that it queues at the end: else the first stream would get all of each new window.
            self.pump(self._waiting.pop(next(iter(self._waiting))))

    def stalled_on(self, streams: Iterable[StreamFlow]) -> dict[int, tuple[int, int]]:
        """Return the progress of each stream that waits for its own window, by its id.

        Key 0 holds the progress of the connection while streams wait for its window, because the client does
        not choose which stream moves then. The caller sets key 0, too, when the client does not take bytes
        from the socket.
        """
        wait = [stream for stream in streams if stream.outbox]
        waiting = {stream.id: (stream.sent_bytes, 0) for stream in wait if stream.window <= 0}
        if wait and self._window <= 0 and not self.stopped:
            waiting[0] = (self.sent_bytes, 0)
        return waiting

    def widen(self, increment: int) -> None:
        """Apply WINDOW_UPDATE to the connection.

        Raises:
            ConnectionBroken: the increment is 0, or the window exceeds its maximum.
        """
        self._window += increment
        if not increment or self._window > MAX_WINDOW:
            code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
            raise ConnectionBroken(code, f"WINDOW_UPDATE of {increment} on the connection")
        if not self.stopped:
            self.resume()

    def widen_stream(self, stream: StreamFlow, increment: int) -> None:
        """Apply WINDOW_UPDATE to one stream.

        Raises:
            StreamBroken: the increment is 0, or the window exceeds its maximum.
        """
        stream.window += increment
        if not increment or stream.window > MAX_WINDOW:
            code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
            raise StreamBroken(stream.id, code, f"WINDOW_UPDATE of {increment}")
        if stream.outbox:
            self.pump(stream)

    def configure(self, payload: bytes, streams: Mapping[int, StreamFlow]) -> None:
        """Apply the client's SETTINGS, to open streams too.

        Raises:
            ConnectionBroken: a value is invalid.
        """
        settings = list(read_settings(payload))
        if any(name == Setting.HEADER_TABLE_SIZE and value < DEFAULT_TABLE_BYTES for name, value in settings):
            self._table_note = TABLE_UNUSED  # even if a later setting raises it again
        # Apply a repeated setting once: each application may touch a thousand streams.
        wanted = dict(settings)
        frame_bytes = wanted.get(Setting.MAX_FRAME_SIZE)
        if frame_bytes is not None:
            self.frame_bytes = min(frame_bytes, MOST_FRAME_BYTES)
        initial_window = wanted.get(Setting.INITIAL_WINDOW_SIZE)
        if initial_window is not None:
            self._set_initial_window(initial_window, list(streams.values()))

    def _set_initial_window(self, size: int, streams: Sequence[StreamFlow]) -> None:
        change = size - self.initial_window
        self.initial_window = size
        for stream in streams:
            stream.window += change
            if stream.window > MAX_WINDOW:
                raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS overflow a stream's window")
            if change > 0 and stream.outbox:
                self.pump(stream)
