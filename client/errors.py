"""What can go wrong between a client and a server.

`ClientError` is the base of all. `AnswerError` and its kinds hold what the server answered; the others say
that there was no answer that could be read.
"""

from __future__ import annotations


class ClientError(Exception):
    """Base of everything this package raises for what happens on the way; `message` is for people."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConnectionFailed(ClientError):
    """There is no whole answer: nobody listens, or the connection broke.

    `refused` is true when no connection was made, so the request can't have reached anyone.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class UnreadableAnswer(ClientError):
    """The answer is not what the protocol says; the address may be another server's."""


class DeadlineExceeded(ClientError):
    """The time of the call was over before there was an answer."""


class AnswerError(ClientError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
        kind: the server's name of the error (`ModelNotFoundException`), "" when it gave none.
        message: the server's text.
        detail: the cause, which the management API adds; "" elsewhere.
        request_id: the server's id of the call, to be found in its logs; "" when it gave none.
        retry_after_s: seconds after which to come back, from the header `Retry-After`; None without one.
    """

    def __init__(
        self,
        message: str,
        status: int,
        *,
        kind: str = "",
        detail: str = "",
        request_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        named = f"{self.status} {self.kind}".rstrip()
        detail = f" ({self.detail})" if self.detail else ""
        request = f" [request {self.request_id}]" if self.request_id else ""
        return f"{named}: {self.message}{detail}{request}"


class InvalidRequest(AnswerError):
    """4xx: the request is wrong, and sending it again unchanged can't help."""


class Unauthorized(InvalidRequest):
    """The token is missing, wrong or expired."""


class NotFound(InvalidRequest):
    """404: no such model, version, archive or path."""


class Conflict(InvalidRequest):
    """409: that version of the model is registered already."""


class Unavailable(AnswerError):
    """429 or 503 of the server itself: it can't take the request now; the same one may succeed later."""


class ModelFailed(AnswerError):
    """The model's handler failed or answered 429 or 503, its executor died, or memory ran out."""


class TooLate(AnswerError, DeadlineExceeded):
    """504: the server gave the request up because its time was over."""
