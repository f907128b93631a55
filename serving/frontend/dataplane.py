"""What requests touch: protocol-free, shared by every frontend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchere.serving.batching.pending import AwaitedReply, Pending, Reply, told
from torchere.serving.batching.stateful import begin_sequence
from torchere.serving.errors import NotFound, QueueFull, ServingError, Unavailable
from torchere.serving.frontend.call_scope import current_call
from torchere.serving.frontend.model_facts import ModelFacts, facts_of
from torchere.serving.frontend.readiness import ON_THEIR_WAY, Readiness, living, unready_because
from torchere.serving.registry.version import Version, VersionState
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.timeline import Timeline
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, ModelKey, StreamedResponse

if TYPE_CHECKING:  # to run, this room needs no registry, and so no torch: see `preparation.py`
    from torchere.serving.registry.registry import Registry


class Prediction:
    """One admitted request. Stands between its `Pending` and whoever asked, and counts the answer."""

    __slots__ = ("_plane", "_reply", "pending", "target", "timeline", "version")

    def __init__(
        self, plane: DataPlane, target: Version, version: str | None, reply: Reply, timeline: Timeline | None
    ) -> None:
        self._plane = plane
        self._reply = reply
        self.target = target
        self.version = version  # as the request named it
        self.timeline = timeline
        self.pending: Pending | None = None  # None while it is being admitted

    def answered(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """`Reply` of its pending."""
        self._plane.settle(self, outcome)
        reply, self._reply = self._reply, told  # as in `Pending`: who asks holds this
        reply(outcome)

    def hurry(self) -> None:
        """Nothing else is to be done before it is run: see `Admission.hurry`."""
        self.target.batcher.hurry()

    def withdraw(self) -> None:
        """Nobody waits any more: it won't run if it has not started; a stream ends."""
        if self.pending is not None:
            self.target.batcher.withdraw(self.pending)


