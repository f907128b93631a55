"""Decoders for predictions: forms, body and query to parameters, headers to pairs, deadlines. Pure."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote_to_bytes

import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Scope

from torchere.serving.errors import InvalidRequest
from torchere.serving.types import Parameter

MAX_PARTS = 1000
MAX_PART_HEADERS = 16
MAX_PART_HEADER_BYTES = 4096
# The parser of options takes a microsecond for each semicolon, in quotes or not. Names of files have few.
MAX_SEMICOLONS = 64
_PLAIN_ENCODINGS = (b"binary", b"7bit", b"8bit")  # in which the bytes of a part are those of its value
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)')  # matches unclosed quotes too, else it is quadratic
_EXTENDED_NAME = re.compile(rb";[ \t]*name\*=utf-8'[^';]*'([^; \t]*)", re.IGNORECASE)

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else bad bodies could flood the log


def multipart_parameters(content_type: str, body: bytes) -> list[Parameter]:
    """Return one parameter for each part, in order.

    The parameter of a file has the content type of its part, by default `application/octet-stream`. The
    parameter of a plain field has no content type, even if its part names one. Blanks around names are
    dropped.

    Raises:
        InvalidRequest: there is no boundary, the framing is malformed, a part has no name, a file is encoded,
            or there are too many parts. Lines that merely begin like the boundary count as parts, because
            they cost the parser as much.
    """
    boundary = _options(content_type.encode("latin-1", "replace")).get(b"boundary")
    if not boundary:
        raise InvalidRequest("multipart/form-data needs a boundary in its content type.")
    line = b"--" + boundary
    if body.startswith(line) + body.count(b"\r\n" + line) > MAX_PARTS + 1:  # + 1: the closing boundary
        raise InvalidRequest(f"The multipart body has more than {MAX_PARTS} parts.")
    collector = _Collector()
    try:
        parser = MultipartParser(
            boundary,
            collector.callbacks(),  # type: ignore[arg-type]
            max_header_count=MAX_PART_HEADERS,
            max_header_size=MAX_PART_HEADER_BYTES,
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as err:
        expected = "expected parts between the boundaries that the content type names"
        raise InvalidRequest(f"The multipart body is broken: {err}; {expected}") from err
    if not collector.complete:
        raise InvalidRequest("The multipart body ends before its closing boundary.")
    return collector.parameters


class _Collector:
    """Collector of the parser's callbacks for one body. Not thread-safe."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self.complete = False
        self._headers: dict[bytes, bytes] = {}
        self._field = b""
        self._value = b""
        self._data: list[bytes] = []

    def callbacks(self) -> dict[str, object]:
        """Return the callbacks for the parser, by their names."""
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_header_field": self._add_field,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._headers, self._data = {}, []

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _end_part(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        options = _options(disposition)
        name = options[b"name"] if b"name" in options else _extended_name(disposition)
        content_type = ""
        if b"filename" in options or b"filename*=" in disposition:  # some clients send only `filename*`
            given = self._headers.get(b"content-type", b"application/octet-stream")
            content_type = given.decode("latin-1").partition(";")[0].strip()
            self._check_transfer_encoding()
        text = name.strip().decode("utf-8", "replace")
        self.parameters.append(Parameter(text, b"".join(self._data), content_type))

    def _check_transfer_encoding(self) -> None:
        """Refuse a file whose bytes are encoded, as in base64: handlers would take the text for the file."""
        encoding = self._headers.get(b"content-transfer-encoding", b"binary")
        if encoding.strip().lower() not in _PLAIN_ENCODINGS:
            found = encoding[:100].decode("latin-1")
            raise InvalidRequest(
                f"A file of the multipart body has the Content-Transfer-Encoding {found!r}; expected binary, "
                "7bit, 8bit, or none"
            )

    def _end(self) -> None:
        self.complete = True


def _options(header: bytes) -> dict[bytes, bytes]:
    """Return the parameters of a header; raise `InvalidRequest` if there are too many."""
    if header.count(b";") > MAX_SEMICOLONS:
        raise InvalidRequest(
            f"A header of the multipart body has more than {MAX_SEMICOLONS} semicolons; expected a name, "
            "and a filename of a file."
        )
    return parse_options_header(header)[1]


def _extended_name(disposition: bytes) -> bytes:
    """Return the name of a part from `name*` (RFC 8187); raise `InvalidRequest` without one in UTF-8.

    Forms must not use `name*`, but aiohttp writes it for names that are not ASCII.
    """
    found = _EXTENDED_NAME.search(_QUOTED.sub(b"", disposition))
    if found is None:
        raise InvalidRequest(
            'A part of the multipart body has no name in its Content-Disposition; expected name="NAME" '
            "(or name*=utf-8''NAME)."
        )
    return unquote_to_bytes(found[1])


MAX_FIELDS = 1000  # of a form or a query string
# Longer forms are decoded in a thread: fields of escapes, and parts with many headers, take longest.
INLINE_FORM_BYTES = 16_384
INLINE_MULTIPART_BYTES = 65_536
INLINE_MULTIPART_MARKS = 1024  # line ends and semicolons: the parser takes 2 to 4 us for each in a head
SHORT_TEXT_BYTES = 512  # up to it, `unquote_to_bytes` is faster than numpy
MAX_TIMEOUT_MS = 86_400_000  # one day; a longer timeout is taken for a mistake in the unit
SPELLED_HEADERS = "torchere.spelled_headers"  # key in an ASGI scope: headers in the client's spelling
REQUEST_ID = "torchere.request_id"  # key in an ASGI scope: the id that the answer names


_MULTIPART = "multipart/form-data"
_FORM = "application/x-www-form-urlencoded"
_JSON = "application/json"
FORMS = frozenset({_MULTIPART, _FORM})
_OBJECT = re.compile(rb"[ \t\r\n]*\{")


def body_parameters(
    content_type: str, body: bytes | memoryview, *, speaks_json: bool = False
) -> tuple[Parameter, ...]:
    """Convert a body to the parameters of a handler.

    A form becomes one parameter for each field, without blanks around its name. Any other body, even an empty
    one, becomes one parameter called `body` with the content type of the request. With `speaks_json` the path
    takes JSON, so a JSON object is not parsed as a form even if the content type says so, as with `curl -d`.
    In a real form the first byte, `{`, would be escaped.

    Raises:
        InvalidRequest: the form is malformed or has too many fields.
    """
    mime, lowered = media_type(content_type)
    body = bytes(body)
    if lowered == _MULTIPART:
        return tuple(multipart_parameters(content_type, body))
    if lowered == _FORM:
        if speaks_json and _OBJECT.match(body):
            return (Parameter("body", body, _JSON),)
        return form_parameters(body, strips_names=True)
    return (Parameter("body", body, mime),)


def takes_long(content_type: str, body: bytes | memoryview) -> bool:
    """Tell whether `body_parameters` takes so long for the body that it should run in a thread."""
    mime = media_type(content_type)[1]
    if mime == _FORM:
        return len(body) > INLINE_FORM_BYTES
    if mime != _MULTIPART or len(body) <= INLINE_MULTIPART_MARKS:
        return False
    if len(body) > INLINE_MULTIPART_BYTES:
        return True
    text = bytes(body)
    return text.count(b"\n") + text.count(b";") > INLINE_MULTIPART_MARKS


@lru_cache(maxsize=256)  # clients use few content types
def media_type(content_type: str) -> tuple[str, str]:
    """Return the media type without its parameters, as written and in lower case."""
    mime = content_type.partition(";")[0].strip()
    return mime, mime.lower()


def form_parameters(text: bytes, *, strips_names: bool = False) -> tuple[Parameter, ...]:
    """Parse `a=1&b=two+words` into parameters without a content type; raise `InvalidRequest` for too many.

    `strips_names` drops blanks around the names, as TorchServe does in forms, but not in queries.
    """
    if text.count(b"&") >= MAX_FIELDS:
        raise InvalidRequest(f"The form has more than {MAX_FIELDS} fields.")
    return tuple(_field(field, strips_names) for field in text.split(b"&") if field)


def _field(text: bytes, strips_name: bool) -> Parameter:
    quoted, _, value = text.partition(b"=")
    name = _unquoted(quoted)
    if strips_name:
        name = name.strip()
    return Parameter(name.decode("utf-8", "replace"), _unquoted(value))


def _unquoted(text: bytes) -> bytes:
    text = text.replace(b"+", b" ")
    return unquote_to_bytes(text) if len(text) <= SHORT_TEXT_BYTES else _unquoted_long(text)


_HEX = np.full(256, 16, np.uint8)  # the value of each hexadecimal digit; 16: not a digit
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX[list(_digits)] = range(16)


def _unquoted_long(text: bytes) -> bytes:
    """As `unquote_to_bytes`, which takes 0.4 us and 90 bytes for each `%`.

    Escapes do not overlap, so all of them are found and replaced at once.
    """
    codes = np.frombuffer(text, np.uint8)
    digits = _HEX[codes]
    high, low = digits[1:-1], digits[2:]
    is_escape = (codes[:-2] == ord("%")) & (high < 16) & (low < 16)
    values, kept = codes.copy(), np.ones(len(codes), bool)
    values[:-2][is_escape] = high[is_escape] << 4 | low[is_escape]
    kept[1:-1][is_escape] = kept[2:][is_escape] = False
    unquoted: bytes = values[kept].tobytes()
    return unquoted


def text_values(query: bytes) -> dict[str, str]:
    """Return the values of a query string by name; the first value of a name wins."""
    return {one.name: one.value.decode("utf-8", "replace") for one in reversed(form_parameters(query))}


def request_headers(scope: Scope) -> tuple[tuple[str, str], ...]:
    """Return the client's headers from an ASGI scope, in the client's spelling."""
    return text_headers(scope[SPELLED_HEADERS])


def text_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Decode header lines to text."""
    return tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])


def deadline(timeout_ms: bytes, now_s: float) -> float:
    """Return the deadline of a request that arrived at `now_s`; both are in monotonic seconds.

    Raises:
        InvalidRequest: the header `x-torchere-timeout-ms` is not an integer from 1 to `MAX_TIMEOUT_MS`.
    """
    digits = timeout_ms.strip()
    if len(digits) <= 8 and digits.isdigit() and 1 <= int(digits) <= MAX_TIMEOUT_MS:
        return now_s + int(digits) / 1000
    found = timeout_ms[:100].decode("latin-1")
    raise InvalidRequest(
        f"Header x-torchere-timeout-ms must be a whole number from 1 to {MAX_TIMEOUT_MS}, found: {found!r}"
    )
