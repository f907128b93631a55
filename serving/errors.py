"""Exception classes of the server, independent of any protocol.

Each frontend owns one table from these classes to its own status codes (`frontend/rest/errors.py`,
`frontend/grpc/errors.py`). `str(error)` is the message that a client sees; where TorchServe's clients compare
the message, the class repeats it verbatim. `detail` is for the operator: the log, the management API and
`describe` show it; an inference client never sees it.
"""

from __future__ import annotations

MAX_SHOWN_NAME = 255  # characters of a name in a message; names of registered models are not longer


def _shown(name: str) -> str:
    """Return a name from a client, cut to fit a message: a request may hold megabytes as a model's name."""
    return name if len(name) <= MAX_SHOWN_NAME else f"{name[:MAX_SHOWN_NAME]}..."


class ServingError(Exception):
    """Base of all errors that reach a client; `code` is stable and names the class on the wire."""

    code = "internal"
    retry_after_s: float | None = None  # the suggested delay before a retry

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    @property
    def full_text(self) -> str:
        """The message with the detail, for the operator."""
        return " ".join(filter(None, (self.message, self.detail)))


class InvalidRequest(ServingError):
    """The request is malformed or invalid; a retry without changes fails again."""

    code = "invalid_request"


class NotFound(ServingError):
    """The requested path or resource does not exist."""

    code = "not_found"


class ModelNotFound(NotFound):
    """No model of that name is registered, or no archive exists at that location."""

    code = "model_not_found"

    @classmethod
    def named(cls, model: str) -> ModelNotFound:
        """Return the error for a model name that is not registered."""
        return cls(f"Model not found: {_shown(model)}")


class VersionNotFound(NotFound):
    """The model is registered, but the requested version is not."""

    code = "version_not_found"

    @classmethod
    def of(cls, model: str, version: str) -> VersionNotFound:
        """Return the error for a version that the registered model does not have."""
        return cls(f"Model version: {_shown(version)} does not exist for model: {_shown(model)}")


class Conflict(ServingError):
    """The same name and version is already registered, or was unregistered before it had loaded."""

    code = "conflict"


class DefaultVersionInUse(ServingError):
    """The default version cannot be unregistered while the model has other versions."""

    code = "default_version_in_use"


class NotAllowed(ServingError):
    """The method, or the whole model API, is disabled."""

    code = "not_allowed"


class Unauthorized(ServingError):
    """The token is missing, wrong or expired."""

    code = "unauthorized"


class Forbidden(ServingError):
    """The client may not do this without a token: a browser for a foreign site, or another machine."""

    code = "forbidden"


class InvalidArchive(ServingError):
    """The archive is unusable: its bytes, its manifest or its configuration is invalid."""

    code = "invalid_archive"


class DependenciesFailed(InvalidArchive):
    """Installing the archive's requirements or creating its virtual environment failed."""

    code = "dependencies_failed"


class InvalidWorkflow(ServingError):
    """The archive or the specification of a workflow is unusable."""

    code = "invalid_workflow"


class InvalidGraph(InvalidWorkflow):
    """The graph of a workflow has a cycle, or more than one start node."""

    code = "invalid_graph"


class WorkflowNotFound(NotFound):
    """No workflow of that name is registered, or no archive exists at that location."""

    code = "workflow_not_found"

    @classmethod
    def named(cls, workflow: str) -> WorkflowNotFound:
        """Return the error for the name of a workflow that is not registered."""
        return cls(f"Workflow not found: {_shown(workflow)}")


class WorkflowFailed(ServingError):
    """Models of a workflow could not be registered or loaded; no part of it stays registered."""

    code = "workflow_failed"


class StepFailed(ServingError):
    """A step of a workflow failed, so the workflow has no answer; `detail` holds the cause."""

    code = "step_failed"


class UntrustedArchive(InvalidArchive):
    """The signature of the archive is missing, invalid, or not made by a signer whom the operator trusts."""

    code = "untrusted_archive"


class InvalidSnapshot(ServingError):
    """A snapshot names archives that are missing; the server refuses to start without them."""

    code = "invalid_snapshot"


class DownloadFailed(ServingError):
    """A remote archive could not be fetched."""

    code = "download_failed"


class Unavailable(ServingError):
    """The request cannot be admitted now: no executor is available, or the queue is full."""

    code = "unavailable"


class CutOff(Unavailable):
    """The request was ended while it may have been running, so a retry could run it twice.

    Its model was unloaded, or the server stops.
    """