class DataPlane:
    """Answers requests. All methods run on the event loop and never block it."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics
        self.accepted = 0  # predictions that were admitted
        self.answered = 0  # those of them that have an answer, or an error, or nobody who waits for one
        self._started = False
        self._draining = False
        self._started_up = False  # `startup` said so once
        # Called when readiness may have changed. Executors that are lost or come back do not call them.
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
            ModelNotFound, VersionNotFound: nothing of that name is registered.
            Unavailable, QueueFull: no executor, or no room.
            DeadlineExceeded, HandlerFailed, OutOfResources, ExecutorDied: what became of it.
        """
        scope = current_call()
        if scope is None:  # nobody's call, like one of the server's own
            return await self._infer(model, version, request, group, None)
        timeline = scope.begin(self._metrics, request.request_id)
        try:
            response = await self._infer(model, version, request, group, timeline)
        except ServingError as error:
            scope.failed(timeline, error)
            raise
        except asyncio.CancelledError:
            scope.cancelled(timeline)
            raise
        scope.answered(timeline)
        return response

    async def _infer(
        self, model: str, version: str | None, request: InferRequest, group: str, timeline: Timeline | None
    ) -> InferResponse | StreamedResponse:
        reply = AwaitedReply()
        prediction = self.admit(model, version, request, reply, group, timeline=timeline)
        try:
            return await reply.future
        except asyncio.CancelledError:  # nobody waits any more
            prediction.withdraw()
            raise

    def admit(
        self,
        model: str,
        version: str | None,
        request: InferRequest,
        reply: Reply,
        group: str = "",
        *,
        timeline: Timeline | None = None,
    ) -> Prediction:
        """As `infer`, for callers that are no coroutines: unless it raises, `reply` gets what became of it.

        `timeline` learns which version it was and when it was answered; the caller finishes it.

        Raises:
            ModelNotFound, VersionNotFound, Unavailable, QueueFull, DeadlineExceeded: it was not admitted.
        """
        target = self._find(model, version)
        meter = target.observer.meter
        meter.accepted(version is not None)
        if timeline is not None:
            timeline.meter = meter
            timeline.named = version is not None
        prediction = Prediction(self, target, version, reply, timeline)
        try:
            self._refuse_without_executors(target, version)
            prediction.pending = target.batcher.submit(_prepared(request, target), prediction.answered, group)
        except QueueFull as err:
            meter.refused(err)
            raise QueueFull(_worded(err.message, model, version), err.retry_after_s) from None
        except ServingError as err:
            meter.refused(err)
            raise
        self.accepted += 1
        meter.in_flight += 1
        return prediction

    def _find(self, model: str, version: str | None) -> Version:
        try:
            return self._registry.find(model, version)
        except NotFound as err:
            self._metrics.refused(err)
            raise

    def settle(
        self, prediction: Prediction, outcome: InferResponse | StreamedResponse | ServingError
    ) -> None:
        """Count an answer; `Prediction` calls it."""
        self.answered += 1
        meter, pending, timeline = prediction.target.observer.meter, prediction.pending, prediction.timeline
        meter.in_flight -= 1
        if isinstance(outcome, ServingError):
            meter.failed(outcome, pending)
        elif timeline is not None and pending is not None:
            timeline.answered(pending, time.monotonic())

    def _refuse_without_executors(self, target: Version, version: str | None) -> None:
        if target.target == 0 or target.state is VersionState.FAILED or not target.has_living_executor:
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

    def facts(self, model: str, version: str | None) -> ModelFacts:
        """What clients may learn of a version; raises `ModelNotFound` or `VersionNotFound`."""
        found = self._registry.find(model, version)
        versions = tuple(self._registry.served()[model].versions)
        return facts_of(found, versions, self._metrics.statistics.of(*found.key))

    def registered(self) -> list[ModelKey]:
        """Every registered version."""
        return [version.key for version in self._registry.versions()]

    def healthy(self) -> bool:
        """The rule of `/ping`: every default version has as many living executors as it should.

        Executors that load or restart count as living, as in TorchServe; `readiness` asks for more.
        """
        return all(
            living(default) >= default.settings.min_executors
            for default in (self._registry.find(name, None) for name in self._registry.served())
        )

    def readiness(self) -> Readiness:
        """The rule of `/readyz`: started, not draining, and all that should be ready is there, and is."""
        reasons = [
            f"model {name} could not be registered; the log says why" for name in self._registry.missing()
        ]
        if not self._started:
            reasons.append("the server is starting")
        if self._draining:
            reasons.append("the server is shutting down")
        for version in self._registry.versions():
            if version.target > 0 and not version.ready:
                reasons.append(unready_because(version))
        return Readiness(not reasons, tuple(reasons))

    def model_readiness(self, model: str, version: str | None) -> Readiness:
        """The rule of `/readyz/{model}`: as `readiness`, for one version alone.

        A version is ready while an executor that is loaded, warm and alive may take its requests.

        Raises:
            ModelNotFound, VersionNotFound: it is not registered.
        """
        found = self._registry.find(model, version)
        reasons = () if found.ready else (unready_because(found),)
        if self._draining:
            reasons = (*reasons, "the server is shutting down")
        return Readiness(not reasons, reasons)

    def startup(self) -> Readiness:
        """The rule of `/startupz`: the first load of every model of the start is over, well or not.

        It stays so: what is restarted or registered later is for `readiness` to tell. A model that will not
        load does not count against it, or its healthy neighbours would be killed with it again and again.
        """
        if not self._started_up:
            reasons = [] if self._started else ["the server is starting"]
            for version in self._registry.versions():
                if version.origin.loaded_at_startup and version.target > 0 and version.state in ON_THEIR_WAY:
                    reasons.append(unready_because(version))
            if reasons:
                return Readiness(False, tuple(reasons))
            self._started_up = True
        return Readiness(True)

    def opened(self) -> None:
        """All listeners are up."""
        self._started = True
        self.readiness_changed()

    def draining(self) -> None:
        """The end has begun: unready from now on."""
        self._draining = True
        self.readiness_changed()

    def readiness_changed(self) -> None:
        """Have those that watch readiness look at it."""
        for listener in list(self.readiness_listeners):
            listener()


def _prepared(request: InferRequest, target: Version) -> InferRequest:
    if target.settings.sequences is not None:
        request = begin_sequence(request)
    return _with_deadline(request, target)


def _with_deadline(request: InferRequest, target: Version) -> InferRequest:
    client_timeout_ms = target.settings.client_timeout_ms
    if request.deadline_s != NO_DEADLINE or not client_timeout_ms:
        return request
    deadline_s = time.monotonic() + client_timeout_ms / 1000
    return InferRequest(request.request_id, request.parameters, request.headers, deadline_s, request.priority)


def _worded(text: str, model: str, version: str | None) -> str:
    """The contract's refusal; with a version in the URL it reads differently, unbalanced quote and all."""
    if version is None:
        return text
    return text.replace(f'Model "{model}" ', f'Model "{model}" Version {version}" ', 1)
