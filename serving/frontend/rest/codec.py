"""HTTP to an `InferRequest`: body and query to parameters, headers to pairs, time-out to deadline. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.priority import parse_priority
from torchere.serving.frontend.rest.multipart import multipart_parameters
from torchere.serving.types import NO_DEADLINE, InferRequest, Parameter

MAX_FIELDS = 1000  # of a form or a query string
INLINE_FORM_BYTES = 16_384  # a longer one, if it is all escapes, holds the loop up by milliseconds
MAX_TIMEOUT_MS = 86_400_000  # a day; longer is a mistake in the unit
SPELLED_HEADERS = "torchere.spelled_headers"  # where our HTTP protocol puts names as the client wrote them


class Head(NamedTuple):
    """The headers of a prediction that the server itself minds."""

    content_type: str = ""
    length: int = 0  # of the body, as announced
    timeout_ms: bytes = b""
    authorization: str | None = None
    plain: bool = True  # the body comes as it is, at once, and nothing is asked for but an answer
    priority: bytes = b""


_FORM = "application/x-www-form-urlencoded"
_JSON = "application/json"
_OBJECT = re.compile(rb"[ \t\r\n]*\{")
_FANCY = frozenset({b"transfer-encoding", b"expect", b"upgrade"})


def read_head(headers: Sequence[tuple[bytes, bytes]]) -> Head:
    """Pick them out, whatever the spelling of their names; the first of each counts, as in TorchServe."""
    content_type, length, timeout_ms, authorization, plain = "", 0, b"", None, True
    priority = b""
    for spelled, value in reversed(headers):
        name = spelled.lower()
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"content-length":
            length = int(value)  # the HTTP parser let digits only through
        elif name == b"x-torchere-timeout-ms":
            timeout_ms = value
        elif name == b"x-torchere-priority":
            priority = value
        elif name == b"authorization":
            authorization = value.decode("latin-1")
        elif name in _FANCY:
            plain = False
    return Head(content_type, length, timeout_ms, authorization, plain, priority)


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
    if lowered == "multipart/form-data":
        return tuple(multipart_parameters(content_type, body))
    if lowered == _FORM:
        if speaks_json and _OBJECT.match(body):
            return (Parameter("body", body, _JSON),)
        return form_parameters(body)
    return (Parameter("body", body, mime),)


def takes_long(content_type: str, length: int) -> bool:
    """Whether `body_parameters` of so many bytes is work for a thread."""
    return length > INLINE_FORM_BYTES and _media_type(content_type)[1] == _FORM


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
    """The client's headers; in its own spelling where our HTTP protocol kept it, else in lower case."""
    return text_headers(scope.get(SPELLED_HEADERS) or scope["headers"])


def text_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Header lines as text."""
    return tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])


def infer_request(
    request_id: str,
    head: Head,
    parameters: tuple[Parameter, ...],
    headers: tuple[tuple[str, str], ...],
    started_s: float,
) -> InferRequest:
    """A prediction that came in at `started_s` (monotonic seconds), as the data plane takes it.

    Raises:
        InvalidRequest: its head names a time-out or a priority that is none.
    """
    deadline_s = deadline_of(head, started_s)
    priority = parse_priority(head.priority) if head.priority else 0
    return InferRequest(request_id, parameters, headers, deadline_s, priority)


def deadline_of(head: Head, started_s: float) -> float:
    """The absolute deadline of a request that came in then, or `NO_DEADLINE`; raises as `deadline`."""
    return deadline(head.timeout_ms, started_s) if head.timeout_ms else NO_DEADLINE


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