class QueueFull(Unavailable):
    """The bounded queue of the version is full; `retry_after_s` is the suggested delay before a retry."""

    code = "queue_full"
    retry_after_s: float

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Restarting(Unavailable):
    """Every executor of the version was lost and restarts; `retry_after_s` is the delay before a retry."""

    code = "restarting"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("All workers of this model are restarting. Try again later.")
        self.retry_after_s = retry_after_s


class VersionFailed(Unavailable):
    """The version has no executor because it failed to load, or because its executors gave up.

    The message is TorchServe's, which tells clients to add workers; `plain` describes the failure instead,
    for protocols whose clients do not know TorchServe's text.
    """

    code = "version_failed"

    def __init__(self, message: str, detail: str, model: str, version: str) -> None:
        super().__init__(message, detail)
        self.plain = (
            f"Model {model} version {version} has failed, and no worker serves it. The log of the server and "
            f"GET /models/{model}/{version} of its management API say why."
        )


class OverBudget(Unavailable):
    """The server or one connection has reached its limit on bytes of unfinished requests."""

    code = "over_budget"


class TooManyRequests(ServingError):
    """The client has reached a limit on its requests; `retry_after_s` is the delay before a retry."""

    code = "too_many_requests"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServingError):
    """The deadline passed, or would have passed, before the response."""

    code = "deadline_exceeded"


class Cancelled(ServingError):
    """The client disconnected or cancelled before the response; this error is never delivered."""

    code = "cancelled"

    def __init__(self, message: str = "the client went away", detail: str = "") -> None:
        super().__init__(message, detail)


class LeftUnread(ServingError):
    """The client read a streamed response too slowly; see `batching/unread_parts.py`."""

    code = "left_unread"

    def __init__(self, unread_bytes: int) -> None:
        super().__init__(
            "The answer was given up: it was read too slowly.",
            f"{unread_bytes} bytes of it lay unread in the server",
        )


class HandlerFailed(ServingError):
    """The handler raised, or returned a value that can't be sent.

    `status` is the HTTP-style status code of the handler contract: 503 unless the handler chose another one
    by raising `PredictionException(message, status)`.
    """

    code = "handler_failed"

    def __init__(self, message: str = "Prediction failed", status: int = 503, detail: str = "") -> None:
        super().__init__(message, detail)
        self.status = status


class OutOfResources(ServingError):
    """Host or device memory ran out while the handler ran."""

    code = "out_of_resources"


class NoRoom(OutOfResources):
    """There was no memory to pass a request, or a batch, to the handler, so it was not run."""

    code = "no_room"


class ExecutorDied(ServingError):
    """The executor died while it held the request; `detail` holds the exit code or signal.

    `crashed`: the executor died while it ran the request, which may be the cause. `out_of_memory`: the kernel
    killed it for its memory use.
    """

    code = "executor_died"

    def __init__(self, detail: str = "", *, crashed: bool = False, out_of_memory: bool = False) -> None:
        super().__init__("Worker died.", detail)
        self.crashed = crashed
        self.out_of_memory = out_of_memory


class Quarantined(InvalidRequest):
    """The request was running in two executor crashes and is not run; `detail` names them."""

    code = "quarantined"

    def __init__(self, detail: str = "") -> None:
        super().__init__(
            "This request was running at two crashes of the model's executors. It is quarantined: it is "
            "not run again until its quarantine ends. Change the request, or ask the operator of the server.",
            detail,
        )


MAX_DETAIL_CHARACTERS = 10_000  # of the cause of a failed load


class LoadFailed(ServingError):
    """A version could not be loaded; `detail` holds the cause (exception, exit code, time-out)."""

    code = "load_failed"

    def __init__(self, message: str, detail: str = "", out_of_memory: bool = False) -> None:
        super().__init__(message, detail)
        self.out_of_memory = out_of_memory

    @classmethod
    def of(cls, model: str, version: str, detail: str, out_of_memory: bool = False) -> LoadFailed:
        """Return the error with TorchServe's text for a version whose executors do not start.

        A long detail loses its end: a handler may choose it, and `describe` repeats it.
        """
        detail = detail[:MAX_DETAIL_CHARACTERS]
        return cls(f"Failed to start workers for model {model} version: {version}", detail, out_of_memory)


class UnregisterTimeout(ServingError):
    """Requests were still running when the unregister timeout expired."""

    code = "unregister_timeout"
