"""One request after the other from the bytes of a connection.

A client may send requests without waiting for answers. What stands behind a request waits here as bytes until
that one is answered, and what is more than a little in the socket: parsed, each request would hold kilobytes,
and a mistake in one of them would be answered in the midst of the answer before.
"""

from __future__ import annotations

import logging
import re
import weakref
from abc import abstractmethod
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchere.serving.frontend.rest.call import CYCLE
from torchere.serving.frontend.rest.codec import SPELLED_HEADERS
from torchere.serving.frontend.rest.known_heads import HEAD_END

MAX_REQUEST_LINE_BYTES = 4096  # TorchServe's limits; the parser itself has none
MAX_HEADER_BYTES = 8192
# Of what has no end yet: a head, a trailer, or what else stands around the chunks of a body. The parser keeps
# a line until it ends, and copies it whenever more of it comes.
MAX_ENDLESS_BYTES = 16_384
# Of a body in chunks only the parser knows the end. It stands behind a `HEAD_END`, as others in the body may:
# after so many pieces at one time they get longer, and what was sent ahead is lost if the end is within one.
EXACT_PIECES = 64
COARSE_BYTES = 4096
AHEAD_BYTES = 65_536  # may wait here; who does not read on does not hear that the client has gone either
_BLANK = re.compile(rb"[\r\n]*")
_OF_THE_CONNECTION = frozenset({b"connection", b"proxy-connection"})  # the parser heeds them anywhere

logger = logging.getLogger(__name__)


class HeadTooLarge(Exception):
    """Raised inside the parser's callbacks; the parser turns it into its own error."""


class SentTooEarly(Exception):
    """Likewise: a request begins within the piece that ends one whose answer is to come, or was the last."""


class Misplaced(Exception):
    """Likewise: a trailer has the say about the connection. The parser would read nothing behind it."""


