"""What a client may send on a connection before it has to wait for leave (RFC 9113, 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode, window_update

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.stream import Stream

STREAM_WINDOW_BYTES = 4 * 2**20  # of a message that may come before the client has to wait for leave
CONNECTION_WINDOW_BYTES = 16 * 2**20  # of all streams together; four whole windows


class Inflow:
    """The windows that one connection's client sends into. Lives on the event loop."""

    __slots__ = ("_unread_bytes", "_window", "_write")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._window = CONNECTION_WINDOW_BYTES
        self._unread_bytes = 0

    def take(self, stream: Stream | None, size: int) -> None:
        """A DATA frame came. The connection as a whole gets new leave at once; a stream may have to wait.

        Raises:
            ConnectionBroken: there was no leave for it.
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
            stream.came_bytes += size

    def give_leave(self, stream: Stream) -> None:
        """Let a client send on, once it has used up half of a stream's window."""
        left_bytes = stream.allowed_bytes - stream.came_bytes
        if left_bytes <= STREAM_WINDOW_BYTES // 2 and stream.remote_open and not stream.paused:
            increment = STREAM_WINDOW_BYTES - left_bytes
            stream.allowed_bytes += increment
            self._write(window_update(stream.id, increment))
