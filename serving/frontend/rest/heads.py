"""Parser of request heads, and a cache of parsed heads, because clients repeat them."""

from __future__ import annotations

import re
from contextlib import suppress
from copy import copy
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_plus

import httptools

from torchere.serving.access.identity import Role, authorization_of, bearer_key
from torchere.serving.config.kinds import shown_url
from torchere.serving.errors import Forbidden, InvalidRequest
from torchere.serving.frontend.authorisation import RestPort, Row, is_probe
from torchere.serving.frontend.known_heads import Known
from torchere.serving.frontend.rest.browser_guard import BrowserGuard
from torchere.serving.frontend.rest.codec import FORMS, media_type, text_headers
from torchere.serving.frontend.rest.errors import UNKNOWN_TRANSFER_CODING, BadMessage
from torchere.serving.frontend.rest.page import wants_page
from torchere.serving.frontend.rest.targets import Pairs, Target, prediction_target
from torchere.serving.frontend.rest.wire import RawHeaders, Wire, read_wire
from torchere.serving.logs.trace_context import trace_of_headers

HEAD_END = b"\r\n\r\n"
MAX_REQUEST_LINE_BYTES = 4096  # TorchServe's limits; the parser itself has none
MAX_HEADER_BYTES = 8192
MAX_HEAD_BYTES = 16_384  # of an incomplete head; the parser copies a line whenever more of it arrives
CHUNKED = -1  # value of `Head.length` for a chunked body

# RFC 9110, 7.2: uri-host [":" port]. A name may be empty, and brackets enclose an IPv6 address with its zone.
_HOST = re.compile(
    rb"(?:\[[0-9A-Za-z:.%_~!$&'()*+,;=-]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?"
)
# The parser accepts HTTP/0.9 and HTTP/2.0, too, whose heads and ends of bodies are different.
_VERSIONS = frozenset({"1.0", "1.1"})

# The parameter `url` of a query. An unencoded `?` in it starts a query of its own, whose parameters can't be
# distinguished from those after the URL.
_URL = re.compile(rb"([?&;]url=)([^&;?]*(?:\?.*)?)")

_RARE = frozenset({b"transfer-encoding", b"expect", b"upgrade"})

MAX_KNOWN_HEADS = 1024
MAX_KNOWN_BYTES = 2048  # of a cached head


