"""One HTTP/2 connection of a gRPC client (RFC 9113).

It implements the part of HTTP/2 that gRPC uses: no push, no priorities. All resources that a client can
occupy have a limit: header lists, frames, concurrent streams, windows, frames that move no data, unread
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from torchere.serving.access.identity import subjects_of
from torchere.serving.frontend.budgets import FLOOD, ConnectionBudget
from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.flood_guard import CANCELLATIONS, FloodGuard
from torchere.serving.frontend.http2.flow_control import (
    CONNECTION_WINDOW_BYTES,
    STREAM_WINDOW_BYTES,
    InboundFlow,
    OutboundFlow,
)
from torchere.serving.frontend.http2.frames import (
    ConnectionBroken,
    ErrorCode,
    FrameCallbacks,
    FrameReader,
    Piece,
    Setting,
    StreamBroken,
)
from torchere.serving.frontend.http2.graceful_close import CloseCallbacks, GracefulClose
from torchere.serving.frontend.http2.header_blocks import (
    MAX_HEADER_LIST_BYTES,
    HeaderReader,
    Request,
    RequestHead,
)
from torchere.serving.frontend.http2.incomplete_calls import IncompleteCalls
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.frontend.http2.messages import MessageFailed, StatusCode
from torchere.serving.frontend.http2.stream import ENDED, Stream
from torchere.serving.io import watchdog as unread
from torchere.serving.io.turn_writes import TurnWrites
from torchere.serving.io.watchdog import STOPPING_TIMEOUT_S, Stalls

logger = logging.getLogger(__name__)

MAX_STREAMS = 1000  # concurrent on one connection; the client queues further calls itself
SETTINGS = f.settings_frame(
    {
        Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        Setting.MAX_FRAME_SIZE: f.DATA_FRAME_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
    }
) + f.window_update(0, CONNECTION_WINDOW_BYTES - f.DEFAULT_WINDOW)

PREFACE_TIMEOUT_S = 20.0
MAX_UNREAD_BYTES = 32 * 2**20  # if the write buffer holds more when the client sends headers, abort
# Further calls are refused while the answers that wait for the client's windows have more than this many
# bytes, or more than four answers of the maximum size if that is more.
MAX_HELD_BYTES = 2**29
MAX_HELD_ANSWERS = 4
# One read may bring two thousand calls, and while reads fill the buffer, uvloop reads up to 32 times before
# other connections get their turn.
TURN_S = 0.005  # time that one connection may parse; the rest is deferred to the next loop iteration
AGAIN_S = TURN_S / 8  # a read that took longer is the last one of its loop iteration
LATE_READ_BYTES = 16_384  # limit of one read, once the turns of the loop iteration are over
STEP_FRAMES = 32  # between two checks of the clock; a run of DATA counts as one frame, because it is fast
SMALL_BYTES = 128  # shorter DATA for an ended call counts as a frame that moves no data
# Frames that move no data, which a client may send for each answer, and for each write of an answer: some
# clients acknowledge every 4 KiB, and cancellations cross with answers.
EARNED_BY_ANSWER = 4
EARNING_BYTES = 1024  # so many bytes of longer answers allow one frame more


class Connection(asyncio.BufferedProtocol):
    """One HTTP/2 connection. Used on the event loop only."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport = cast("asyncio.Transport", None)  # until `connection_made`
        self._writes = TurnWrites()
        self._write = self._writes.write
        self.client: Any = None  # host and port; None over a Unix socket
        self._subjects: tuple[str, ...] = ()  # the names in the client's certificate
        self._streams: dict[int, Stream] = {}
        self._last_id = 0  # the highest id of a stream that was begun
        self._answers = 0
        self._unread = Stalls(unread.UNREAD_TIMEOUT_S, self._unread_progress, self._end_unread)
        self._incomplete = IncompleteCalls(self._streams, listener.min_upload_rate)
        self.outbound = OutboundFlow(
            listener.send_limit_bytes,
            self._write,
            self._writes.write_all,
            self._finished,
            self._unread.watch,
            budgets=listener.budgets,
        )
        self.budget = ConnectionBudget(listener.budgets)
        self._turns = listener.budgets.turns
        self.inbound = InboundFlow(listener.receive_limit_bytes, self._write, self.budget)
        self._flood = FloodGuard(self._earned_frames)
        self._cancellations = FloodGuard(self._earned_frames, "cancelled calls", CANCELLATIONS)
        self.closing = GracefulClose(
            CloseCallbacks(
                self._write,
                self._writes.close,
                self.abort,
                self._later,
                lambda: self._last_id,
                self._drain_calls,
            ),
            self._streams,
        )
        self._reader = FrameReader(
            FrameCallbacks(self._on_data_size, self._on_data, self._on_headers, self._on_control)
        )
        self._headers = HeaderReader()
        self._timers: list[asyncio.TimerHandle] = []
        self._deferred = b""  # received bytes that wait for the next turn
        self._received_s = time.monotonic()  # when the last bytes arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send SETTINGS; the client has `PREFACE_TIMEOUT_S` for its preface."""
        self._transport = cast("asyncio.Transport", transport)
        self._writes.begin(self._transport)
        self.client = transport.get_extra_info("peername") or None
        self._subjects = subjects_of(transport.get_extra_info("peercert"), time.time())
        limit = self._listener.connection_limit
        is_admitted = transport.get_extra_info("sslcontext") is not None  # by `TlsServer`
        if not (limit is None or is_admitted or limit.admits(self._listener.connections)):
            self._transport.abort()
            return
        self._listener.connections.add(self)
        self._later(PREFACE_TIMEOUT_S, self._check_preface)
        if (age_s := self._listener.new_age_s()) is not None:
            self._later(age_s, self._grow_old)
        self._write(SETTINGS)
        if self._listener.draining:
            self.closing.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the calls that run."""
        self._listener.lost(self)
        self._unread.stop()
        self._incomplete.stop()
        for timer in self._timers:
            timer.cancel()
        while self._streams:
            stream = self._streams.popitem()[1]
            stream.consumed_all()
            stream.cancel()
        self._headers = HeaderReader()  # frees the cached heads now: the collector may free this object late

    def pause_writing(self) -> None:
        """Stop sending: the socket's buffer is full."""
        self.outbound.stopped = True
        self._unread.watch()

    def resume_writing(self) -> None:
        """Send again: the socket's buffer has room."""
        self.outbound.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared read buffer, or a part of it while bytes that are read have to be kept."""
        listener = self._listener
        return listener.read_buffer[:LATE_READ_BYTES] if self._turns.are_over else listener.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes received."""
        data = self._listener.read_buffer[:nbytes]
        if self._deferred:
            self._deferred += data  # asyncio's TLS in Python 3.10 delivers bytes even while paused
        elif self._turns.are_over:
            self._deferred = bytes(data)
            self._put_off()
        else:
            self._receive(data)

    def idle_since_s(self) -> float | None:
        """Return when the last bytes arrived, in monotonic seconds; None while a call that needs a key runs.

        Calls without a key (health) do not count, else a client could keep its connections open with them.
        """
        return None if len(self._streams) > self.inbound.key_free_streams else self._received_s

    def close_idle(self) -> None:
        """Close the connection, because others need its place; the client may open another one."""
        self.closing.at_once(ErrorCode.NO_ERROR, "too many connections")

    def end_calls(self, error: MessageFailed) -> None:
        """End the open calls with an error; the connection closes once the client has read it."""
        self.closing.take_no_more()
        for stream in list(self._streams.values()):
            stream.fail(error)

    def abort(self) -> None:
        """Close now; calls that run are cancelled."""
        self._transport.abort()

    def _receive(self, data: Piece) -> None:
        """Parse received bytes for at most `TURN_S`, and defer the rest to the next loop iteration."""
        self._received_s = began_s = time.monotonic()
        self._writes.expect_flush()
        try:
            rest = data
            while rest and not self._transport.is_closing():  # TLS delivers bytes even after the close
                rest = self._reader.feed(rest, STEP_FRAMES)
                if rest and time.monotonic() - began_s > min(TURN_S, self._turns.turn_s):
                    self._deferred = bytes(rest)
                    break
        except ConnectionBroken as broken:
            logger.debug("gRPC connection from %s: %s", self.client, broken)
            if broken.code == ErrorCode.ENHANCE_YOUR_CALM:
                self._listener.budgets.refused[FLOOD] += 1
            self.closing.at_once(broken.code, str(broken))
        except Exception:  # the top of all parsing: a bug is logged, and ends only this connection
            logger.exception("a gRPC connection failed unexpectedly")
            self.closing.at_once(ErrorCode.INTERNAL_ERROR, "internal error")
        self._writes.flush()
        fills_buffer = len(data) == len(self._listener.read_buffer)
        took_s = time.monotonic() - began_s
        self._turns.spend(took_s)
        if self._deferred or (fills_buffer and took_s > AGAIN_S):
            self._put_off()

    def _put_off(self) -> None:
        """Read no more until it is this connection's turn again."""
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._turns.put_off(self._receive_deferred)

    def _receive_deferred(self) -> None:
        data, self._deferred = self._deferred, b""
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._receive(data)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule an action, which the loss of the connection cancels."""
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, act))

    # Calls

    def _on_headers(self, flags: int, stream_id: int, block: bytes) -> None:
        """Handle a header block: open a stream or, as trailers, end the client's side of an open one."""
        if self.outbound.stopped and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()
        request = self._headers.read(block)  # even if it is ignored: later blocks may refer to it
        stream = self._streams.get(stream_id)
        is_last = bool(flags & f.END_STREAM)
        if stream is not None:
            self._on_trailers(stream, request[0], is_last=is_last)
            return
        if stream_id <= self._last_id:
            if request[0].method:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} begins too late")
            self._flood.count()  # trailers of a call that was answered early
            return
        self._last_id = stream_id
        if self.closing.last_taken is not None or len(self._streams) >= MAX_STREAMS:
            if self.outbound.stopped:  # a client that reads its answers opens no excess streams
                self._flood.count()
            self._write(f.reset_stream(stream_id, ErrorCode.REFUSED_STREAM))  # clients may retry it
            return
        if self.outbound.held_bytes:
            request = self._unaffordable(request)
        stream = Stream(stream_id, request, self.client, self.inbound, self.outbound)
        stream.subjects = self._subjects
        stream.remote_open = not is_last
        self._streams[stream_id] = stream
        stream.listener = self._listener.open_call(stream)
        if not is_last:
            self._incomplete.watch()
        elif not stream.ended:
            stream.listener.on_half_close()

    def _unaffordable(self, request: Request) -> Request:
        """Return the request, with a flaw if this or all connections have too many unsent answer bytes."""
        limit_bytes = max(MAX_HELD_BYTES, MAX_HELD_ANSWERS * self._listener.send_limit_bytes)
        flaw = self.outbound.flaw_of_all()
        if self.outbound.held_bytes > limit_bytes:
            flaw = f"SERVER: Answers that this connection has not taken have more than {limit_bytes} bytes"
        if not flaw:
            return request
        return request[0]._replace(flaw=flaw, flaw_code=StatusCode.RESOURCE_EXHAUSTED), request[1]

    def _on_trailers(self, stream: Stream, found: RequestHead, *, is_last: bool) -> None:
        if not stream.remote_open:
            self._break_stream(StreamBroken(stream.id, ErrorCode.STREAM_CLOSED, "headers after the end"))
        elif found.method or not is_last:
            self._break_stream(StreamBroken(stream.id, ErrorCode.PROTOCOL_ERROR, "headers within a stream"))
        else:
            stream.half_close()

    def _on_data_size(self, stream_id: int, size: int, empty: int) -> None:
        """Subtract the size of DATA that begins to arrive from the flow-control windows."""
        if empty:
            self._flood.count(empty)
        if not stream_id or stream_id > self._last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is idle")
        self.inbound.consume(self._streams.get(stream_id), size)

    def _on_data(self, stream_id: int, pieces: Sequence[Piece], is_last: bool) -> None:
        """Pass bytes of messages to their stream."""
        stream = self._streams.get(stream_id)
        if stream is None:  # it was answered or reset while these bytes were in transit
            if sum(map(len, pieces)) < SMALL_BYTES:
                self._flood.count()
        elif not stream.remote_open:
            self._break_stream(StreamBroken(stream_id, ErrorCode.STREAM_CLOSED, "DATA after the end"))
        elif stream.received_bytes > stream.allowed_bytes:
            self._break_stream(StreamBroken(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "DATA without leave"))
        else:
            stream.receive(pieces, is_last=is_last)
            if is_last:
                stream.half_close()
            else:
                self.inbound.extend(stream)

    def _finished(self, stream: Stream) -> None:
        """Remove a stream whose answer was written completely."""
        self._answers += 1
        if stream.remote_open:  # the client may stop sending
            self._write(f.reset_stream(stream.id, ErrorCode.NO_ERROR))
        self._forget(stream)
        # Otherwise stream, listener and request would hold each other until the collector runs.
        stream.listener = ENDED

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        if stream.key_free:
            self.inbound.key_free_streams -= 1
        self.outbound.forget(stream)
        stream.consumed_all()
        if self.closing.last_taken is not None:
            self.closing.close_if_idle()

    def _cancel(self, stream_id: int) -> None:
        """Cancel the call of a stream, if it still runs."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            stream.cancel()

    def _break_stream(self, broken: StreamBroken) -> None:
        """Reset a stream for a stream error; the flood guard limits the number of resets."""
        self._flood.count()
        self._reset(broken)

    def _reset(self, broken: StreamBroken) -> None:
        logger.debug("gRPC stream %d from %s: %s", broken.stream_id, self.client, broken)
        self._write(f.reset_stream(broken.stream_id, broken.code))
        self._cancel(broken.stream_id)

    # Other frames (RFC 9113, 6)

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Act on a frame that is neither DATA nor HEADERS; unknown types are ignored (RFC 9113, 4.1)."""
        act = _CONTROL_FRAMES.get(kind)
        if act is None:
            self._flood.count()
            return
        try:
            act(self, flags, stream_id, payload)
        except StreamBroken as broken:
            self._break_stream(broken)

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != f.PRIORITY_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        self._flood.count()  # a PRIORITY frame has no meaning any more (RFC 9113, 5.3)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        f.read_u32(payload)
        if not stream_id or stream_id > self._last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}")
        stream = self._streams.get(stream_id)
        if stream is None or not stream.messages:
            self._flood.count()
        else:
            self._cancellations.count()
        self._cancel(stream_id)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & f.ACK and payload:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS in an acknowledgement")
        self._flood.count()
        if not flags & f.ACK:
            self._write(f.frame(f.SETTINGS, f.ACK, 0))  # before frames that obey the new settings
            self.outbound.configure(payload, self._streams)

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != f.PING_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        self._flood.count()
        if not flags & f.ACK:
            self._write(f.frame(f.PING, f.ACK, 0, payload))
        else:
            self.closing.ping_acknowledged(payload)

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < f.MIN_GOAWAY_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self._flood.count()
        self.closing.client_leaves()

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        outbound = self.outbound
        increment = f.read_u32(payload)
        sends = outbound.sends
        if not stream_id:
            outbound.widen(increment)
        elif stream_id > self._last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is idle")
        elif (stream := self._streams.get(stream_id)) is not None:
            outbound.widen_stream(stream, increment)
        if outbound.sends == sends:
            self._flood.count()

    # Time

    def _earned_frames(self) -> int:
        outbound = self.outbound
        return EARNED_BY_ANSWER * (self._answers + outbound.sends) + outbound.sent_bytes // EARNING_BYTES

    def _drain_calls(self) -> None:
        if self._listener.draining:
            self._incomplete.hurry(STOPPING_TIMEOUT_S)
        for stream in list(self._streams.values()):
            stream.listener.on_drain(is_stop=self._listener.draining)

    def _grow_old(self) -> None:
        self.closing.begin()
        if self._listener.age_grace_s is not None:
            self._later(self._listener.age_grace_s, self.abort)

    def _check_preface(self) -> None:
        if not self._reader.greeted:
            self.abort()

    def _unread_progress(self) -> dict[int, tuple[int, int]]:
        waiting = self.outbound.stalled_on(self._streams.values())
        if self.outbound.stopped:
            untaken = unread.untaken_bytes(self._transport)
            if untaken is not None:
                waiting[0] = (self.outbound.sent_bytes, untaken)
        return waiting

    def _end_unread(self, stalled: Collection[int]) -> None:
        """Reset streams that the client does not read, or close the connection if all of it is stalled."""
        logger.info("closed a connection whose client read nothing of its answers (%d so far)", len(stalled))
        if 0 in stalled:
            self.abort()
            return
        for stream_id in stalled:
            self._reset(StreamBroken(stream_id, ErrorCode.CANCEL, "its answer is not read"))


_CONTROL_FRAMES: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    f.PRIORITY: Connection._on_priority,
    f.RST_STREAM: Connection._on_reset,
    f.SETTINGS: Connection._on_settings,
    f.PING: Connection._on_ping,
    f.GOAWAY: Connection._on_goaway,
    f.WINDOW_UPDATE: Connection._on_window_update,
}
