"""Requests, responses, operations, and the exceptions for error responses: no I/O, shared by both clients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from torchere.client import errors as e
from torchere.client.errors import UnreadableAnswer

Api = Literal["inference", "management"]
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

JSON = "application/json"
REQUEST_ID = "x-request-id"
# The errors of reading JSON with an unexpected structure; OverflowError comes from int(Infinity).
OTHER_FORM = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.1
_HEADER_VALUE = re.compile(r"([^\0\s]([^\0\n\r\f\v]*[^\0\s])?)?", re.ASCII)  # as in h11


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. `path` is quoted and starts with "/"; header names are unique regardless of case."""

    method: str
    path: str
    api: Api = "inference"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete HTTP response; header names are in lower case."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200

    @property
    def request_id(self) -> str:
        """The request id in the server's logs; "" without one."""
        return self.headers.get(REQUEST_ID, "")

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            UnreadableAnswer: the body is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as err:
            raise UnreadableAnswer(f"expected JSON, found {self.body[:200]!r}: {err}") from err

    def json_object(self) -> dict[str, Any]:
        """Parse the body as a JSON object.

        Raises:
            UnreadableAnswer: the body is not a JSON object.
        """
        value = self.json()
        if not isinstance(value, dict):
            raise UnreadableAnswer(f"expected a JSON object, found {self.body[:200]!r}")
        return value


@dataclass(frozen=True, slots=True)
class Operation(Generic[Result_co]):
    """A request, and the function that reads the response to it.

    `read` gets responses with a 2xx status or a status in `accepted`; every other response is raised as an
    error.
    """

    request: Request
    read: Callable[[Answer], Result_co]
    accepted: frozenset[int] = frozenset()

    def takes(self, status: int) -> bool:
        """Return whether `read` accepts responses of this status."""
        return 200 <= status < 300 or status in self.accepted


def reading(read: Callable[[Any], Result]) -> Callable[[Answer], Result]:
    """Wrap `read` to take a JSON response; a response of unexpected structure raises UnreadableAnswer."""

    def read_json(answer: Answer) -> Result:
        value = answer.json()
        try:
            return read(value)
        except OTHER_FORM as err:
            raise UnreadableAnswer(f"the answer is of another form: {answer.body[:200]!r}: {err!r}") from err

    return read_json


def path(*segments: str | None) -> str:
    """Join segments to a URL path; quote each segment and leave out None and empty ones."""
    return "/" + "/".join(quote(segment, safe="") for segment in segments if segment)


def merged(*several: Mapping[str, str]) -> dict[str, str]:
    """Merge headers into one dict, without regard to case; the last value and its spelling win."""
    found = {name.lower(): (name, value) for headers in several for name, value in headers.items()}
    return dict(found.values())


def bearer(token: str) -> str:
    """Return the value of the header `authorization`.

    Raises:
        ValueError: the token is not valid in a header, often because of a trailing line break; the message
            does not contain the token.
    """
    if not token or " " in token or not (token.isascii() and token.isprintable()):
        raise ValueError(
            "the token holds a line break, a blank or a character that is not ASCII, or is empty; "
            "expected one word"
        )
    return f"Bearer {token}"


def check_headers(headers: Mapping[str, str]) -> None:
    """Check that HTTP can carry the headers; names and values that are not strings are left to httpx.

    Raises:
        ValueError: it can't carry a header. The message does not contain the value, which may be a secret.
    """
    for name, value in headers.items():
        if isinstance(name, str) and not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"the header {name!r}: expected a name of ASCII letters, digits and hyphens")
        if isinstance(value, str) and not (value.isascii() and _HEADER_VALUE.fullmatch(value)):
            raise ValueError(
                f"the header {name!r}: the value holds a line break, a character that is not ASCII, or a "
                "blank at an end; expected one line of ASCII"
            )


def json_body(value: object) -> bytes:
    """Serialise `value` as compact JSON in UTF-8; arrays and tensors become lists.

    Raises:
        TypeError, ValueError: `value` is not serialisable as JSON.
    """
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=_as_list).encode()


def _as_list(value: object) -> object:
    as_list = getattr(value, "tolist", None)  # NumPy, torch and pandas have it; this needs no import of them
    if as_list is None:
        raise TypeError(
            f"a {type(value).__name__} has no form in JSON; expected numbers, texts, lists, dicts"
        )
    return as_list()


_MOST_TEXT = 500  # characters shown of a body that is not JSON
REFUSALS = ("ServiceUnavailableException", "TooManyRequestsException")  # `kind` of a server's own refusals
_BY_STATUS: dict[int, type[e.AnswerError]] = {
    401: e.Unauthorized,
    403: e.InvalidRequest,
    404: e.NotFound,
    409: e.Conflict,
    429: e.Unavailable,
    503: e.Unavailable,
    504: e.TooLate,
}


def refusal(answer: Answer) -> e.AnswerError:
    """Return the exception for an error response."""
    try:
        body = answer.json_object()
    except UnreadableAnswer:
        body = {}
    kind = str(body.get("type", ""))
    # The server's own refusals have one of two names; any other error with a request id is the handler's.
    by_handler = kind not in REFUSALS and REQUEST_ID in answer.headers
    # TorchServe's API says "message", the Open Inference Protocol "error".
    message = body.get("message") or body.get("error") or _text(answer)
    return _class(answer.status, kind, by_handler)(
        str(message),
        answer.status,
        kind=kind,
        detail=str(body.get("detail", "")),
        request_id=answer.request_id,
        retry_after_s=_retry_after_s(answer.headers),
    )


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`; None without one, or for a date: it needs synchronised clocks."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _class(status: int, kind: str, by_handler: bool) -> type[e.AnswerError]:
    # TorchServe's status is ambiguous for a bad token (400) and a failed handler (503); the name is not.
    if kind == "InvalidKeyException":
        return e.Unauthorized
    ran = by_handler or kind == "InternalServerException"
    found = _BY_STATUS.get(status, e.InvalidRequest if status < 500 else e.ModelFailed)
    return e.ModelFailed if ran and found is e.Unavailable else found


def _text(answer: Answer) -> str:
    text = answer.body[:_MOST_TEXT].decode("utf-8", "replace").strip()
    if text:
        return text
    return "The request is too large." if answer.status == 413 else "The server gave no reason."
