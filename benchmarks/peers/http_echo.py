"""The floor under HTTP in Python: uvloop and httptools, and the body of each request as its answer.

`python http_echo.py PORT`. Runs in the project's own environment.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Echo(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def data_received(self, data: bytes) -> None:
        """Bytes came in."""
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self.body += body

    def on_message_complete(self) -> None:
        """A request is there: answer it."""
        answer = b'{"predictions": %b}' % self.body
        self.body = b""
        self.transport.write(_HEAD % len(answer) + answer)


async def main(port: int) -> None:
    """Serve until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
