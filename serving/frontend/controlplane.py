"""What operators touch: protocol-free, shared by every frontend."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchere.serving.execution.executor import ExecutorStatus
from torchere.serving.registry.version import VersionState
from torchere.serving.settings import ModelSettings
from torchere.serving.types import InferRequest, InferResponse, ModelKey


class Progress(Enum):
    """How far a change was when the call came back."""

    DONE = "done"
    STARTED = "started"  # the caller did not want to wait
    PARTIAL = "partial"  # waited, and fewer executors than asked for are up


@dataclass(frozen=True, slots=True)
class Registration:
    """A wish to register an archive; None means: not said, take the next source of the setting."""

    url: str
    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    batch_size: int | None = None
    max_batch_delay_ms: int | None = None
    initial_executors: int | None = None
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None
    synchronous: bool = True


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered version."""

    key: ModelKey
    executors: int  # how many it was registered with
    progress: Progress


@dataclass(frozen=True, slots=True)
class VersionDescription:
    """Everything `describe` tells of one version; a snapshot."""

    key: ModelKey
    url: str  # exactly as given at registration
    runtime: str
    settings: ModelSettings
    isolation: str  # "thread" | "process": what `auto` came to
    state: VersionState
    failure: str  # cause of FAILED, or of the last lost executor; "" when all is well
    loaded_at_startup: bool
    executors: tuple[ExecutorStatus, ...]
    queue_capacity: int  # how many more requests may wait
    queue_length: int


@dataclass(frozen=True, slots=True)
class ModelPage:
    """One page of the list of models: (name, url of the default version), sorted by name."""

    models: tuple[tuple[str, str], ...]
    next_page_token: str | None


class ControlPlane:
    """Changes what is served. All methods run on the event loop and never block it."""

    async def register(self, wish: Registration) -> Registered:
        """Register an archive of the store.

        Raises:
            NotAllowed: the model API is off.
            InvalidRequest, ModelNotFound, InvalidArchive, DownloadFailed, Conflict: nothing was registered.
            LoadFailed: it would not load; it is unregistered again (only when synchronous).
        """
        raise NotImplementedError

    async def unregister(self, model: str, version: str | None) -> None:
        """Remove a version (None: the default one) after its requests are answered.

        Raises:
            NotAllowed, ModelNotFound, VersionNotFound, DefaultVersionInUse, UnregisterTimeout.
        """
        raise NotImplementedError

    async def scale(
        self,
        model: str,
        version: str | None,
        *,
        min_executors: int,
        max_executors: int,
        synchronous: bool,
    ) -> Progress:
        """Change how many executors a version has.

        Raises:
            InvalidRequest: max below min, or a negative number (checked before the model is looked up).
            ModelNotFound, VersionNotFound.
            LoadFailed: synchronous, and an executor would not start.
        """
        raise NotImplementedError

    async def set_default(self, model: str, version: str) -> None:
        """Make `version` the one that requests without a version get.

        Raises:
            ModelNotFound, VersionNotFound.
        """
        raise NotImplementedError

    def describe(self, model: str, version: str | None) -> list[VersionDescription]:
        """Describe one version (None: the default; "all": every version).

        Raises:
            ModelNotFound, VersionNotFound.
        """
        raise NotImplementedError

    async def describe_customized(
        self, model: str, version: str | None, request: InferRequest
    ) -> tuple[VersionDescription, InferResponse]:
        """Describe one version and ask its handler's `describe_handle` too (`request` brings the headers).

        Raises:
            ModelNotFound, VersionNotFound; Unavailable with the contract's describe text; HandlerFailed.
        """
        raise NotImplementedError

    def list_models(self, limit: int, page_token: int) -> ModelPage:
        """One page of at most `limit` models, starting at `page_token` (both 0 or more)."""
        raise NotImplementedError

    def has_executors(self, model: str) -> bool:
        """Whether the default version has at least one executor (KServe v1 readiness).

        Raises:
            ModelNotFound.
        """
        raise NotImplementedError
