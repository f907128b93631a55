"""How a connection ends: in two steps that lose no call, as the client wishes, or at once (RFC 9113, 6.8)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.frames import ErrorCode

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.connection import Connection
    from torchere.serving.frontend.http2.stream import Stream

logger = logging.getLogger(__name__)

FAREWELL_S = 1.0  # how long a client may take to hear that the connection ends, at each step of it
PING = b"farewell"


class Farewell:
    """Says which call is the last, and closes behind it. Lives on the event loop.

    Attributes:
        last_taken: the last of the streams that are taken; None: more are.
    """

    __slots__ = ("_connection", "_linger_s", "_said", "_streams", "last_taken")

    def __init__(self, connection: Connection, streams: Mapping[int, Stream]) -> None:
        self._connection = connection
        self._streams = streams
        self._said = False
        self._linger_s = FAREWELL_S  # it stays open behind its last call, unless the client heard
        self.last_taken: int | None = None

    def begin(self) -> None:
        """Tell the client to take its next calls elsewhere, and close once those here are answered.

        Calls that cross with the news are still taken: only when the client has answered a ping behind it, or
        did not for `FAREWELL_S`, is it told which call was the last one.
        """
        if self._said:
            return
        self._said = True
        connection = self._connection
        connection.write(f.goaway(f.MAX_STREAM_ID, ErrorCode.NO_ERROR) + f.frame(f.PING, 0, 0, PING))
        connection.later(FAREWELL_S, self.take_no_more)

    def heard(self, payload: bytes) -> None:
        """The client answered a ping."""
        if self._said and payload == PING:
            self._linger_s = 0.0
            self.take_no_more()

    def returned(self) -> None:
        """The client begins no more calls."""
        self._said = True
        self._linger_s = 0.0
        if self.last_taken is None:  # a later call than the client was told of can't be the last one
            self.last_taken = self._connection.last_id
        self.close_if_done()

    def take_no_more(self) -> None:
        """Tell the client which call is the last."""
        connection = self._connection
        if self.last_taken is None:
            self.last_taken = connection.last_id
            connection.write(f.goaway(connection.last_id, ErrorCode.NO_ERROR))
            self.close_if_done()

    def close_if_done(self) -> None:
        """Close behind the last call."""
        if self.last_taken is not None and not self._streams:
            # Calls of a client that did not hear are refused, for it to send again, and not lost.
            self._connection.later(self._linger_s, self._connection.close)

    def at_once(self, code: ErrorCode, message: str) -> None:
        """Tell the client what is wrong, and close."""
        connection = self._connection
        logger.debug("gRPC connection from %s: %s", connection.client, message)
        last_id = connection.last_id if self.last_taken is None else self.last_taken
        connection.write(f.goaway(last_id, code, message))
        connection.close()
        connection.later(FAREWELL_S, connection.abort)  # it may not even read that
