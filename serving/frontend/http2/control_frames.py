"""What a client says beside its calls: all frames but DATA and headers (RFC 9113, 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.farewell import PING
from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode, StreamBroken

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.connection import Connection
    from torchere.serving.frontend.http2.stream import Stream


class ControlFrames:
    """Acts on those of one connection. Lives on the event loop."""

    __slots__ = ("_connection", "_on", "_streams")

    def __init__(self, connection: Connection, streams: Mapping[int, Stream]) -> None:
        self._connection = connection
        self._streams = streams
        self._on = {
            f.PRIORITY: self._priority,
            f.RST_STREAM: self._reset,
            f.SETTINGS: self._settings,
            f.PING: self._ping,
            f.GOAWAY: self._goaway,
            f.WINDOW_UPDATE: self._window_update,
        }

    def take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A frame that is neither data nor headers; kinds that are not known mean nothing (RFC 9113, 4.1).

        Raises:
            ConnectionBroken: it can't be.
        """
        act = self._on.get(kind)
        if act is None:
            self._connection.chatter.count()
            return
        try:
            act(flags, stream_id, payload)
        except StreamBroken as broken:
            self._connection.break_stream(broken)

    def _priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != f.PRIORITY_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        self._connection.chatter.count()  # it means nothing any more (RFC 9113, 5.3)

    def _reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        connection = self._connection
        f.read_u32(payload)
        if not stream_id or stream_id > connection.last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}")
        stream = self._streams.get(stream_id)
        if stream is None or not stream.brought:
            connection.chatter.count()
        connection.give_up(stream_id)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        connection = self._connection
        if stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & f.ACK and payload:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS in an acknowledgement")
        connection.chatter.count()
        if not flags & f.ACK:
            connection.write(f.frame(f.SETTINGS, f.ACK, 0))  # before what goes out by the new settings
            connection.outflow.configure(payload, list(self._streams.values()))

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        connection = self._connection
        if stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != len(PING):
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        connection.chatter.count()
        if not flags & f.ACK:
            connection.write(f.frame(f.PING, f.ACK, 0, payload))
        else:
            connection.farewell.heard(payload)

    def _goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < f.MIN_GOAWAY_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self._connection.chatter.count()
        self._connection.farewell.returned()

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        connection, outflow = self._connection, self._connection.outflow
        increment = f.read_u32(payload)
        sends = outflow.sends
        if not stream_id:
            outflow.widen(increment)
        elif stream_id > connection.last_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is idle")
        elif (stream := self._streams.get(stream_id)) is not None:
            outflow.widen_stream(stream, increment)
        if outflow.sends == sends:
            connection.chatter.count()
