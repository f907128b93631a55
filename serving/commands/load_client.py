"""The HTTP/1.1 client of `torchere bench`: sends raw request bytes, returns status and body."""

from __future__ import annotations

import asyncio
import os
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import httptools


class Reply(NamedTuple):
    """The status and body of a response."""

    status: int
    body: bytes


class ConnectionLost(Exception):
    """The connection failed, or ended before the response was complete."""


def _why(err: Exception) -> str:
    """Return the operating system's error text; asyncio's text repeats the address as a Python tuple."""
    refused = isinstance(err, (ConnectionError, TimeoutError)) and err.errno
    return os.strerror(refused) if refused else getattr(err, "strerror", None) or str(err)


@dataclass(frozen=True, slots=True)
class Target:
    """The target of requests: the parts of an `http://` or `https://` URL."""

    host: str
    port: int
    path: str
    tls: bool

    @property
    def url(self) -> str:
        """The URL of the requests."""
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"

    @staticmethod
    def parse(url: str) -> Target:
        """Parse a URL.

        Raises:
            ValueError: `url` is not an HTTP URL; the message contains it.
        """
        refusal = f"the address is {url!r}; expected http://host:port or https://host:port"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as err:  # its text does not contain the address
            raise ValueError(refusal) from err
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(refusal)
        tls = parts.scheme == "https"
        port = port or (443 if tls else 80)
        return Target(parts.hostname, port, parts.path or "/", tls)


def request_bytes(target: Target, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the bytes of a complete POST request, which can be sent any number of times.

    Raises:
        ValueError: a header contains a line break.
    """
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"POST {target.path} HTTP/1.1", f"Host: {host}:{target.port}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header holds a line break; expected one line")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Client:
    """A client with one persistent connection, which it reopens when the server has closed it.

    Used on one event loop, with one request at a time.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection: _Connection | None = None

    async def send(self, request: bytes) -> Reply:
        """Send one request and wait for the complete response.

        Raises:
            ConnectionLost: the connection failed or ended before the response was complete.
        """
        if self._connection is None or not self._connection.usable:
            self._connection = await self._connect()
        try:
            return await self._connection.exchange(request)
        except BaseException:  # also cancellation: the next request must not get parts of this response
            self.close()
            raise

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._target.tls else None
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(
                _Connection, self._target.host, self._target.port, ssl=context
            )
        except (OSError, UnicodeError) as err:  # UnicodeError: invalid host name
            raise ConnectionLost(_why(err)) from err
        return made

    def close(self) -> None:
        """Abort the connection; the next `send` opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Connection(asyncio.Protocol):
    """The asyncio protocol of one connection; the `on_...` methods are the parser's callbacks."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport  # set when the connection is made, before it is handed out
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Reply] | None = None
        self._is_lost = False
        self._body: list[bytes] = []

    @property
    def usable(self) -> bool:
        # TLS of Python 3.10 does not report a lost connection.
        return not (self._is_lost or self._transport.is_closing())

    async def exchange(self, request: bytes) -> Reply:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            self._lose(f"the answer is not HTTP: {err}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._lose(str(exc or "the server closed the connection"))

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self._transport.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Reply(self._parser.get_status_code(), b"".join(self._body)))

    def _lose(self, cause: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionLost(cause))
