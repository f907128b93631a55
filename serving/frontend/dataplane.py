"""What requests touch: protocol-free, shared by every frontend."""

from __future__ import annotations

from dataclasses import dataclass

from torchere.serving.types import InferRequest, InferResponse, StreamedResponse


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether traffic may come, and if not, why."""

    ready: bool
    reasons: tuple[str, ...] = ()


class DataPlane:
    """Answers requests. All methods run on the event loop and never block it."""

    async def infer(
        self, model: str, version: str | None, request: InferRequest
    ) -> InferResponse | StreamedResponse:
        """Answer one request with `version` of `model` (None: its default version).

        Cancelling the awaiting task withdraws the request: it won't run if it has not started yet.

        Raises:
            ModelNotFound, VersionNotFound: nothing of that name is registered.
            Unavailable, QueueFull: no executor, or no room.
            DeadlineExceeded, HandlerFailed, OutOfResources, ExecutorDied: what became of it.
        """
        raise NotImplementedError

    def check_exists(self, model: str, version: str | None) -> None:
        """Raise `ModelNotFound` or `VersionNotFound` unless the version is registered."""
        raise NotImplementedError

    def sole_startup_model(self) -> str | None:
        """The model that was loaded at the start, when it was exactly one (`/invocations` uses it)."""
        raise NotImplementedError

    def signature_text(self, model: str, version: str | None) -> str | None:
        """`MAR-INF/signature.json` of the archive, for the model's OpenAPI document; None without one."""
        raise NotImplementedError

    def healthy(self) -> bool:
        """The rule of `/ping`: every default version has as many living executors as it should."""
        raise NotImplementedError

    def readiness(self) -> Readiness:
        """The rule of `/readyz`: started, not draining, and every version that should be ready is."""
        raise NotImplementedError
