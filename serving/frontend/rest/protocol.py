"""HTTP/1.1 on a connection: uvicorn's, with TorchServe's limits, its error body, and header names as written.

ASGI gives header names in lower case; TorchServe's handlers see them in the client's spelling and look them
up by it, so this protocol keeps a second list of them in the scope.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.codec import SPELLED_HEADERS
from torchere.serving.frontend.rest.joined_writes import JoinedWrites

MAX_REQUEST_LINE_BYTES = 4096  # TorchServe's limits; the parser itself has none
MAX_HEADER_BYTES = 8192
HEAD_TIMEOUT_S = 60.0  # a connection that has begun a head and not ended it by then is closed

_ERROR = {"code": 400, "type": "BadRequestException", "message": "Invalid HTTP message."}
_BODY = pretty(_ERROR).encode() + b"\n"
_INVALID = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s" % (len(_BODY), _BODY)
)


class HeadTooLarge(Exception):
    """Raised inside the parser's callbacks; the parser turns it into its own error."""


class Protocol(HttpToolsProtocol):
    """One connection. Used by the event loop only."""

    _spelled: list[tuple[bytes, bytes]]
    _head_bytes: int
    _in_head: bool = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected, and has `HEAD_TIMEOUT_S` for its first head."""
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop)  # type: ignore[assignment]
        self._mind_the_head()

    def data_received(self, data: bytes) -> None:
        """Bytes came in. A head that comes whole, as nearly all do, needs no timer."""
        super().data_received(data)
        if self._in_head or self._head_timer is not None:
            self._mind_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, from either side."""
        self._in_head = False
        self._mind_the_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._spelled = []
        cast("dict[str, Any]", self.scope)[SPELLED_HEADERS] = self._spelled

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        super().on_url(url)
        if len(self.url) > MAX_REQUEST_LINE_BYTES:
            raise HeadTooLarge

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header line, of the head or of a chunked body's trailer."""
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEADER_BYTES:
            raise HeadTooLarge
        value = value.rstrip(b" \t")  # RFC 9110, 5.5: no part of it; the parser drops the leading ones only
        self._spelled.append((name, value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; the answer may begin."""
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too much of it, and close."""
        if not self.transport.is_closing():
            self.transport.write(_INVALID)
            self.transport.close()

    def _mind_the_head(self) -> None:
        if not self._in_head and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
