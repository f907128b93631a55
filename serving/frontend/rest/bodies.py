"""Readers of request bodies: a buffer of known length, a chunk decoder, and a reader for ASGI apps."""

from __future__ import annotations

import re

import numpy as np
from starlette.requests import Request

from torchere.serving.errors import Cancelled
from torchere.serving.frontend.alignment import room_before
from torchere.serving.frontend.rest.errors import BadMessage, BodyTooLong

MAX_LINE_BYTES = 16_384  # of a chunk-size or trailer line; else a client could send an endless one
MAX_TRAILER_BYTES = 8192  # the same limit as for the headers of a head
# RFC 9112, 7.1: the size in hexadecimal digits, then extensions, which are ignored. Blanks are allowed only
# around `;` and `=`.
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\[\t\x20-\x7e\x80-\xff])*"'
_EXTENSION = rb"[ \t]*;[ \t]*%b(?:[ \t]*=[ \t]*(?:%b|%b))?" % (_TOKEN, _TOKEN, _QUOTED)
_SIZE_LINE = re.compile(rb"([0-9a-fA-F]+)(?:%b)*\r\n" % _EXTENSION)
_TRAILER = re.compile(rb"(%b):[^\x00-\x08\x0a-\x1f\x7f]*\r\n" % _TOKEN)
_MAX_SIZE = 2**63
_BLANK = re.compile(rb"[\r\n]*")
# Of the JSON of calls other than predictions. The event loop decodes it: 6 MB of empty lists take 0.6 s.
MAX_PARAMETERS_BYTES = 65_536
_OF_THE_CONNECTION = frozenset({b"connection", b"proxy-connection"})  # allowed in the head only


class WholeBody:
    """Receive buffer for a body of known length.

    `view` is its memory. It is not zeroed, so bytes that a client announces but does not send cost nothing.
    It ends on a multiple of `TENSOR_ALIGNMENT`. Not thread-safe.
    """

    __slots__ = ("room", "view")

    def __init__(self, length: int) -> None:
        before = room_before(length)
        self.view = np.empty(before + length, np.uint8).data[before:]
        self.room = self.view  # the part that is not filled yet

    def add(self, piece: bytes | bytearray) -> None:
        """Copy the next bytes; the caller never passes more than fit into `room`."""
        self.room[: len(piece)] = piece
        self.filled(len(piece))

    def filled(self, size: int) -> None:
        """Record that the first `size` bytes of `room` are filled."""
        self.room = self.room[size:]


class Chunks:
    """Decoder of a chunked body (RFC 9112, 7.1) that stops at the end of the body. Not thread-safe.

    It is as strict as the parser of heads: a line ends with CRLF, a size has digits only. The trailer is
    checked and dropped: its fields must not be mistaken for header fields set by a gateway (RFC 9110, 6.5.1).
    """

    __slots__ = ("_in_trailer", "_left", "_line", "_trailer_bytes", "over")

    def __init__(self) -> None:
        self.over = False
        self._left = 0  # bytes left of the current chunk and its CRLF
        self._line = b""  # the beginning of an incomplete line
        self._in_trailer = False
        self._trailer_bytes = 0

    def feed(self, data: bytes, start: int) -> tuple[int, list[bytes]]:
        """Decode `data` from `start`; return the offset of the first unused byte, and the chunks' data.

        Raises:
            BadMessage: the framing is malformed, or one of its lines is too long.
        """
        pieces: list[bytes] = []
        size = len(data)
        while start < size and not self.over:
            if self._left:
                start = self._take(data, start, pieces)
                continue
            line, start = self._next_line(data, start)
            if line is None:
                break
            if self._in_trailer:
                self._end_trailer_line(line)
            else:
                self._begin_chunk(line)
        return start, pieces

    def _take(self, data: bytes, start: int, pieces: list[bytes]) -> int:
        end = min(len(data), start + self._left)
        content = min(end, start + self._left - 2)  # without the CRLF
        if content > start:
            pieces.append(data[start:content])
        for at in range(max(start, content), end):
            if data[at] != b"\r\n"[at - start - self._left + 2]:
                raise BadMessage("a chunk is longer than its size")
        self._left -= end - start
        return end

    def _next_line(self, data: bytes, start: int) -> tuple[bytes | None, int]:
        """Return the next line with its CRLF, or None while it is incomplete; and the next offset."""
        if self._line:
            data, start, before = self._line + data[start:], 0, len(self._line) - start
        else:
            before = 0
        end = data.find(b"\r\n", start) + 2
        line = data[start : end if end > 1 else len(data)]
        if len(line) > MAX_LINE_BYTES:
            raise BadMessage("a line of its framing has no end")
        if end > 1:
            self._line = b""
            return line, end - before
        if b"\n" in line or b"\r" in line[:-1]:
            raise BadMessage("a line of its framing ends with other than CRLF")
        self._line = line
        return None, len(data) - before

    def _begin_chunk(self, line: bytes) -> None:
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise BadMessage("a chunk has no size")
        size = int(found[1], 16)
        if size >= _MAX_SIZE:
            raise BadMessage("the size of a chunk is out of range")
        if size:
            self._left = size + 2
        else:
            self._in_trailer = True

    def _end_trailer_line(self, line: bytes) -> None:
        if line == b"\r\n":
            self.over = True
            return
        self._trailer_bytes += len(line)
        found = _TRAILER.fullmatch(line)
        if found is None or self._trailer_bytes > MAX_TRAILER_BYTES:
            raise BadMessage("a trailer is malformed or too long")
        if found[1].lower() in _OF_THE_CONNECTION:
            raise BadMessage("a trailer has a field of the connection")


def end_of_blank(data: bytes, start: int) -> int:
    """Return the offset after the empty lines that may follow a body, before a request (RFC 9112, 2.2)."""
    blank = _BLANK.match(data, start)
    return blank.end() if blank is not None else start


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body of a request to an ASGI app.

    Raises:
        BodyTooLong: the body exceeds `max_bytes`; raised early if the Content-Length does.
        Cancelled: the connection ended before the body did.
    """
    # `int` refuses thousands of zeros; the last 20 digits are enough for any length.
    if int(request.headers.get("content-length", "0")[-20:]) > max_bytes:
        raise BodyTooLong(max_bytes)
    # One growing buffer, not a list: a body sent byte by byte needs no more memory than one sent at once.
    buffer = bytearray()
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise Cancelled
        buffer += message.get("body", b"")
        if len(buffer) > max_bytes:
            raise BodyTooLong(max_bytes)
        if not message.get("more_body", False):
            return bytes(buffer)


async def read_parameters(request: Request, max_bytes: int) -> bytes:
    """Read the body of a call that is not a prediction, which holds a few parameters.

    Raises:
        BodyTooLong: as for `read_body`, or it has more than `MAX_PARAMETERS_BYTES`.
        Cancelled: as for `read_body`.
    """
    try:
        return await read_body(request, min(max_bytes, MAX_PARAMETERS_BYTES))
    except BodyTooLong:
        if max_bytes <= MAX_PARAMETERS_BYTES:
            raise
        text = "The parameters of this call have more than {} bytes."
        raise BodyTooLong(MAX_PARAMETERS_BYTES, text) from None
