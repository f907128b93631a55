"""Taking in a request's body without ever holding more than its limit."""

from __future__ import annotations

import asyncio

import numpy as np
from starlette.types import Receive

from torchere.serving.frontend.alignment import room_before

LINGER_S = 2.0  # how long a refused body is still read, so that the client gets to see the refusal


class BodyTooLarge(Exception):
    """The body is, or says it will be, longer than `limits.max_request_bytes`: answer 413 and close."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete: there is nobody to answer."""


class WholeBody:
    """A body of known length on its way in.

    `view` is its memory, not set to zero before, so that what a client announces and does not send costs
    nothing. It ends on a multiple of `TENSOR_ALIGNMENT`. Not thread-safe.
    """

    __slots__ = ("room", "view")

    def __init__(self, length: int) -> None:
        before = room_before(length)
        self.view = np.empty(before + length, np.uint8).data[before:]
        self.room = self.view  # what is not filled yet

    def add(self, piece: bytes | bytearray) -> None:
        """Copy the next bytes; never more than there is room for, as the HTTP parser sees to."""
        self.room[: len(piece)] = piece
        self.filled(len(piece))

    def filled(self, size: int) -> None:
        """The first `size` bytes of the room are filled."""
        self.room = self.room[size:]


async def read_body(receive: Receive, announced_bytes: int, max_bytes: int) -> bytes:
    """Read the whole body.

    Args:
        receive: the ASGI callable.
        announced_bytes: the Content-Length, 0 when there is none.
        max_bytes: the longest body to accept.

    Raises:
        BodyTooLarge: as soon as that is known, be it from the announcement.
        ClientGone: the connection ended first.
    """
    if announced_bytes > max_bytes:
        raise BodyTooLarge
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        return await _read_rest(receive, body, max_bytes)
    if len(body) > max_bytes:
        raise BodyTooLarge
    return body


async def _read_rest(receive: Receive, first: bytes, max_bytes: int) -> bytes:
    # One growing buffer: a body that comes a byte at a time costs no more memory than one that comes whole.
    buffer = bytearray(first)
    while True:
        if len(buffer) > max_bytes:
            raise BodyTooLarge
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        buffer += message.get("body", b"")
        if not message.get("more_body", False):
            break
    if len(buffer) > max_bytes:
        raise BodyTooLarge
    return bytes(buffer)


async def discard_rest(receive: Receive) -> None:
    """Read and drop what still comes, for `LINGER_S` seconds.

    Closing a socket with unread bytes in it makes the kernel reset the connection, and the client would
    lose the answer that is already on its way.
    """
    try:
        await asyncio.wait_for(_discard(receive), LINGER_S)
    except asyncio.TimeoutError:
        return


async def _discard(receive: Receive) -> None:
    message = await receive()
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
