"""Table from our errors to HTTP: the status, and the class name that TorchServe's clients read."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

from torchere.serving import errors as e
from torchere.serving.frontend.call_scope import CLIENT_GONE
from torchere.serving.frontend.wording import pretty


class LastWords(NamedTuple):
    """A response that a connection sends itself before it closes."""

    status: int
    type: str
    message: str

    def text(self, path: str = "") -> bytes:
        """Return head and body, for a request with this path; "": it is not known."""
        body = pretty(error_members(self.status, self.type, self.message, path)) + "\n"
        return (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}"
        ).encode("ascii")


def error_members(status: int, kind: str, message: str, path: str) -> dict[str, object]:
    """Return the JSON object of an error; below `/v2` it has `error`, too."""
    members: dict[str, object] = {"code": status, "type": kind, "message": message}
    if path == "/v2" or path.startswith("/v2/"):
        members["error"] = message  # the one member that clients of the Open Inference Protocol read
    return members


# The complete response to a malformed request, in TorchServe's words.
INVALID_HTTP = LastWords(400, "BadRequestException", "Invalid HTTP message.")
UNKNOWN_TRANSFER_CODING = LastWords(
    501, "NotImplementedException", "Transfer-Encoding: expected chunked alone."
)
STALLED_BODY = LastWords(
    408, "RequestTimeoutException", "The rest of the request's body did not come in time."
)

OVER_BUDGET = LastWords(503, "ServiceUnavailableException", "The server holds too many bytes of requests.")


class BadMessage(Exception):
    """The bytes are not an HTTP/1 message, or exceed a limit: answer with `last_words`, and close."""

    def __init__(self, flaw: str, last_words: LastWords = INVALID_HTTP) -> None:
        super().__init__(flaw)
        self.last_words = last_words


# The type of all errors of handlers and executors, independent of the status.
INTERNAL = "InternalServerException"


class UnknownCoding(e.InvalidRequest):
    """The content coding of the body is not supported."""

    code = "unknown_coding"


class BodyTooLong(e.InvalidRequest):
    """The body, or its announced length, is longer than a limit."""

    code = "body_too_long"

    def __init__(
        self, max_bytes: int, text: str = "The body is longer than max_request_size={} bytes."
    ) -> None:
        super().__init__(text.format(max_bytes))


class InflatesTooFar(e.InvalidRequest):
    """The decompressed body is longer than `limits.max_request_bytes`."""

    code = "inflates_too_far"


# Looked up along the class's MRO, so a new subclass inherits its parent's row.
TABLE: dict[type[e.ServingError], tuple[int, str]] = {
    e.InvalidRequest: (400, "BadRequestException"),
    UnknownCoding: (415, "BadRequestException"),
    BodyTooLong: (413, "BadRequestException"),
    InflatesTooFar: (413, "BadRequestException"),
    e.Quarantined: (422, "BadRequestException"),
    e.NotFound: (404, "ResourceNotFoundException"),
    e.ModelNotFound: (404, "ModelNotFoundException"),
    e.VersionNotFound: (404, "ModelVersionNotFoundException"),
    e.WorkflowNotFound: (404, "WorkflowNotFoundException"),
    e.InvalidWorkflow: (400, "InvalidWorkflowException"),
    e.InvalidGraph: (400, "InvalidDAGException"),
    e.WorkflowFailed: (500, "WorkflowException"),
    e.Conflict: (409, "ConflictStatusException"),
    e.DefaultVersionInUse: (403, "InvalidModelVersionException"),
    e.NotAllowed: (405, "MethodNotAllowedException"),
    e.Unauthorized: (400, "InvalidKeyException"),
    e.Forbidden: (403, "ForbiddenException"),
    e.InvalidArchive: (400, "InvalidModelException"),
    e.DependenciesFailed: (400, "ModelException"),
    e.DownloadFailed: (400, "DownloadArchiveException"),
    e.TooManyRequests: (429, "TooManyRequestsException"),  # TorchServe has no such limits
    e.Unavailable: (503, "ServiceUnavailableException"),
    e.CutOff: (503, INTERNAL),  # not the name by which clients know that a request was not run
    e.DeadlineExceeded: (504, "RequestTimeoutException"),  # TorchServe never answers here at all
    e.Cancelled: (CLIENT_GONE, INTERNAL),
    e.LeftUnread: (CLIENT_GONE, INTERNAL),
    e.OutOfResources: (507, INTERNAL),
    e.ExecutorDied: (500, INTERNAL),
    e.LoadFailed: (500, INTERNAL),
    e.UnregisterTimeout: (408, "RequestTimeoutException"),
    e.ServingError: (500, INTERNAL),
}


def status_and_type(error: e.ServingError) -> tuple[int, str]:
    """Return the HTTP status of an error and its `type` string."""
    if isinstance(error, e.HandlerFailed):
        status = 507 if error.status == 413 else error.status  # 413 is for bodies that the server refuses
        return status if 400 <= status <= 599 else 500, INTERNAL
    if isinstance(error, (e.LoadFailed, e.ExecutorDied)) and error.out_of_memory:
        return 507, INTERNAL
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
