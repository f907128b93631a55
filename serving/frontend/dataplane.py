"""The data plane: predictions, model facts and readiness, independent of the protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torchere.archiver.signature import Signature
from torchere.handlers.built_in import request_signature
from torchere.serving.batching.request import Answer, Ledger, Request
from torchere.serving.batching.stateful import begin_sequence
from torchere.serving.errors import (
    HandlerFailed,
    NotFound,
    QueueFull,
    ServingError,
    TooManyRequests,
    Unavailable,
    VersionFailed,
)
from torchere.serving.frontend.call_scope import current_call
from torchere.serving.frontend.model_facts import ModelFacts, facts_of
from torchere.serving.registry.version import Version, VersionState, condition
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import Operation
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, ModelKey, StreamedResponse

if TYPE_CHECKING:
    from torchere.serving.access.client_limits import ClientLimits
    from torchere.serving.registry.registry import Registry

ON_THEIR_WAY = (VersionState.NEW, VersionState.LOADING, VersionState.WARMING)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the server or a version can take traffic, and if not, the reasons."""

    ready: bool
    reasons: tuple[str, ...] = ()


def unready_because(version: Version) -> str:
    """Return the reason why a version is not ready, as text.

    Probes need no key, so for a failed version the text says where to find the cause, not the cause itself.
    """
    told = condition(version)
    if version.state is not VersionState.READY:
        text = f"{version.key} is {told}"
    else:
        text = f"{version.key} has no executor in service ({told})"
    if told != VersionState.FAILED.value:
        return text
    return f"{text}: GET /models/{version.key.name} on the management port, or the server's log, says why"


def living(version: Version) -> int:
    """Return the number of executors for `/ping`, including loading and restarting ones, as in TorchServe.

    Wanted executors that the reconciler has yet to create count too, because its work may take a while.
    """
    if version.state is VersionState.FAILED:
        return 0
    if version.state in ON_THEIR_WAY:
        return version.target
    return version.living_executors + max(0, version.target - version.pool.size)


Response: TypeAlias = InferResponse | StreamedResponse
STARTING = "The server is starting, and its models are not registered yet. Try again later."


