"""HTTP to an `InferRequest`: body and query to parameters, headers to pairs, time-out to deadline. Pure."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.rest.multipart import multipart_parameters
from torchere.serving.types import Parameter

MAX_FIELDS = 1000  # of a form or a query string
MAX_TIMEOUT_MS = 86_400_000  # a day; longer is a mistake in the unit
SPELLED_HEADERS = "torchere.spelled_headers"  # where our HTTP protocol puts names as the client wrote them


def body_parameters(content_type: str, body: bytes) -> tuple[Parameter, ...]:
    """Turn a body into the parameters a handler gets.

    Forms give one parameter a field, all else one called `body` (be it empty) with the type of the request.

    Raises:
        InvalidRequest: a form that is broken or has too many fields.
    """
    mime = content_type.partition(";")[0].strip()
    lowered = mime.lower()
    if lowered == "multipart/form-data":
        return tuple(multipart_parameters(content_type, body))
    if lowered == "application/x-www-form-urlencoded":
        return form_parameters(body)
    return (Parameter("body", body, mime),)


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
    spelled: list[tuple[bytes, bytes]] = scope.get(SPELLED_HEADERS) or scope["headers"]
    return tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in spelled])


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