class HeadReader:
    """Incremental parser of one head. Not thread-safe.

    For the parser (which accepts CRLF only) and for this class a head ends with the first empty line. So the
    parser gets only the head, and `bodies.py` finds the end of the body.
    """

    __slots__ = (
        *("_parser", "headers", "is_complete", "keep_alive"),
        *("method", "text", "url", "version"),
    )

    def __init__(self) -> None:
        self.text = b""  # bytes of the head received so far
        self.headers: RawHeaders = []  # in the client's spelling
        self.url = b""
        self.method = b""
        self.version = ""
        self.keep_alive = False
        self.is_complete = False
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    def feed(self, data: bytes, start: int) -> int:
        """Parse up to the end of the head; return the offset after it, or -1 while it is incomplete.

        Raises:
            BadMessage: the head is malformed or too long.
        """
        parser = self._parser
        if parser is None:
            raise BadMessage("it was given up")
        tail = self.text[-3:]
        end = (tail + data[start:]).find(HEAD_END) - len(tail) if tail else data.find(HEAD_END, start) - start
        if is_whole := end >= -len(tail):
            end += len(HEAD_END)
            piece = data[start : start + end]
        else:
            piece = data[start:]
        self.text += piece
        flaw = _flaw_of(piece, parser)
        if flaw or self.is_complete != is_whole:
            self.drop()
            raise BadMessage(flaw or "it has no end where an empty line is")
        if not is_whole:
            if len(self.text) > MAX_HEAD_BYTES:
                raise BadMessage("it has no end")
            return -1
        self.drop()
        text = self.text
        if len(text) - text.find(b"\r\n") - 2 > MAX_HEADER_BYTES:
            raise BadMessage("its header lines are too long")
        if b" \r\n" in text or b"\t\r\n" in text:
            # RFC 9110, 5.5: a value excludes blanks around it, but the parser strips the leading ones only.
            self.headers = [(name, value.rstrip(b" \t")) for name, value in self.headers]
        return start + end

    def drop(self) -> None:
        """Drop the parser, to break the reference cycle with it."""
        self._parser = None

    def on_url(self, url: bytes) -> None:
        """Append a piece of the request target; the parser calls this."""
        self.url += url
        if len(self.url) > MAX_REQUEST_LINE_BYTES:
            raise BadMessage("its request line is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append one header line; the parser calls this."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Copy the parser's results, which it drops at the end of a message; the parser calls this."""
        parser = self._parser
        if parser is None or self.is_complete:
            raise BadMessage("it holds two heads")
        self.is_complete = True
        self.method = parser.get_method()
        self.version = parser.get_http_version()
        self.keep_alive = parser.should_keep_alive()


def _flaw_of(piece: bytes, parser: httptools.HttpRequestParser) -> str:
    """Feed a piece of a head to the parser; return the reason if it is invalid, otherwise ""."""
    try:
        parser.feed_data(piece)
    except httptools.HttpParserUpgrade as upgrade:
        # A server may ignore an upgrade to another protocol (RFC 9110, 7.8). The parser stops there, also at
        # an end that only it sees: `CONNECT \n\r\n`.
        return "lines follow its end" if upgrade.args[0] < len(piece) else ""
    except httptools.HttpParserError as error:
        return str(error)
    return ""


class Place(NamedTuple):
    """A parsed request line: path, query, row of the table of authorisation and prediction target."""

    raw_path: bytes
    path: str  # decoded, without slashes at its end
    query: bytes
    row: Row
    role: Role | None  # that its client must have; None: any client may send it
    target: Target | None  # None: not a prediction; the app answers it


class Head:
    """A parsed request head. Requests with the same head share it, so treat it as immutable."""

    __slots__ = (
        *("authorization", "content_type", "expects", "group", "headers", "host", "is_form", "is_head"),
        *("is_old", "is_preflight", "is_probe", "is_tensors", "keep_alive", "length", "method", "mime"),
        *("origin", "page_refusal", "place", "priority", "refusal", "request_line", "role", "target"),
        *("text", "texts", "timeout_ms", "trace", "version", "wire"),
    )

    def __init__(self, reader: HeadReader, place: Place) -> None:
        self.text = reader.text
        self.method = reader.method.decode("ascii")
        self.version = reader.version
        target = _URL.sub(_without_query, reader.url) if b"url=" in reader.url else reader.url
        self.request_line = b"%b %b HTTP/%b" % (reader.method, target, reader.version.encode())
        self.place = place
        self.role = place.role
        self.target = place.target
        self.is_head = reader.method == b"HEAD"
        self.is_probe = is_probe(place.path)
        self.is_old = reader.version == "1.0"
        self.host = _host(reader)
        self.refusal: Forbidden | None = None  # set if a browser may have sent it for a foreign site
        self.page_refusal: Forbidden | None = None  # the same, for a client known only by its certificate
        self.keep_alive = reader.keep_alive and reader.method != b"CONNECT"  # tunnel bytes are not requests
        # The first header of a name counts, as in TorchServe.
        lines = {name.lower(): value for name, value in reversed(reader.headers)}
        self.headers = reader.headers  # in the client's spelling
        self.content_type = lines.get(b"content-type", b"").decode("latin-1")
        self.timeout_ms = lines.get(b"x-torchere-timeout-ms", b"")
        self.priority = lines.get(b"x-torchere-priority", b"")
        self.origin = lines.get(b"origin")
        # A browser asks whether it may send a page's request to this origin (Fetch, 4.8).
        self.is_preflight = (
            reader.method == b"OPTIONS"
            and self.origin is not None
            and b"access-control-request-method" in lines
        )
        keys = _values(reader.headers, b"authorization")
        self.authorization = authorization_of([value.decode("latin-1") for value in keys])
        # Content-Length, or `CHUNKED`. The parser accepts digits only; the last 20 are enough for any length.
        self.length = int(lines.get(b"content-length", b"0")[-20:])
        if reader.method == b"CONNECT":
            self.length = 0
        self.expects = False  # the client waits for "100 Continue" before it sends the body
        if not lines.keys().isdisjoint(_RARE):
            self._read_rare(lines)
        self.mime, media = media_type(self.content_type)
        self.is_form = media in FORMS
        self.group = "" if self.target is None else self.target.group
        self.texts: Pairs = ()  # headers for the handler: the client's as text, and those of the target
        self.trace = trace_of_headers(self.headers) if b"traceparent" in lines else None
        self.wire: Wire | None = None  # headers of the v2 protocol; None: malformed, or not a path of it
        self.is_tensors = False  # the path is one of that protocol

    def _read_rare(self, lines: dict[bytes, bytes]) -> None:
        if not self.is_old:  # an HTTP/1.0 client would take "100 Continue" for the response (RFC 9110, 15.2)
            self.expects = lines.get(b"expect", b"").lower() == b"100-continue"
        elif b"transfer-encoding" in lines or b"expect" in lines:
            self.keep_alive = False  # RFC 9112, 6.1: an HTTP/1.0 proxy may find another end of the body
        if b"upgrade" in lines:  # upgrades are ignored: neither handlers nor the app get the header
            self.headers = _without(self.headers, b"upgrade")
        codings = _values(self.headers, b"transfer-encoding")
        if codings and self.method != "CONNECT":
            names = [name.strip(b" \t").lower() for name in b",".join(codings).split(b",")]
            if names[-1] != b"chunked":
                raise BadMessage("its body has no end that can be told")  # RFC 9112, 6.3
            if len(names) > 1:  # RFC 9112, 6.1: the others would have to be decoded for the handler
                raise BadMessage(names[0].decode("latin-1"), UNKNOWN_TRANSFER_CODING)
            self.length = CHUNKED

    def inflated(self) -> Head:
        """Return a copy without Content-Encoding, for a handler that gets the body decompressed."""
        head = copy(self)
        head.texts = tuple([line for line in self.texts if line[0].lower() != "content-encoding"])
        return head


class Heads:
    """Parser of the heads of one listener, with a cache of prediction heads keyed by their bytes.

    Parsing calls back for each line, and each line is inspected several times afterwards. Equal bytes give
    equal heads, so the cache is consulted first; it holds at most `MAX_KNOWN_HEADS`. Used on the event loop
    only.

    Args:
        port: the rows of the listener's port.
        max_body_bytes: the longest body that a prediction may have to run at once.
        guard: checks hosts and origins where no token is asked for.
        speaks_tensors: whether the listener supports the Open Inference Protocol.
        takes_tokens: whether `Authorization` holds a key of this server, which handlers don't get.
    """

    def __init__(
        self,
        port: RestPort,
        max_body_bytes: int,
        guard: BrowserGuard,
        *,
        speaks_tensors: bool,
        takes_tokens: bool = False,
    ) -> None:
        self.known: Known[bytes, Head] = Known(MAX_KNOWN_HEADS)
        self._max_body_bytes = max_body_bytes
        self._port = port
        self._speaks_tensors = speaks_tensors
        self._guard = guard
        self._takes_tokens = takes_tokens
        # Clients use few request lines.
        self._place_of = lru_cache(maxsize=1024)(self._find_place)

    def read(self, reader: HeadReader) -> Head:
        """Return the `Head` of a complete head, and cache it if it is that of a prediction.

        Raises:
            BadMessage: the request line has no path or an unknown version, the host is missing or invalid, or
                the end of the body can't be determined.
        """
        place = self._place_of(reader.method, reader.url)
        if place.path == "/" and self._port.page is not None and wants_page(reader.method, reader.headers):
            place = place._replace(row=self._port.page, role=None)
        head = Head(reader, place)
        needs = place.row.needs
        if not self._port.asks(place.row):
            head.refusal = self._guard.refusal(needs, head.host, head.origin)
        elif not bearer_key(head.authorization):
            head.page_refusal = self._guard.refusal(needs, head.host, head.origin, checks_host=False)
        if self._takes_tokens and head.role is not None:
            # Otherwise a handler could call the server with the client's key.
            head.headers = _without(head.headers, b"authorization")
        target = head.target
        if target is not None:
            head.texts = text_headers(head.headers) + target.headers
            head.is_tensors = self._speaks_tensors and target.verb != ""
            if head.is_tensors:
                with suppress(InvalidRequest):  # raised again when the request is read
                    head.wire = read_wire(head.headers)
            self._remember(head)
        return head

    def is_plain(self, head: Head) -> bool:
        """Tell whether a prediction with this head may run as soon as its body has arrived."""
        is_short = CHUNKED < head.length <= self._max_body_bytes
        return is_short and not head.expects and head.refusal is None

    def _remember(self, head: Head) -> None:
        is_malformed = head.is_tensors and head.wire is None
        if len(head.text) > MAX_KNOWN_BYTES or is_malformed or not self.is_plain(head):
            return
        if head.trace is not None:  # its trace context makes it unique
            return
        self.known.keep(head.text, head)

    def _find_place(self, method: bytes, url: bytes) -> Place:
        try:
            parsed = httptools.parse_url(url)
            raw_path = parsed.path
            path = raw_path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            raise BadMessage("its request line has no path") from None
        if "%" in path:
            path = unquote(path)
        path = path.rstrip("/") or "/"
        is_prediction = "inference" in self._port.surfaces and method != b"OPTIONS"
        target = prediction_target(path) if is_prediction else None
        row = self._port.row(path)
        role = self._port.role(row)
        return Place(raw_path, path, parsed.query or b"", row, role, target)


def _values(headers: RawHeaders, name: bytes) -> list[bytes]:
    return [value for spelled, value in headers if spelled.lower() == name]


def _without(headers: RawHeaders, name: bytes) -> RawHeaders:
    return [line for line in headers if line[0].lower() != name]


def _without_query(found: re.Match[bytes]) -> bytes:
    """Return the parameter `url` for the access log: without its query, which may hold a signature."""
    url = unquote_plus(found[2].decode("latin-1"), "latin-1")
    shown = shown_url(url)
    return found[0] if shown == url else found[1] + quote(shown, ":/", "latin-1").encode()


def _host(reader: HeadReader) -> bytes:
    """Return the value of `Host`; empty if an HTTP/1.0 request has none.

    It must not be missing, repeated or invalid (RFC 9112, 3.2), because a proxy might take the request for
    one to another host.
    """
    if reader.version not in _VERSIONS:
        raise BadMessage(f"its version is HTTP/{reader.version}")
    hosts = _values(reader.headers, b"host")
    if len(hosts) == 1 and _HOST.fullmatch(hosts[0]):
        return hosts[0]
    if hosts or reader.version != "1.0":
        raise BadMessage("it has no host, several, or an invalid one")
    return b""