class _Awaited(Request):
    """A request whose answer resolves a future that a coroutine awaits."""

    __slots__ = ("_future", "protocol")

    def __init__(self, asked: InferRequest, group: str, answer: asyncio.Future[Response]) -> None:
        super().__init__(asked.request_id, time.monotonic())
        self.fill(asked)
        self.group = group
        self.protocol = "rest"
        self._future: asyncio.Future[Response] | None = answer

    def operation(self) -> Operation:
        """Return the operation that the client called, as the client's protocol names it."""
        scope = current_call()
        named = None if scope is None or scope.many else scope.operation
        return super().operation() if named is None else named

    def reply(self, outcome: Answer) -> None:
        """Resolve the future with the outcome."""
        # Drop this reference to the future, so that a stream which the coroutine drops is abandoned at once.
        answer, self._future = self._future, None
        if answer is None or answer.done():  # cancelled
            return
        if isinstance(outcome, ServingError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


async def all_parts(parts: AsyncIterable[bytes], max_bytes: int) -> list[bytes]:
    """Return the parts of a streamed response.

    Raises:
        HandlerFailed: together they exceed `max_bytes`; the remaining parts are abandoned.
    """
    found, size = [], 0
    async for part in parts:
        size += len(part)
        if size > max_bytes:
            raise HandlerFailed(f"The answer has more than max_response_size={max_bytes} bytes.", 500)
        found.append(part)
    return found


class DataPlane:
    """Answers requests. All methods run on the event loop and never block it.

    Methods that take a model and a version raise `ModelNotFound` or `VersionNotFound` if it is not known.

    `readiness_of_all_models`: a model that was registered after the start can make the server unready.
    """

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        *,
        client_limits: ClientLimits | None = None,
        readiness_of_all_models: bool = False,
    ) -> None:
        self._registry = registry
        self._client_limits = client_limits
        self._readiness_of_all_models = readiness_of_all_models
        self._metrics = metrics
        self.ledger = Ledger()  # of all predictions
        self.has_started = False  # all listeners are up, and the startup models are registered
        self._draining = False
        self._started_up = False  # `startup` has been true once
        # Called when readiness may have changed, but not when an executor is lost or comes back.
        self.readiness_listeners: set[Callable[[], None]] = set()

    async def infer(
        self,
        model: str,
        version: str | None,
        request: InferRequest,
        group: str = "",
    ) -> InferResponse | StreamedResponse:
        """Answer one request with `version` of `model` (None: its default version).

        Requests share a batch only with others of equal `group`. Cancelling the awaiting task withdraws the
        request: it won't run if it has not started yet. Telemetry counts it in the current call's scope.

        Raises:
            Unavailable, QueueFull: the version has no executor, or its queue is full.
            TooManyRequests: the client has reached its limits.
            DeadlineExceeded, HandlerFailed, OutOfResources, ExecutorDied: the prediction failed.
        """
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        asked = _Awaited(request, group, answer)
        scope = current_call()
        if scope is None:  # the server itself makes the call
            return await self._awaited(asked, answer, model, version)
        asked.protocol = scope.protocol
        scope.begin(self._metrics, asked)
        try:
            # All other calls, including requests to workflows (REST), were charged when they began.
            if scope.many and scope.protocol == "grpc" and self._client_limits is not None:
                self._charge(self._client_limits, asked)
            response = await self._awaited(asked, answer, model, version)
        except ServingError as error:
            scope.failed(asked, error)
            raise
        except asyncio.CancelledError:
            scope.cancelled(asked)
            raise
        scope.answered(asked)
        return response

    async def _awaited(
        self, asked: Request, answer: asyncio.Future[Response], model: str, version: str | None
    ) -> Response:
        target = self.admit(asked, model, version)
        try:
            return await answer
        except asyncio.CancelledError:  # the client left
            target.batcher.withdraw(asked)
            raise

    def admit(self, request: Request, model: str, version: str | None) -> Version:
        """Admit a request to `version` of `model` (None: its default version); `reply` gets the outcome.

        Returns:
            The version. Call `withdraw` of its batcher when the client disconnects.

        Raises:
            Unavailable, QueueFull, DeadlineExceeded: it was not admitted.
            TooManyRequests: the client has too many unanswered predictions.
        """
        account = request.account
        if account is None and self._client_limits is not None and request.caller:
            account = request.account = self._client_limits.account(request.caller)  # the door did not set it
        try:
            if account is not None:
                account.enter()
        except TooManyRequests as error:
            self._metrics.refused(error)
            raise
        try:
            target = self._find(model, version)
            self._submit(request, target, model, version)
        except BaseException:
            if account is not None:
                account.running -= 1
            raise
        return target

    def _charge(self, limits: ClientLimits, request: Request) -> None:
        try:
            request.account = limits.charge(request.caller, time.monotonic())
        except TooManyRequests as error:
            self._metrics.refused(error)
            raise

    def _submit(self, request: Request, target: Version, model: str, version: str | None) -> None:
        meter = target.observer.meter
        request.meter, request.named = meter, version is not None
        meter.accepted(request.named)
        settings = target.settings
        if settings.sequences is not None:
            begin_sequence(request, settings.sequences.headers)
        if settings.client_timeout_ms and request.deadline_s == NO_DEADLINE:
            request.deadline_s = time.monotonic() + settings.client_timeout_ms / 1000
        ledger = self.ledger
        try:
            self._refuse_without_executors(target, version)
            request.ledger = ledger
            ledger.accepted += 1  # before `submit`, which may answer it at once
            meter.in_flight += 1
            try:
                target.batcher.submit(request)
            except BaseException:
                ledger.accepted -= 1
                meter.in_flight -= 1
                raise
        except QueueFull as err:
            meter.refused(err)
            raise QueueFull(_worded(err.message, model, version), err.retry_after_s) from None
        except ServingError as err:
            meter.refused(err)
            raise

    def _find(self, model: str, version: str | None) -> Version:
        try:
            return self._registry.find(model, version)
        except NotFound as err:
            raise self.refuse_unknown(err) from None

    def refuse_unknown(self, error: NotFound) -> ServingError:
        """Count a prediction for an unknown model or version; return its refusal.

        For doors that look the version up with `facts`, and call `admit` only if they find it.
        """
        refusal = error if self.has_started else Unavailable(STARTING)
        self._metrics.refused(refusal)
        return refusal

    def _refuse_without_executors(self, target: Version, version: str | None) -> None:
        if target.target == 0 or target.state is VersionState.FAILED or not target.has_living_executor:
            text, why = _worded(target.batcher.refusal, target.key.name, version), target.failure_text
            raise VersionFailed(text, why, *target.key) if why and target.target else Unavailable(text, why)

    def check_exists(self, model: str, version: str | None) -> None:
        """Raise the error of a version that is not registered."""
        self._registry.find(model, version)

    def sole_startup_model(self) -> str | None:
        """Return the model loaded at startup if there was exactly one, else None (for `/invocations`)."""
        names = {
            version.key.name
            for version in self._registry.versions()
            if version.origin.loaded_at_startup and not version.origin.workflow
        }
        return names.pop() if len(names) == 1 else None

    def signature_text(self, model: str, version: str | None) -> str | None:
        """Return the archive's `MAR-INF/signature.json`, for the OpenAPI document; None without one."""
        return self._registry.find(model, version).origin.archive.signature

    def tensors(self, model: str, version: str | None) -> Signature | None:
        """Return the tensors that a version takes, the same object for its life; None: they are not known."""
        origin = self._registry.find(model, version).origin
        return request_signature(origin.handler, origin.archive.tensors)

    def facts(self, model: str, version: str | None) -> ModelFacts:
        """Return the public facts of a version."""
        found = self._registry.find(model, version)
        versions = tuple(self._registry.served()[model].versions)
        return facts_of(found, versions)

    def facts_of_versions(self, model: str, version: str | None) -> list[ModelFacts]:
        """Return the facts of a version (None: of every version), in the order of their registration."""
        found = self.facts(model, version)
        return [self.facts(model, each) for each in found.versions] if version is None else [found]

    def registered(self) -> list[ModelKey]:
        """Return the key of every registered version."""
        return [version.key for version in self._registry.versions()]

    def healthy(self) -> bool:
        """Apply the rule of `/ping`: every default version has at least `min_executors` living executors.

        Executors that load or restart count as living, as in TorchServe; `readiness` is stricter. TorchServe
        opens its port only once the startup models are registered, so the result is False until then.
        """
        return self.has_started and all(
            living(default) >= default.settings.min_executors
            for default in (self._registry.find(name, None) for name in self._registry.served())
        )

    def readiness(self) -> Readiness:
        """Apply the rule of `/readyz`: started, not draining, no model missing, every version ready.

        Versions scaled to 0 executors do not count. Those registered after the start count only with
        `readiness_of_all_models`, so that one of them can't take the server out of service for the others.
        """
        reasons = [
            f"model {name} could not be registered; the log says why" for name in self._registry.missing()
        ]
        if not self.has_started:
            reasons.append("the server is starting")
        if self._draining:
            reasons.append("the server is shutting down")
        for version in self._registry.versions():
            counts = self._readiness_of_all_models or self._registry.of_the_start(version)
            if counts and version.target > 0 and not version.ready:
                reasons.append(unready_because(version))
        return Readiness(not reasons, tuple(reasons))

    def model_readiness(self, model: str, version: str | None) -> Readiness:
        """Apply the rule of `/readyz/{model}`: as `readiness`, for one version.

        A version is ready while a loaded, warm and living executor can take its requests.
        """
        found = self._registry.find(model, version)
        reasons = () if found.ready else (unready_because(found),)
        if self._draining:
            reasons = (*reasons, "the server is shutting down")
        return Readiness(not reasons, reasons)

    def startup(self) -> Readiness:
        """Return whether `/startupz` reports ready: every startup model has finished its first load.

        Once true it stays true: later restarts and registrations only affect `readiness`. A model that fails
        to load does not count against it. Otherwise the server would be restarted again and again, with all
        its healthy models.
        """
        if not self._started_up:
            reasons = [] if self.has_started else ["the server is starting"]
            for version in self._registry.versions():
                if version.origin.loaded_at_startup and version.target > 0 and version.state in ON_THEIR_WAY:
                    reasons.append(unready_because(version))
            if reasons:
                return Readiness(False, tuple(reasons))
            self._started_up = True
        return Readiness(True)

    def opened(self) -> None:
        """Record that all listeners are up."""
        self.has_started = True
        self.readiness_changed()

    def draining(self) -> None:
        """Record that shutdown has begun: the server is unready from now on."""
        self._draining = True
        self.readiness_changed()

    def readiness_changed(self) -> None:
        """Call every readiness listener."""
        for listener in list(self.readiness_listeners):
            listener()


def _worded(text: str, model: str, version: str | None) -> str:
    """Word a refusal as TorchServe does: if the URL names a version, the text has an unbalanced quote."""
    if version is None:
        return text
    return text.replace(f'Model "{model}" ', f'Model "{model}" Version {version}" ', 1)
