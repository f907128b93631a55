"""The exceptions of the client.

`ClientError` is the base class. `AnswerError` and its subclasses hold the server's error response; the other
exceptions mean that there was no readable response.
"""

from __future__ import annotations


class ClientError(Exception):
    """Base class of the errors of a call; `message` is a human-readable description."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConnectionFailed(ClientError):
    """The connection failed: it was not established, or it broke before the response was complete.

    `refused` is true when no connection was established, so the request can't have reached a server.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class UnreadableAnswer(ClientError):
    """The response violates the protocol; the address may belong to a different server."""


class DeadlineExceeded(ClientError):
    """The call's deadline passed before the response was complete."""


class AnswerError(ClientError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
        kind: the server's name of the error, such as `ModelNotFoundException`; "" without one.
        message: the error message of the server.
        detail: the cause, which the management API adds; "" elsewhere.
        request_id: the request id in the server's logs; "" without one.
        retry_after_s: seconds to wait before a retry, from the header `Retry-After`; None without one.
    """

    def __init__(
        self,
        message: str,
        status: int = 0,  # always given, except by pickle, which passes the message and then sets the rest
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
    """4xx: the request is invalid; sending it again unchanged does not help."""


class Unauthorized(InvalidRequest):
    """The token is missing, wrong or expired."""


class NotFound(InvalidRequest):
    """404: the model, version, archive or path does not exist."""


class Conflict(InvalidRequest):
    """409: this version of the model is already registered."""


class Unavailable(AnswerError):
    """429 or 503 from the server itself or a proxy: it can't accept the request now; a retry may succeed.

    A proxy's 503, whose `kind` is "", may also mean that a server that was running the request was lost.
    """


class ModelFailed(AnswerError):
    """The model's handler failed or answered 429 or 503, its executor died, or memory ran out."""


class TooLate(AnswerError, DeadlineExceeded):
    """504: the server dropped the request because its deadline had passed."""
