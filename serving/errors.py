"""Everything that can go wrong, in one small tree that knows no protocol.

Each frontend owns one table from these classes to its own status codes (`frontend/rest/errors.py`,
`frontend/grpc/errors.py`). `str(error)` is the text a client sees; where TorchServe's clients know a
text by heart, the class spells it exactly so. `detail` is for the operator: the log, the management
API and `describe` show it, an inference client never does.
"""

from __future__ import annotations


class ServingError(Exception):
    """Base of all errors that reach a client; `code` is stable and names the class on the wire."""

    code = "internal"

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail


class InvalidRequest(ServingError):
    """The request itself is wrong; sending it again unchanged cannot help."""

    code = "invalid_request"


class NotFound(ServingError):
    """The path or thing asked for does not exist."""

    code = "not_found"


class ModelNotFound(NotFound):
    """No model of that name is registered, or no archive is at that place."""

    code = "model_not_found"

    @classmethod
    def named(cls, model: str) -> ModelNotFound:
        """The error for a model name that nobody registered."""
        return cls(f"Model not found: {model}")


class VersionNotFound(NotFound):
    """The model exists, that version of it does not."""

    code = "version_not_found"

    @classmethod
    def of(cls, model: str, version: str) -> VersionNotFound:
        """The error for a registered model that lacks the version."""
        return cls(f"Model version: {version} does not exist for model: {model}")


class Conflict(ServingError):
    """The same name and version is already registered, or was unregistered before it was there."""

    code = "conflict"


class DefaultVersionInUse(ServingError):
    """The default version cannot go while other versions of the model stay."""

    code = "default_version_in_use"


class NotAllowed(ServingError):
    """The method, or the whole model API, is switched off."""

    code = "not_allowed"


class Unauthorized(ServingError):
    """The token is missing, wrong or expired."""

    code = "unauthorized"


class InvalidArchive(ServingError):
    """The archive can't be used: its bytes, its manifest or its configuration are wrong."""

    code = "invalid_archive"


class DependenciesFailed(InvalidArchive):
    """What the archive requires could not be installed, or its virtual environment not be made."""

    code = "dependencies_failed"


class InvalidSnapshot(ServingError):
    """A snapshot asks for what is not there; the server does not start with less than it served before."""

    code = "invalid_snapshot"


class DownloadFailed(ServingError):
    """A remote archive could not be fetched."""

    code = "download_failed"


class Unavailable(ServingError):
    """Nobody can take the request now: no executor, or no room in the queue."""

    code = "unavailable"


class QueueFull(Unavailable):
    """The bounded queue of the version is full; `retry_after_s` says when to try again."""

    code = "queue_full"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverBudget(Unavailable):
    """The server, or one connection, holds as many bytes of unfinished requests as it may."""

    code = "over_budget"


class DeadlineExceeded(ServingError):
    """The answer came, or would have come, too late."""

    code = "deadline_exceeded"


class Cancelled(ServingError):
    """The client went away before there was an answer; nobody reads this one."""

    code = "cancelled"

    def __init__(self, message: str = "the client went away", detail: str = "") -> None:
        super().__init__(message, detail)


class LeftUnread(ServingError):
    """The client took a streamed answer much too slowly; see `batching/unread_parts.py`."""

    code = "left_unread"

    def __init__(self, unread_bytes: int) -> None:
        super().__init__(
            "The answer was given up: it was read too slowly.",
            f"{unread_bytes} bytes of it lay unread in the server",
        )


class HandlerFailed(ServingError):
    """The handler raised, or answered something that can't be sent.

    `status` is the HTTP-style number of the handler contract: 503 unless the handler chose another one by
    raising `PredictionException(message, status)`.
    """

    code = "handler_failed"

    def __init__(self, message: str = "Prediction failed", status: int = 503, detail: str = "") -> None:
        super().__init__(message, detail)
        self.status = status


class OutOfResources(ServingError):
    """Memory of the host or of the device ran out while the handler ran."""

    code = "out_of_resources"


class ExecutorDied(ServingError):
    """The executor was lost with the request in it; `detail` holds exit code or signal.

    `crashed`: it went down while it ran the request, which may be to blame. `out_of_memory`: the kernel ended
    it for its memory.
    """

    code = "executor_died"

    def __init__(self, detail: str = "", *, crashed: bool = False, out_of_memory: bool = False) -> None:
        super().__init__("Worker died.", detail)
        self.crashed = crashed
        self.out_of_memory = out_of_memory


class Quarantined(InvalidRequest):
    """The request was running at two crashes of executors, and will not run again; `detail` says which."""

    code = "quarantined"

    def __init__(self, detail: str = "") -> None:
        super().__init__(
            "This request was running at two crashes of the model's executors. It is quarantined: it will "
            "not be run again. Change the request, or ask the operator of the server.",
            detail,
        )


class LoadFailed(ServingError):
    """A version could not be loaded; `detail` holds the cause (exception, exit code, time-out)."""

    code = "load_failed"

    def __init__(self, message: str, detail: str = "", out_of_memory: bool = False) -> None:
        super().__init__(message, detail)
        self.out_of_memory = out_of_memory

    @classmethod
    def of(cls, model: str, version: str, detail: str, out_of_memory: bool = False) -> LoadFailed:
        """With the contract's text for a version whose executors do not start."""
        return cls(f"Failed to start workers for model {model} version: {version}", detail, out_of_memory)


class UnregisterTimeout(ServingError):
    """Requests were still running when the time for unregistering was over."""

    code = "unregister_timeout"
