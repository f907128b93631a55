"""One HTTP/2 connection of a gRPC client, from its preface to its last frame (RFC 9113).

Only what gRPC needs of HTTP/2: no push, no priorities. All that a client can make the server hold or do has a
limit: header lists, frames, streams at a time, windows, frames that move nothing, answers that are not read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from torchere.serving.frontend import unread
from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.chatter import Chatter
from torchere.serving.frontend.http2.control_frames import ControlFrames
from torchere.serving.frontend.http2.farewell import Farewell
from torchere.serving.frontend.http2.frame_reader import FrameReader, Piece
from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode, StreamBroken
from torchere.serving.frontend.http2.greeting import GREETING, MAX_STREAMS
from torchere.serving.frontend.http2.header_blocks import HeadReader, RequestHead
from torchere.serving.frontend.http2.inflow import Inflow
from torchere.serving.frontend.http2.listening import Listening
from torchere.serving.frontend.http2.outflow import Outflow
from torchere.serving.frontend.http2.receiver import OVER
from torchere.serving.frontend.http2.status import StatusCode
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.frontend.http2.unfinished import Unfinished
from torchere.serving.frontend.stalls import Stalls
from torchere.serving.turn_writes import TurnWrites

logger = logging.getLogger(__name__)

PREFACE_TIMEOUT_S = 20.0
MAX_UNREAD_BYTES = 32 * 2**20  # that wait in the socket's buffer while the client goes on asking
# That wait for a client's windows before it gets more, or four answers where these may be longer.
MAX_HELD_BYTES = 2**29
MAX_HELD_ANSWERS = 4
# What comes at once can be two thousand calls, and as long as it fills its room, uvloop reads on: up to 32
# times before others have their turn.
TURN_S = 0.005  # for what came on one connection; the rest waits for the next turn
AGAIN_S = TURN_S / 8  # a read that took longer is the last one of its turn
STEP_FRAMES = 32  # between two looks at the clock; a run of DATA is one, for it is quick
SMALL_BYTES = 128  # less DATA for a call that is over moves nothing


class Connection(asyncio.BufferedProtocol):
    """One connection. Used by the event loop only."""

    def __init__(self, listening: Listening) -> None:
        self.listening = listening
        self._transport = cast("asyncio.Transport", None)  # until it is made
        self._writes = TurnWrites()
        self.write = self._writes.write  # whole frames
        self.client: Any = None  # host and port; None over a Unix socket
        self.close = self._writes.close  # once what was written is out
        self._streams: dict[int, Stream] = {}
        self._unread = Stalls(unread.UNREAD_TIMEOUT_S, self._waiting, self._unread_too_long)
        self.outflow = Outflow(self._writes.write_all, self.finished, self._unread.watch)
        self.inflow = Inflow(self._writes.write)
        self.unfinished = Unfinished(self._streams, listening.receive_limit_bytes)
        self.chatter = Chatter(self.outflow)
        self.farewell = Farewell(self, self._streams)
        self.control = ControlFrames(self, self._streams).take
        self._reader = FrameReader(self)
        self._heads = HeadReader()
        self.last_id = 0  # of the streams that were begun
        self._timers: list[asyncio.TimerHandle] = []
        self._put_off = b""  # what came and waits for its turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected; it has `PREFACE_TIMEOUT_S` to say that it speaks HTTP/2."""
        self._transport = cast("asyncio.Transport", transport)
        self._writes.begin(self._transport)
        self.client = transport.get_extra_info("peername") or None
        self.listening.connections.add(self)
        self.later(PREFACE_TIMEOUT_S, self._ungreeted)
        if (age_s := self.listening.age_s()) is not None:
            self.later(age_s, self._grow_old)
        self.write(GREETING)
        if self.listening.leaving:
            self.farewell.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, from either side."""
        self.listening.lost(self)
        self._unread.stop()
        self.unfinished.stop()
        for timer in self._timers:
            timer.cancel()
        while self._streams:
            self._streams.popitem()[1].lost()

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
        data = self.listening.landing[:nbytes]
        if self._put_off:
            self._put_off += data  # asyncio's TLS of Python 3.10 hands on what it has read
        else:
            self._take(data)

    def _take(self, data: Piece) -> None:
        """Act on what came, for as long as a turn may take."""
        began_s = time.monotonic()
        self._writes.expect_flush()
        try:
            rest = data
            while rest and not self._transport.is_closing():  # TLS hands on what came before the end
                rest = self._reader.feed(rest, STEP_FRAMES)
                if rest and time.monotonic() - began_s > TURN_S:
                    self._put_off = bytes(rest)
                    break
        except ConnectionBroken as broken:
            self.farewell.at_once(broken.code, str(broken))
        except Exception:  # the top of everything a client sends: a bug is logged, and costs one connection
            logger.exception("a gRPC connection failed unexpectedly")
            self.farewell.at_once(ErrorCode.INTERNAL_ERROR, "internal error")
        self._writes.flush()
        fills_room = len(data) == len(self.listening.landing)
        is_late = self._put_off or (fills_room and time.monotonic() - began_s > AGAIN_S)
        if is_late and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        data, self._put_off = self._put_off, b""
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._take(data)

    # The streams' side

    def finished(self, stream: Stream) -> None:
        """The answer to a call has gone out whole."""
        self.chatter.answers += 1
        if stream.remote_open:  # the client may stop sending
            self.write(f.reset_stream(stream.id, ErrorCode.NO_ERROR))
        self._forget(stream)
        stream.receiver = OVER  # or the two would hold each other, and the request, until a collector comes

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Have something done, unless the connection is gone by then."""
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, act))

    def abort(self) -> None:
        """Close now; calls that run are given up."""
        self._transport.abort()

    # The frames' side

    def counted(self, stream_id: int, size: int, empty: int) -> None:
        """DATA begins."""
        if empty:
            self.chatter.count(empty)
        if not stream_id or stream_id > self.last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is idle")
        self.inflow.take(self._streams.get(stream_id), size)

    def data(self, stream_id: int, pieces: Sequence[Piece], *, is_last: bool) -> None:
        """Pieces of a call's messages."""
        stream = self._streams.get(stream_id)
        if stream is None:  # it was answered, or given up, while this was on its way
            if sum(map(len, pieces)) < SMALL_BYTES:
                self.chatter.count()
        elif not stream.remote_open:
            self.break_stream(StreamBroken(stream_id, ErrorCode.STREAM_CLOSED, "DATA after the end"))
        elif stream.came_bytes > stream.allowed_bytes:
            self.break_stream(StreamBroken(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "DATA without leave"))
        else:
            stream.take(pieces, is_last=is_last)
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
            self._trailers(stream, request, is_last=is_last)
            return
        if stream_id <= self.last_id:
            if request.method:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} begins too late")
            self.chatter.count()  # trailers of a call that was answered early
            return
        self.last_id = stream_id
        if self.farewell.last_taken is not None or len(self._streams) >= MAX_STREAMS:
            self.write(f.reset_stream(stream_id, ErrorCode.REFUSED_STREAM))  # clients may send it again
            return
        stream = Stream(self, stream_id, self._affordable(request), self.outflow.initial_window)
        stream.remote_open = not is_last
        self._streams[stream_id] = stream
        stream.receiver = self.listening.open_call(stream)
        if not is_last:
            self.unfinished.watch()
        elif not stream.ended:
            stream.receiver.half_closed()

    def _affordable(self, request: RequestHead) -> RequestHead:
        limit_bytes = max(MAX_HELD_BYTES, MAX_HELD_ANSWERS * self.listening.send_limit_bytes)
        if self.outflow.held_bytes <= limit_bytes:
            return request
        flaw = f"SERVER: Answers that this connection has not taken have more than {limit_bytes} bytes"
        return request._replace(flaw=flaw, flaw_code=StatusCode.RESOURCE_EXHAUSTED)

    def _trailers(self, stream: Stream, found: RequestHead, *, is_last: bool) -> None:
        if not stream.remote_open:
            self.break_stream(StreamBroken(stream.id, ErrorCode.STREAM_CLOSED, "headers after the end"))
        elif found.method or not is_last:
            self.break_stream(StreamBroken(stream.id, ErrorCode.PROTOCOL_ERROR, "headers within a stream"))
        else:
            stream.half_close()

    def _waiting(self) -> dict[int, tuple[int, int]]:
        return self.outflow.waiting(self._streams, self._transport)

    def _unread_too_long(self, waiting: Collection[int]) -> None:
        logger.info("a client took nothing of what waits for it (%d times): given up", len(waiting))
        if 0 in waiting:
            self.abort()
            return
        for stream_id in waiting:
            self._end_stream(StreamBroken(stream_id, ErrorCode.CANCEL, "its answer is not read"))

    def give_up(self, stream_id: int) -> None:
        """Nothing more is to come of a call, nor to go out."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            stream.lost()

    def break_stream(self, broken: StreamBroken) -> None:
        """A client may not have any number of calls ended by breaking their rules."""
        self.chatter.count()
        self._end_stream(broken)

    def _end_stream(self, broken: StreamBroken) -> None:
        logger.debug("gRPC stream %d from %s: %s", broken.stream_id, self.client, broken)
        self.write(f.reset_stream(broken.stream_id, broken.code))
        self.give_up(broken.stream_id)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self.outflow.forget(stream)
        if stream.held_bytes:
            self.unfinished.let_go(stream, stream.held_bytes)
        if self.farewell.last_taken is not None:
            self.farewell.close_if_done()

    def _grow_old(self) -> None:
        self.farewell.begin()
        if self.listening.age_grace_s is not None:
            self.later(self.listening.age_grace_s, self.abort)

    def _ungreeted(self) -> None:
        if not self._reader.greeted:
            self.abort()
