"""Parser of `multipart/form-data` bodies to parameters, with limits on parts, headers and their bytes."""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from torchere.serving.errors import InvalidRequest
from torchere.serving.types import Parameter

MAX_PARTS = 1000
MAX_PART_HEADERS = 16
MAX_PART_HEADER_BYTES = 4096
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)')  # matches unclosed quotes too, else it is quadratic
_EXTENDED_NAME = re.compile(rb";[ \t]*name\*=utf-8'[^';]*'([^; \t]*)", re.IGNORECASE)

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else bad bodies could flood the log


def multipart_parameters(content_type: str, body: bytes) -> list[Parameter]:
    """Return one parameter for each part, in order.

    The parameter of a file has the content type of its part, by default `application/octet-stream`. The
    parameter of a plain field has no content type, even if its part names one.

    Raises:
        InvalidRequest: there is no boundary, the framing is malformed, a part has no name, or there are too
            many parts. Lines that merely begin like the boundary count as parts, because they cost the parser
            as much.
    """
    boundary = parse_options_header(content_type.encode("latin-1", "replace"))[1].get(b"boundary")
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
        options = parse_options_header(disposition)[1]
        name = options[b"name"] if b"name" in options else _extended_name(disposition)
        content_type = ""
        if b"filename" in options or b"filename*=" in disposition:  # some clients send only `filename*`
            given = self._headers.get(b"content-type", b"application/octet-stream")
            content_type = given.decode("latin-1").partition(";")[0].strip()
        self.parameters.append(Parameter(name.decode("utf-8", "replace"), b"".join(self._data), content_type))

    def _end(self) -> None:
        self.complete = True


def _extended_name(disposition: bytes) -> bytes:
    """Return the name of a part from `name*` (RFC 8187).

    Forms must not use `name*`, but aiohttp writes it for names that are not ASCII.

    Raises:
        InvalidRequest: there is no `name*` in UTF-8.
    """
    found = _EXTENDED_NAME.search(_QUOTED.sub(b"", disposition))
    if found is None:
        raise InvalidRequest(
            'A part of the multipart body has no name in its Content-Disposition; expected name="NAME" '
            "(or name*=utf-8''NAME)."
        )
    return unquote_to_bytes(found[1])
