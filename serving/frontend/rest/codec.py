"""Body and query to parameters, headers to pairs, time-out to deadline. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.rest.multipart import multipart_parameters
from torchere.serving.types import Parameter

MAX_FIELDS = 1000  # of a form or a query string
INLINE_FORM_BYTES = 16_384  # a longer one, if it is all escapes, holds the loop up by milliseconds
MAX_TIMEOUT_MS = 86_400_000  # a day; longer is a mistake in the unit
SPELLED_HEADERS = "torchere.spelled_headers"  # in an ASGI scope: names as the client wrote them


_MULTIPART = "multipart/form-data"
_FORM = "application/x-www-form-urlencoded"
_JSON = "application/json"
_OBJECT = re.compile(rb"[ \t\r\n]*\{")


def body_parameters(content_type: str, body: bytes, *, speaks_json: bool = False) -> tuple[Parameter, ...]:
    """Turn a body into the parameters a handler gets.

    Forms give one parameter a field, all else one called `body` (be it empty) with the type of the request.

    Args:
        content_type: of the request.
        body: the whole of it.
        speaks_json: the path is one of JSON, so a JSON object that says it is a form, as `curl -d` does, is
            taken for what it is. In a form that is one its first byte would be escaped.

    Raises:
        InvalidRequest: a form that is broken or has too many fields.
    """
    mime, lowered = _media_type(content_type)
    if lowered == _MULTIPART:
        return tuple(multipart_parameters(content_type, body))
    if lowered == _FORM:
        if speaks_json and _OBJECT.match(body):
            return (Parameter("body", body, _JSON),)
        return form_parameters(body)
    return (Parameter("body", body, mime),)


def takes_long(content_type: str, length: int) -> bool:
    """Whether `body_parameters` of so many bytes is work for a thread."""
    return length > INLINE_FORM_BYTES and _media_type(content_type)[1] == _FORM


def media_type(content_type: str) -> tuple[str, bool]:
    """The type without its parameters, and whether it is that of a form."""
    mime, lowered = _media_type(content_type)
    return mime, lowered in (_MULTIPART, _FORM)


@lru_cache(maxsize=256)  # the same few come again and again
def _media_type(content_type: str) -> tuple[str, str]:
    """The type without its parameters, as written and in lower case."""
    mime = content_type.partition(";")[0].strip()
    return mime, mime.lower()


def form_parameters(text: bytes) -> tuple[Parameter, ...]:
    """Turn `a=1&b=two+words` into parameters without a content type, in order.

    Raises:
        InvalidRequest: too many fields.
    """
    if text.count(b"&") >= MAX_FIELDS:
        raise InvalidRequest(f"The form has more than {MAX_FIELDS} fields.")
    return tuple(_field(field) for field in text.split(b"&") if field)


def _field(text: bytes) -> Parameter:
    name, _, value = text.partition(b"=")
    return Parameter(_unquoted(name).decode("utf-8", "replace"), _unquoted(value))


def _unquoted(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def text_values(query: bytes) -> dict[str, str]:
    """The query string as text values by name; the first of a name wins."""
    values: dict[str, str] = {}
    for parameter in form_parameters(query):
        values.setdefault(parameter.name, parameter.value.decode("utf-8", "replace"))
    return values


def request_headers(scope: Scope) -> tuple[tuple[str, str], ...]:
    """The client's headers, as an ASGI app sees them; in the client's spelling where `asgi.py` kept it."""
    return text_headers(scope.get(SPELLED_HEADERS) or scope["headers"])


def text_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Header lines as text."""
    return tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])


def deadline(timeout_ms: bytes, now_s: float) -> float:
    """The absolute deadline of a request that names its time-out.

    Args:
        timeout_ms: value of `x-torchere-timeout-ms`.
        now_s: monotonic seconds when the request came in.

    Raises:
        InvalidRequest: not a whole number from 1 to `MAX_TIMEOUT_MS`.
    """
    digits = timeout_ms.strip()
    if len(digits) <= 8 and digits.isdigit() and 1 <= int(digits) <= MAX_TIMEOUT_MS:
        return now_s + int(digits) / 1000
    found = timeout_ms[:100].decode("latin-1")
    raise InvalidRequest(
        f"Header x-torchere-timeout-ms must be a whole number from 1 to {MAX_TIMEOUT_MS}, found: {found!r}"
    )
