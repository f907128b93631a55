"""Graceful close: GOAWAY in two steps, so that no call is lost (RFC 9113, 6.8)."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import NamedTuple

from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.frames import ErrorCode

STEP_S = 1.0  # how long a client may take to acknowledge each step of the close
PING = b"farewell"  # the payload of the ping behind the first GOAWAY


class CloseCallbacks(NamedTuple):
    """What the connection does for its close."""

    write: Callable[[bytes], None]
    close: Callable[[], None]  # flush, then close
    abort: Callable[[], None]  # close now
    later: Callable[[float, Callable[[], None]], None]  # delay in seconds, and the action
    last_stream_id: Callable[[], int]  # of the streams that were begun
    draining: Callable[[], None]  # no further call is taken; called once


class GracefulClose:
    """Announces the last stream and closes the connection behind it. Lives on the event loop.

    Attributes:
        last_taken: the last stream that is processed; None while new ones are taken.
    """

    __slots__ = ("_announced", "_do", "_linger_s", "_streams", "last_taken")

    def __init__(self, callbacks: CloseCallbacks, streams: Sized) -> None:
        self._do = callbacks
        self._streams = streams  # those that are open
        self._announced = False
        self._linger_s = STEP_S  # the connection stays open behind its last call, unless the client heard
        self.last_taken: int | None = None

    def begin(self) -> None:
        """Ask the client to open no more streams here, and close once those that are open are answered.

        Calls that cross with the first GOAWAY are still taken: the second one, with the true last stream,
        follows the client's acknowledgement of a ping, or `STEP_S`.
        """
        if self._announced:
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
        """Close behind the last call: the client sent GOAWAY, and opens no more streams."""
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
            # Streams of a client that has not heard are refused meanwhile, and retried elsewhere.
            self._do.later(self._linger_s, self._do.close)

    def at_once(self, code: ErrorCode, message: str) -> None:
        """Close the connection for a connection error."""
        last_id = self._do.last_stream_id() if self.last_taken is None else self.last_taken
        self._do.write(f.goaway(last_id, code, message))
        self._do.close()
        self._do.later(STEP_S, self._do.abort)  # the client may not even read that

    def _stop_taking(self) -> None:
        if self.last_taken is None:  # a stream that the client was told of can't move back
            self.last_taken = self._do.last_stream_id()
            self._do.draining()
