"""What requests touch: protocol-free, shared by every frontend."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from torchere.serving.batching.stateful import begin_sequence
from torchere.serving.errors import QueueFull, Unavailable
from torchere.serving.registry.registry import Registry
from torchere.serving.registry.version import Version, VersionState
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, StreamedResponse


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether traffic may come, and if not, why."""

    ready: bool
    reasons: tuple[str, ...] = ()


class DataPlane:
    """Answers requests. All methods run on the event loop and never block it."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics
        self.accepted = 0  # predictions that were admitted
        self.answered = 0  # those of them that have an answer, or an error, or nobody who waits for one
        self._started = False
        self._draining = False

    async def infer(
        self, model: str, version: str | None, request: InferRequest, group: str = ""
    ) -> InferResponse | StreamedResponse:
        """Answer one request with `version` of `model` (None: its default version).

        Requests share a batch only with others of equal `group`. Cancelling the awaiting task withdraws the
        request: it won't run if it has not started yet.

        Raises:
            ModelNotFound, VersionNotFound: nothing of that name is registered.
            Unavailable, QueueFull: no executor, or no room.
            DeadlineExceeded, HandlerFailed, OutOfResources, ExecutorDied: what became of it.
        """
        target = self._registry.find(model, version)
        self._metrics.prediction_accepted(model, version)
        self._refuse_without_executors(target, version)
        try:
            pending = target.batcher.submit(_prepared(request, target), group)
        except QueueFull as err:
            raise QueueFull(_worded(err.message, model, version), err.retry_after_s) from None
        self.accepted += 1
        try:
            response = await pending.answer
        except asyncio.CancelledError:  # nobody waits any more
            target.batcher.withdraw(pending)
            raise
        finally:
            self.answered += 1
        total_s = time.monotonic() - pending.enqueued_s
        self._metrics.prediction_answered(model, version, total_s, pending.dequeued_s - pending.enqueued_s)
        return response

    def _refuse_without_executors(self, target: Version, version: str | None) -> None:
        if target.target == 0 or target.state is VersionState.FAILED or not target.living_executors:
            raise Unavailable(_worded(target.batcher.refusal, target.key.name, version), target.failure_text)

    def check_exists(self, model: str, version: str | None) -> None:
        """Raise `ModelNotFound` or `VersionNotFound` unless the version is registered."""
        self._registry.find(model, version)

    def sole_startup_model(self) -> str | None:
        """The model that was loaded at the start, when it was exactly one (`/invocations` uses it)."""
        names = {
            version.key.name for version in self._registry.versions() if version.origin.loaded_at_startup
        }
        return names.pop() if len(names) == 1 else None

    def signature_text(self, model: str, version: str | None) -> str | None:
        """`MAR-INF/signature.json` of the archive, for the model's OpenAPI document; None without one."""
        return self._registry.find(model, version).origin.archive.signature

    def healthy(self) -> bool:
        """The rule of `/ping`: every default version has as many living executors as it should.

        Executors that load or restart count as living, as in TorchServe; `readiness` asks for more.
        """
        return all(
            _living(default) >= default.settings.min_executors
            for default in (self._registry.find(name, None) for name in self._registry.served())
        )

    def readiness(self) -> Readiness:
        """The rule of `/readyz`: started, not draining, and every version that should be ready is."""
        reasons = []
        if not self._started:
            reasons.append("the server is starting")
        if self._draining:
            reasons.append("the server is shutting down")
        for version in self._registry.versions():
            if version.target > 0 and not version.ready:
                reasons.append(f"{version.key} is {version.state.value}")
        return Readiness(not reasons, tuple(reasons))

    def opened(self) -> None:
        """All listeners are up."""
        self._started = True

    def draining(self) -> None:
        """The end has begun: unready from now on."""
        self._draining = True


def _living(version: Version) -> int:
    if version.state is VersionState.FAILED:
        return 0
    if version.state in (VersionState.NEW, VersionState.LOADING, VersionState.WARMING):
        return version.target  # still on their way
    return version.living_executors


def _prepared(request: InferRequest, target: Version) -> InferRequest:
    if target.settings.sequences is not None:
        request = begin_sequence(request)
    return _with_deadline(request, target)


def _with_deadline(request: InferRequest, target: Version) -> InferRequest:
    client_timeout_ms = target.settings.client_timeout_ms
    if request.deadline_s != NO_DEADLINE or not client_timeout_ms:
        return request
    deadline_s = time.monotonic() + client_timeout_ms / 1000
    return InferRequest(request.request_id, request.parameters, request.headers, deadline_s)


def _worded(text: str, model: str, version: str | None) -> str:
    """The contract's refusal; with a version in the URL it reads differently, unbalanced quote and all."""
    if version is None:
        return text
    return text.replace(f'Model "{model}" ', f'Model "{model}" Version {version}" ', 1)
