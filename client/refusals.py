"""The conversion of error responses to exceptions, without I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchere.client import errors as e
from torchere.client.exchange import REQUEST_ID, Answer

_MOST_TEXT = 500  # characters of a body that is no JSON
_BY_STATUS: dict[int, type[e.AnswerError]] = {
    401: e.Unauthorized,
    403: e.InvalidRequest,
    404: e.NotFound,
    409: e.Conflict,
    429: e.Unavailable,
    503: e.Unavailable,
    504: e.TooLate,
}


def refusal(answer: Answer, path: str = "") -> e.AnswerError:
    """Return the exception for an error response; `path` is that of the request."""
    body = _object(answer.body)
    kind = str(body.get("type", ""))
    # The server puts a name into its own errors; an error without a name was set by the handler.
    named = bool(kind) or ("error" in body and path.startswith("/v2/"))
    by_handler = not named and REQUEST_ID in answer.headers
    # TorchServe's API says "message", the Open Inference Protocol "error".
    message = body.get("message") or body.get("error") or _text(answer)
    return _class(answer.status, kind, by_handler)(
        str(message),
        answer.status,
        kind=kind,
        detail=str(body.get("detail", "")),
        request_id=answer.headers.get(REQUEST_ID, ""),
        retry_after_s=retry_after_s(answer.headers),
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`; None without one, or for a date: it needs synchronised clocks."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _class(status: int, kind: str, by_handler: bool) -> type[e.AnswerError]:
    # TorchServe's status is ambiguous for these two, its name is not: a bad token is 400, a failed handler
    # 503.
    if kind == "InvalidKeyException":
        return e.Unauthorized
    ran = by_handler or (kind == "InternalServerException" and status == 503)
    if ran and _BY_STATUS.get(status) is e.Unavailable:
        return e.ModelFailed
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return e.InvalidRequest if status < 500 else e.ModelFailed


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(answer: Answer) -> str:
    text = answer.body[:_MOST_TEXT].decode("utf-8", "replace").strip()
    if text:
        return text
    return "The request is too large." if answer.status == 413 else "The server gave no reason."