class Flow(FlowControl):
    """uvicorn's, whose calls resume reading when they like; not while bytes wait that were read already."""

    holding = False

    def hold(self) -> None:
        """Read nothing until `release`."""
        self.holding = True
        self.pause_reading()

    def release(self) -> None:
        """Read on."""
        self.holding = False
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read on, if nothing is held."""
        if self.read_paused and not self.holding:
            self.read_paused = False
            self._transport.resume_reading()


class RequestReader(HttpToolsProtocol):
    """The reading half of one connection. Used by the event loop only.

    The parser gets a request in pieces that end where the request does, at the latest. Pieces decide only how
    much is parsed at a time: what is a request is the parser's to say.

    ASGI gives header names in lower case; TorchServe's handlers see them in the client's spelling and look
    them up by it, so a second list of them is kept in the scope.
    """

    flow: Flow
    spelled_headers: list[tuple[bytes, bytes]]  # of the present request
    _head_bytes: int
    _body_bytes: int = 0  # that were parsed
    _endless_bytes: int = 0  # that were parsed since a head ended or something of a body came
    _in_head: bool = True
    _head_begun: bool = False  # bytes of a head have come, and more are to come
    _between: bool = True  # the parser has had whole requests only
    _first: bytes = b""  # what begins with the present head, until that is read
    _ahead: tuple[bytes, int] | None = None  # what waits for the present answer: it stands from there on

    @abstractmethod
    def refuse(self) -> None:
        """What came is no HTTP."""

    def read(self, data: bytes, start: int = 0) -> None:
        """Parse what is there of one request. What follows waits until it is answered."""
        if self._ahead is not None:
            before, at = self._ahead
            self._keep_back(before[at:] + data, 0)
            return
        if self._between:
            if data[start] in b"\r\n":
                start = _end_of_blank(data, start)
                if start == len(data):
                    return
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                self._keep_back(data, start)
                return
            self._first = b"" if start else data
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        start = self._parse_one(data, start)
        if start < len(data):
            self._read_later(data, start)
        elif self._is_for_nobody() and not self.transport.is_closing():
            # uvloop reads up to 32 times before others have their turn, and no answer asks for less of this
            self.flow.hold()
            self.loop.call_soon(self._read_on)

    def _parse_one(self, data: bytes, start: int) -> int:
        """Parse up to the end of a request; returns where what the parser has not had begins."""
        pieces = 0
        while start < len(data):
            before = self._in_head, self._body_bytes
            size = self._parse(data[start : self._end_of_piece(data, start, pieces)])
            start += size
            pieces += 1
            self._bound(size, self._between or (self._in_head, self._body_bytes) != before)
            if self._between or self.transport.is_closing():
                break
        return start

    def _is_for_nobody(self) -> bool:
        """Whether more of a body comes that is answered."""
        return not (self._between or self._in_head or self.is_unanswered())

    def _read_on(self) -> None:
        if self._ahead is None and not self.transport.is_closing():
            self.flow.release()

    def _bound(self, size: int, came_on: bool) -> None:
        self._endless_bytes = 0 if came_on else self._endless_bytes + size
        if self._endless_bytes > MAX_ENDLESS_BYTES:
            self.refuse()

    def _read_later(self, data: bytes, start: int) -> None:
        start = _end_of_blank(data, start)
        if start < len(data) and not self.transport.is_closing():
            self._keep_back(data, start)
            if not self.is_unanswered():
                self.go_on()

    def _keep_back(self, data: bytes, start: int) -> None:
        self._ahead = (data, start)
        if len(data) - start > AHEAD_BYTES:
            self.flow.hold()

    def go_on(self) -> None:
        """An answer is out: the next request that was sent ahead is read soon."""
        self.loop.call_soon(self._read_ahead)

    def _read_ahead(self) -> None:
        if self._ahead is None or self.transport.is_closing():
            return
        (data, start), self._ahead = self._ahead, None
        self.flow.release()
        self.read(data, start)

    def on_response_complete(self) -> None:
        """An answer of uvicorn's is out."""
        super().on_response_complete()
        if self._ahead is not None:
            self.go_on()

    def is_unanswered(self) -> bool:
        """Whether a request has come whose answer is not out."""
        return self.cycle is not None and not self.cycle.response_complete

    def _end_of_piece(self, data: bytes, start: int, pieces: int) -> int:
        """Where a piece ends that goes no further than the present request."""
        if not self._between:
            left = None if self._in_head else self._body_left()
            if left is not None:
                return start + left
            if start < len(HEAD_END) and data[start] in b"\r\n":
                return start + 1  # it may be the rest of a `HEAD_END`
        coarse = 0 if pieces < EXACT_PIECES else COARSE_BYTES
        end = data.find(HEAD_END, start + coarse) + len(HEAD_END)
        rest = len(data) - end
        if end < len(HEAD_END) or (rest and data.find(b"ength: %d\r\n" % rest, start, end) > 0):
            return len(data)  # mostly it is one whole request, and two pieces cost more than one
        return end

    def _body_left(self) -> int | None:
        """What is to come of the present body; None when it comes in chunks."""
        for name, value in self.spelled_headers:
            if len(name) == 14 and name.lower() == b"content-length":
                return int(value[-20:]) - self._body_bytes  # no more digits than these count
        return None

    def _parse(self, piece: bytes) -> int:
        """Returns how much of the piece the parser has had."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if self._in_head:
                self._stay_with_http()
                return int(upgrade.args[0])
            self.cycle.keep_alive = False  # CONNECT, whose bytes are no requests
        except httptools.HttpParserError as error:
            logger.debug("%s sent what is no HTTP: %s", self.client, error)  # anybody can, all the time
            if self._between and self.is_unanswered():  # `SentTooEarly`
                self.cycle.keep_alive = False
            else:
                self.refuse()
        return len(piece)

    def renew_parser(self) -> None:
        """Have the next bytes parsed as those of a new connection."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _stay_with_http(self) -> None:
        """Go on with a request that would rather be one of another protocol (RFC 9110, 7.8).

        The parser holds that its body is of that protocol, so another one reads its head without the wish.
        """
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self._version())]
        lines += [b"%b: %b" % line for line in self.spelled_headers if line[0].lower() != b"upgrade"]
        self.renew_parser()
        self._parse(b"\r\n".join(lines) + HEAD_END)

    def _version(self) -> bytes:
        version: str = self.parser.get_http_version()
        return version.encode("ascii")

    def tell_uvicorn(self) -> None:
        """Have the ASGI app answer the present request."""
        url = self.url
        super().on_message_begin()
        scope: Any = self.scope
        scope[SPELLED_HEADERS] = self.spelled_headers
        super().on_url(url)
        for name, value in self.spelled_headers:
            super().on_header(name, value)
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client takes that for its answer (RFC 9110, 15.2)
        super().on_headers_complete()
        scope[CYCLE] = weakref.ref(self.cycle)  # which holds the scope

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._between and (self.is_unanswered() or self.transport.is_closing()):
            raise SentTooEarly
        self._in_head = self._head_begun = True
        self._between = False
        self._head_bytes = self._body_bytes = 0
        self.spelled_headers = []
        self.url = b""

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self.url += url
        if len(self.url) > MAX_REQUEST_LINE_BYTES:
            raise HeadTooLarge

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header line, of the head or of a chunked body's trailer."""
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEADER_BYTES:
            raise HeadTooLarge
        if self._in_head:  # a trailer may not pass for what a gateway wrote (RFC 9110, 6.5.1)
            # RFC 9110, 5.5: blanks are no part of it; the parser drops the leading ones only
            self.spelled_headers.append((name, value.rstrip(b" \t")))
        elif name.lower() in _OF_THE_CONNECTION:
            raise Misplaced


def _end_of_blank(data: bytes, start: int) -> int:
    """Where the line ends that a client may send before a request are over (RFC 9112, 2.2)."""
    blank = _BLANK.match(data, start)
    return blank.end() if blank is not None else start
