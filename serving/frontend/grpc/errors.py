"""Tables from our errors to gRPC: a status code, and a two-line text that TorchServe's clients know.

The second line is the name of TorchServe's Java exception class. The inference service answers INTERNAL even
where a more specific code exists, because its clients compare with INTERNAL. The trailer
`grpc-status-details-bin`, a `google.rpc.Status`, carries the error's own name and the retry delay.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from torchere.serving import errors as e
from torchere.serving.frontend.http2.header_blocks import MAX_MESSAGE_BYTES
from torchere.serving.frontend.http2.messages import StatusCode

_MODEL = "org.pytorch.serve.archive.model."
_HTTP = "org.pytorch.serve.http."
INTERNAL_SERVER = f"{_HTTP}InternalServerException"
BAD_REQUEST = f"{_HTTP}BadRequestException"
DOMAIN = "torchere"  # of the reasons in `ErrorInfo`


class Failure(NamedTuple):
    """The gRPC status that ends a failed call."""

    code: StatusCode
    message: str
    reason: str  # second line of the text; "" leaves it out
    error: str = e.ServingError.code  # the error's own name
    retry_after_s: float | None = None

    @property
    def details(self) -> str:
        """The text of the gRPC status."""
        return f"{self.message}\n{self.reason}" if self.reason else self.message

    def trailers(self) -> tuple[StatusCode, str, bytes]:
        """Return code, text, and the status as a serialized `google.rpc.Status`; b"" for a long text."""
        if len(self.details) > MAX_MESSAGE_BYTES:  # its details are not sent, and it is not cached
            return self.code, self.details, b""
        retry_tenths = None if self.retry_after_s is None else math.ceil(self.retry_after_s * 10)
        return self.code, self.details, _status(self.code, self.details, self.error, retry_tenths)


# Cached, because a server with a full queue sends the same status again and again.
@lru_cache(maxsize=64)
def _status(code: StatusCode, text: str, error: str, retry_tenths: int | None) -> bytes:
    # Clients (`grpc_status.rpc_status`) check that code and message equal the call's own.
    status = Status(code=code, message=text.encode(errors="replace").decode())
    status.details.append(_packed(ErrorInfo(reason=error.upper(), domain=DOMAIN)))
    if retry_tenths is not None:
        info = RetryInfo()
        info.retry_delay.FromMilliseconds(100 * retry_tenths)
        status.details.append(_packed(info))
    return bytes(status.SerializeToString())


def _packed(info: ErrorInfo | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(info)
    return packed


Row = tuple[StatusCode, str]
Table = dict[type[e.ServingError], Row]

# Rows are looked up along the class's MRO, so a new subclass inherits its parent's row.
MANAGEMENT: Table = {
    e.InvalidRequest: (StatusCode.INVALID_ARGUMENT, BAD_REQUEST),
    e.Quarantined: (StatusCode.INVALID_ARGUMENT, BAD_REQUEST),
    e.NotFound: (StatusCode.NOT_FOUND, f"{_HTTP}ResourceNotFoundException"),
    e.ModelNotFound: (StatusCode.NOT_FOUND, f"{_MODEL}ModelNotFoundException"),
    e.VersionNotFound: (StatusCode.NOT_FOUND, f"{_MODEL}ModelVersionNotFoundException"),
    # TorchServe lets these two escape as UNKNOWN without a text.
    e.Conflict: (StatusCode.ABORTED, f"{_HTTP}ConflictStatusException"),
    e.DefaultVersionInUse: (StatusCode.FAILED_PRECONDITION, f"{_MODEL}InvalidModelVersionException"),
    e.NotAllowed: (StatusCode.PERMISSION_DENIED, f"{_MODEL}ModelException"),
    e.Unauthorized: (StatusCode.PERMISSION_DENIED, ""),
    e.InvalidArchive: (StatusCode.INVALID_ARGUMENT, f"{_MODEL}InvalidModelException"),
    e.DependenciesFailed: (StatusCode.INVALID_ARGUMENT, f"{_MODEL}ModelException"),
    e.DownloadFailed: (StatusCode.INVALID_ARGUMENT, "org.pytorch.serve.archive.DownloadArchiveException"),
    e.Unavailable: (StatusCode.UNAVAILABLE, f"{_HTTP}ServiceUnavailableException"),
    e.CutOff: (StatusCode.INTERNAL, INTERNAL_SERVER),  # not UNAVAILABLE, at which clients and proxies retry
    e.TooManyRequests: (StatusCode.RESOURCE_EXHAUSTED, ""),  # TorchServe has no such limits
    e.DeadlineExceeded: (StatusCode.DEADLINE_EXCEEDED, INTERNAL_SERVER),
    e.Cancelled: (StatusCode.CANCELLED, INTERNAL_SERVER),
    e.LeftUnread: (StatusCode.RESOURCE_EXHAUSTED, INTERNAL_SERVER),
    e.UnregisterTimeout: (StatusCode.FAILED_PRECONDITION, f"{_HTTP}RequestTimeoutException"),
    e.ServingError: (StatusCode.INTERNAL, INTERNAL_SERVER),
}
INFERENCE: Table = {
    **MANAGEMENT,
    e.InvalidRequest: (StatusCode.INTERNAL, "BadRequestException.()"),
    e.ModelNotFound: (StatusCode.INTERNAL, f"{_MODEL}ModelNotFoundException"),
    e.VersionNotFound: (StatusCode.INTERNAL, f"{_MODEL}ModelVersionNotFoundException"),
    e.Unavailable: (StatusCode.INTERNAL, "InternalServerException.()"),
    e.CutOff: (StatusCode.INTERNAL, "InternalServerException.()"),
    # TorchServe has no such error; proxies and clients retry at UNAVAILABLE.
    e.Restarting: (StatusCode.UNAVAILABLE, f"{_HTTP}ServiceUnavailableException"),
}
# The Open Inference Protocol has no Java class names: the status text is only the message.
OPEN_INFERENCE: Table = {error: (code, "") for error, (code, _) in MANAGEMENT.items()}
_OF_HTTP = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    416: StatusCode.OUT_OF_RANGE,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


def failure(error: e.ServingError, table: Table) -> Failure:
    """Return the gRPC status for a call that raised `error`."""
    if isinstance(error, e.HandlerFailed):
        return Failure(of_http(error.status), error.message, table[e.ServingError][1], error.code)
    code, reason = next(table[cls] for cls in type(error).__mro__ if cls in table)
    message = "Model API disabled" if isinstance(error, e.NotAllowed) else error.message
    return Failure(code, message, reason, error.code, error.retry_after_s)


def of_http(status: int) -> StatusCode:
    """Return the gRPC code for an HTTP status that a handler chose for its failure."""
    code = _OF_HTTP.get(status)
    if code is not None:
        return code
    return StatusCode.FAILED_PRECONDITION if 400 <= status <= 499 else StatusCode.INTERNAL
