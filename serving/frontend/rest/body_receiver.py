"""Takes the bytes of one large body from the socket straight to where they are to be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchere.serving.frontend.rest.body import WholeBody

_NOTHING_MISSING = WholeBody(0)


class BodyReceiver(asyncio.BufferedProtocol):
    """Stands in for the HTTP protocol of a connection until a body is whole. Used by the event loop only.

    The kernel writes into the body itself; otherwise each byte is copied to a `bytes` object, by the parser
    to another one, and from there into the body.

    Args:
        transport: of the connection.
        body: what is to be filled; something is missing.
        heard: called when bytes came, and something is missing still.
        then: called once the HTTP protocol has the connection back and the body is whole.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        body: WholeBody,
        heard: Callable[[], None],
        then: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._body = body
        self._heard = heard
        self._then = then
        self._http = transport.get_protocol()
        self._take_over(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """What is missing; bytes of the next request stay in the socket."""
        return self._body.room

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came in."""
        self._body.filled(nbytes)
        if self._body.room:
            self._heard()
        else:
            self._body = _NOTHING_MISSING  # uvloop keeps hold of this
            self._take_over(self._http)
            self._then()

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self._http.eof_received()  # type: ignore[attr-defined,no-any-return]

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """It has room again."""
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._body = _NOTHING_MISSING
        self._http.connection_lost(exc)

    def _take_over(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.pause_reading()  # uvloop learns how to read when it begins
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()
