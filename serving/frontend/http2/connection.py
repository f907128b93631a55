"""One HTTP/2 connection of a gRPC client, from its preface to its last frame (RFC 9113).

Only what gRPC needs of HTTP/2: no push, no priorities. All that a client can make the server hold or do has a
limit: header lists, frames, streams at a time, windows, frames that move nothing, answers that are not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.frame_reader import FrameReader, Piece
from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode, StreamBroken
from torchere.serving.frontend.http2.greeting import GREETING, MAX_STREAMS
from torchere.serving.frontend.http2.header_blocks import HeadReader
from torchere.serving.frontend.http2.inflow import Inflow
from torchere.serving.frontend.http2.listening import Listening
from torchere.serving.frontend.http2.outflow import Outflow
from torchere.serving.frontend.http2.stream import OVER, Stream
from torchere.serving.frontend.unread import Unread
from torchere.serving.turn_writes import TurnWrites

logger = logging.getLogger(__name__)

PREFACE_TIMEOUT_S = 20.0
MAX_UNREAD_BYTES = 32 * 2**20  # that wait in the socket's buffer while the client goes on asking
FAREWELL_S = 1.0  # how long a client may take to hear that the connection ends, at each step of it
_FAREWELL = b"farewell"


class Connection(asyncio.BufferedProtocol):
    """One connection. Used by the event loop only."""

    def __init__(self, listening: Listening) -> None:
        self.listening = listening
        self._transport = cast("asyncio.Transport", None)  # until it is made
        self._writes = TurnWrites()
        self.write = self._writes.write  # whole frames
        self.client: Any = None  # host and port; None over a Unix socket
        self._unread = Unread(lambda: self.outflow.held_back(self._streams, self._transport), self._stalled)
        self.outflow = Outflow(self._writes.write_all, self.finished, self._unread.watch)
        self.inflow = Inflow(self._writes.write)
        self._reader = FrameReader(self)
        self._streams: dict[int, Stream] = {}
        self._heads = HeadReader()
        self._last_id = 0
        self._last_taken: int | None = None  # of the streams; None: more are taken
        self._leaving = False
        self._linger_s = FAREWELL_S  # it stays open behind its last call, unless the client heard
        self._timers: list[asyncio.TimerHandle] = []
        self._on = {
            f.RST_STREAM: self._reset,
            f.SETTINGS: self._settings,
            f.PING: self._ping,
            f.GOAWAY: self._goaway,
            f.WINDOW_UPDATE: self._window_update,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected; it has `PREFACE_TIMEOUT_S` to say that it speaks HTTP/2."""
        self._transport = cast("asyncio.Transport", transport)
        self._writes.begin(self._transport)
        self.client = transport.get_extra_info("peername") or None
        self.listening.connections.add(self)
        self._later(PREFACE_TIMEOUT_S, self._ungreeted)
        if (age_s := self.listening.age_s()) is not None:
            self._later(age_s, self._grow_old)
        self.write(GREETING)
        if self.listening.leaving:
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, from either side."""
        self.listening.lost(self)
        self._unread.stop()
        for timer in self._timers:
            timer.cancel()
        while self._streams:
            _, stream = self._streams.popitem()
            self._lose(stream)

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self.outflow.stopped = True
        self._unread.watch()

    def resume_writing(self) -> None:
        """It has room again."""
        self.outflow.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where bytes may come in."""
        return self.listening.landing

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came in."""
        if self._transport.is_closing():
            return  # TLS hands on what came before the end
        self._writes.expect_flush()
        try:
            self._reader.feed(self.listening.landing[:nbytes])
        except ConnectionBroken as broken:
            self._break_down(broken.code, str(broken))
        except Exception:  # the top of everything a client sends: a bug is logged, and costs one connection
            logger.exception("a gRPC connection failed unexpectedly")
            self._break_down(ErrorCode.INTERNAL_ERROR, "internal error")
        self._writes.flush()

    # The streams' side

    def finished(self, stream: Stream) -> None:
        """The answer to a call has gone out whole."""
        if stream.remote_open:  # the client may stop sending
            self.write(f.reset_stream(stream.id, ErrorCode.NO_ERROR))
        self._forget(stream)
        stream.receiver = OVER  # or the two would hold each other, and the request, until a collector comes

    def drain(self) -> None:
        """Tell the client to take its next calls elsewhere, and close once those here are answered.

        Calls that cross with the news are still taken: only when the client has answered a ping behind it, or
        did not for `FAREWELL_S`, is it told which call was the last one (RFC 9113, 6.8).
        """
        if self._leaving or self._transport.is_closing():
            return
        self._leaving = True
        self.write(f.goaway(f.MAX_STREAM_ID, ErrorCode.NO_ERROR) + f.frame(f.PING, 0, 0, _FAREWELL))
        self._later(FAREWELL_S, self._take_no_more)

    def abort(self) -> None:
        """Close now; calls that run are given up."""
        self._transport.abort()

    # The frames' side

    def counted(self, stream_id: int, size: int, empty: int) -> None:
        """DATA begins."""
        for _ in range(empty):
            self.inflow.count_chatter()
        if not stream_id or stream_id > self._last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is idle")
        self.inflow.take(self._streams.get(stream_id), size)

    def data(self, stream_id: int, pieces: Sequence[Piece], *, is_last: bool) -> None:
        """Pieces of a call's messages."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # it was answered, or given up, while this was on its way
        if not stream.remote_open:
            self._break_stream(StreamBroken(stream_id, ErrorCode.STREAM_CLOSED, "DATA after the end"))
        elif stream.receive_window < 0:
            self._break_stream(StreamBroken(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "DATA without leave"))
        else:
            stream.take(pieces)
            if is_last:
                stream.half_close()
            else:
                self.inflow.give_leave(stream)

    def head(self, flags: int, stream_id: int, block: bytes) -> None:
        """The headers of a call, or its trailers."""
        if self.outflow.stopped and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()
        request = self._heads.read(block)  # even when nobody wants it: the next ones may rest on it
        stream = self._streams.get(stream_id)
        is_last = bool(flags & f.END_STREAM)
        if stream is not None:
            self._trailers(stream, is_last=is_last)
            return
        if stream_id <= self._last_id:
            if request.method:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} begins too late")
            return  # trailers of a call that was answered early
        self._last_id = stream_id
        if self._last_taken is not None or len(self._streams) >= MAX_STREAMS:
            self.write(f.reset_stream(stream_id, ErrorCode.REFUSED_STREAM))  # clients may send it again
            return
        stream = Stream(self, stream_id, request, self.outflow.initial_window)
        stream.remote_open = not is_last
        self._streams[stream_id] = stream
        stream.receiver = self.listening.open_call(stream)
        if is_last and not stream.ended:
            stream.receiver.half_closed()

    def control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A frame that is neither data nor headers; kinds that are not known mean nothing (RFC 9113, 4.1)."""
        take = self._on.get(kind)
        if take is None:
            self.inflow.count_chatter()
            return
        try:
            take(flags, stream_id, payload)
        except StreamBroken as broken:
            self._break_stream(broken)

    def _trailers(self, stream: Stream, *, is_last: bool) -> None:
        if is_last and stream.remote_open:
            stream.half_close()
        else:
            self._break_stream(StreamBroken(stream.id, ErrorCode.PROTOCOL_ERROR, "headers within a stream"))

    def _reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        f.read_u32(payload)
        if not stream_id or stream_id > self._last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}")
        self._give_up(stream_id)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or (flags & f.ACK and payload):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS where none can be")
        self.inflow.count_chatter()
        if not flags & f.ACK:
            self.write(f.frame(f.SETTINGS, f.ACK, 0))  # before what goes out by the new settings
            self.outflow.configure(payload, list(self._streams.values()))

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) != len(_FAREWELL):
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "a PING must be 8 bytes on stream 0")
        self.inflow.count_chatter()
        if not flags & f.ACK:
            self.write(f.frame(f.PING, f.ACK, 0, payload))
        elif self._leaving and payload == _FAREWELL:
            self._linger_s = 0.0
            self._take_no_more()

    def _goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._leaving = True  # the client begins no more calls
        self._linger_s = 0.0
        self._last_taken = self._last_id
        self._close_if_done()

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        increment = f.read_u32(payload)
        if not stream_id:
            self.outflow.widen(increment)
        elif stream_id > self._last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is idle")
        elif (stream := self._streams.get(stream_id)) is not None:
            self.outflow.widen_stream(stream, increment)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, act))

    def _stalled(self, held: tuple[int, int, int]) -> None:
        if held[0]:
            self._break_stream(StreamBroken(held[0], ErrorCode.CANCEL, "its answer is not read"))
        else:
            self.abort()

    def _give_up(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            self._lose(stream)

    def _lose(self, stream: Stream) -> None:
        stream.lost()
        stream.receiver.gone()
        stream.receiver = OVER

    def _break_stream(self, broken: StreamBroken) -> None:
        logger.debug("gRPC stream %d from %s: %s", broken.stream_id, self.client, broken)
        self.write(f.reset_stream(broken.stream_id, broken.code))
        self._give_up(broken.stream_id)

    def _break_down(self, code: ErrorCode, message: str) -> None:
        logger.debug("gRPC connection from %s: %s", self.client, message)
        last_id = self._last_id if self._last_taken is None else self._last_taken
        self.write(f.goaway(last_id, code, message))
        self._writes.close()
        self._later(FAREWELL_S, self.abort)  # it may not even read that

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self.outflow.forget(stream)
        if self._last_taken is not None:
            self._close_if_done()

    def _take_no_more(self) -> None:
        if self._last_taken is None and not self._transport.is_closing():
            self._last_taken = self._last_id
            self.write(f.goaway(self._last_id, ErrorCode.NO_ERROR))
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._last_taken is not None and not self._streams:
            # Calls of a client that did not hear are refused, for it to send again, and not lost.
            self._later(self._linger_s, self._writes.close)

    def _grow_old(self) -> None:
        self.drain()
        if self.listening.age_grace_s is not None:
            self._later(self.listening.age_grace_s, self.abort)

    def _ungreeted(self) -> None:
        if not self._reader.greeted:
            self.abort()
