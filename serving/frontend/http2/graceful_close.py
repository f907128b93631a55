"""Graceful close: GOAWAY in two steps, so that no call is lost (RFC 9113, 6.8)."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import NamedTuple

from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.frames import ErrorCode

STEP_S = 1.0  # how long a client may take to acknowledge each step of the close
PING = b"farewell"  # the payload of the ping after the first GOAWAY


class CloseCallbacks(NamedTuple):
    """The connection's methods that its graceful close calls."""

    write: Callable[[bytes], None]
    close: Callable[[], None]  # flush, then close
    abort: Callable[[], None]  # close now
    later: Callable[[float, Callable[[], None]], None]  # delay in seconds, and the action
    last_stream_id: Callable[[], int]  # the highest id of the streams that were opened
    draining: Callable[[], None]  # called when no further call is accepted; again at a later `begin`


class GracefulClose:
    """Announces the last stream and closes the connection after it. Used on the event loop only.

    Attributes:
        last_taken: id of the last stream that is processed; None while new streams are accepted.
    """

    __slots__ = ("_announced", "_do", "_linger_s", "_streams", "last_taken")

    def __init__(self, callbacks: CloseCallbacks, streams: Sized) -> None:
        self._do = callbacks
        self._streams = streams  # the open streams
        self._announced = False
        self._linger_s = STEP_S  # how long to stay open after the last call; 0 once the client acknowledged
        self.last_taken: int | None = None

    def begin(self) -> None:
        """Ask the client to open no more streams, and close after the open ones are answered.

        Calls that cross with the first GOAWAY are still accepted. The second GOAWAY, with the true last
        stream, is sent when the client acknowledges a ping, or after `STEP_S`.
        """
        if self._announced:
            if self.last_taken is not None:  # it was closing (because of its age), and the server stops
                self._do.draining()
            return
        self._announced = True
        self._do.write(f.goaway(f.MAX_STREAM_ID, ErrorCode.NO_ERROR) + f.frame(f.PING, 0, 0, PING))
        self._do.later(STEP_S, self.take_no_more)

    def ping_acknowledged(self, payload: bytes) -> None:
        """Take the second step if the client answered the ping of the first one."""
        if self._announced and payload == PING:
            self._linger_s = 0.0
            self.take_no_more()

    def client_leaves(self) -> None:
        """Close after the last call: the client sent GOAWAY, so it opens no more streams."""
        self._announced = True
        self._linger_s = 0.0
        self._stop_taking()
        self.close_if_idle()

    def take_no_more(self) -> None:
        """Refuse every stream from now on, and tell the client the last one that is processed."""
        if self.last_taken is None:
            self._do.write(f.goaway(self._do.last_stream_id(), ErrorCode.NO_ERROR))
            self._stop_taking()
            self.close_if_idle()

    def close_if_idle(self) -> None:
        """Close the connection if its last call has ended."""
        if self.last_taken is not None and not self._streams:
            # A client that has not acknowledged may still open streams: they are refused, to be retried.
            self._do.later(self._linger_s, self._do.close)

    def at_once(self, code: ErrorCode, message: str) -> None:
        """Close the connection for a connection error."""
        last_id = self._do.last_stream_id() if self.last_taken is None else self.last_taken
        self._do.write(f.goaway(last_id, code, message))
        self._do.close()
        self._do.later(STEP_S, self._do.abort)  # the client may not read the GOAWAY, so `close` may not end

    def _stop_taking(self) -> None:
        if self.last_taken is None:  # an announced last stream must not change
            self.last_taken = self._do.last_stream_id()
            self._do.draining()
