"""The control plane: operations of the management API, independent of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from torchere.serving.batching.quarantine import ConvictedRequest
from torchere.serving.batching.request import alone
from torchere.serving.config.kinds import shown_url
from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import (
    MAX_BATCH_SIZE,
    MAX_EXECUTORS,
    MAX_NUMBER,
    ModelSettings,
    Placement,
    ServerSettings,
)
from torchere.serving.errors import (
    Conflict,
    HandlerFailed,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Unavailable,
    UnregisterTimeout,
)
from torchere.serving.frontend.call_scope import changed, manages
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.workflows import Page, WorkflowPlane, paged
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.version import Version, VersionState, condition, load_failure
from torchere.serving.registry.workflows import Workflows
from torchere.serving.types import InferRequest, InferResponse, ModelKey, StreamedResponse
from torchere.serving.workers.executor import ExecutorStatus

if TYPE_CHECKING:
    from torchere.serving.registry.registry import Registry


class Progress(Enum):
    """How far a change had progressed when the call returned."""

    DONE = "done"
    STARTED = "started"  # the caller did not want to wait
    PARTIAL = "partial"  # the caller waited, but fewer executors than it asked for are in service


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered version."""

    key: ModelKey
    executors: int  # how many it was registered with
    progress: Progress


@dataclass(frozen=True, slots=True)
class VersionDescription:
    """Everything that `describe` reports about one version; a snapshot."""

    key: ModelKey
    url: str  # exactly as given at registration
    runtime: str
    settings: ModelSettings
    isolation: Placement
    state: VersionState
    condition: str  # the state, or that of its executors while a ready version has none in service
    failure: str  # cause of FAILED, or of the last lost executor; "" when all is well
    loaded_at_startup: bool
    executors: tuple[ExecutorStatus, ...]
    queue_capacity: int  # how many more requests may wait
    queue_length: int
    uses_venv: bool = False  # its workers run in a virtual environment of their own
    signer: str = ""  # of the archive; "" when signatures are not required
    quarantined: int = 0  # requests that are not run for now, because they crash executors


class ControlPlane:
    """Registers, scales, describes and unregisters models. Used on the event loop, which it never blocks.

    Changes are written to the snapshot before the call returns, except by calls that do not wait. Methods
    that take a model or a version raise `ModelNotFound` or `VersionNotFound` if it is not registered.
    """

    def __init__(self, registry: Registry, dataplane: DataPlane, settings: ServerSettings) -> None:
        self._registry = registry
        self._dataplane = dataplane
        self._settings = settings
        self.default_executors = settings.default_executors  # of a registration that names no number
        self.workflows = WorkflowPlane(
            Workflows(settings, registry),
            dataplane,
            self.check_model_api,
            settings.limits.max_response_bytes,
        )

    async def register(self, wish: Wanted, *, synchronous: bool = True) -> Registered:
        """Register an archive of the store.

        Args:
            wish: the archive and its settings; the frontends check that no number exceeds `MAX_NUMBER`.
            synchronous: wait until the version is loaded.

        Raises:
            NotAllowed: the model API is off.
            InvalidRequest, ModelNotFound, InvalidArchive, DownloadFailed, Conflict: nothing was registered.
            LoadFailed: loading failed; the version is unregistered again (only when synchronous).
            Conflict: another call unregistered the version while it was loading (only when synchronous).
        """
        manages(wish.name or shown_url(wish.url))
        self.check_model_api()
        _check_numbers(wish.asked)
        version = await self._registry.register(wish)
        changed()
        manages(*version.key)
        executors = version.target
        if executors and not synchronous:
            await begun()
            return Registered(version.key, executors, Progress.STARTED)
        await settled(version)
        # Read now, because a later failure belongs to another call. So does any failure of a version that was
        # registered without executors: another call has scaled it up.
        failure = load_failure(version) if executors else None
        if failure is not None:
            self._registry.discard(version)
            changed(False)
            await version.settled.wait()
        progress = _progress(version, executors)
        await self._registry.written()
        if failure is not None:
            raise failure.with_traceback(None)  # else each raise would add its frames and keep them alive
        return Registered(version.key, executors, progress)

    async def unregister(self, model: str, version: str | None) -> None:
        """Remove a version (None: the default one) after its requests are answered.

        Raises:
            NotAllowed, DefaultVersionInUse, UnregisterTimeout.
        """
        manages(model, version)
        self.check_model_api()
        missing = self._registry.missing()
        try:
            leaving = await self._registry.unregister(model, version)
        except NotFound:
            if self._registry.missing() != missing:  # it was missing, and is no longer expected
                changed()
                await self._registry.written()
            raise
        changed()
        try:
            await asyncio.wait_for(leaving.settled.wait(), self._settings.unregister_timeout_s)
        except asyncio.TimeoutError:
            raise UnregisterTimeout(f"Timed out while cleaning resources: {model}") from None
        await self._registry.written()

    def check_model_api(self) -> None:
        """Raise `NotAllowed` when the model API is off. `register` and `unregister` call it.

        Frontends call it before they validate the request: a corrected request would be refused too.
        """
        if not self._settings.model_api_enabled:
            raise NotAllowed(
                "Requested method is not allowed, please refer to API document.",
                "the model API is off: start with --enable-model-api, or set enable_model_api=true",
            )

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
            InvalidRequest: max below min, or a number out of range (checked before the model is looked up).
            LoadFailed: an executor failed, and fewer than `min_executors` serve (only when synchronous).
            Conflict: the version was unregistered meanwhile (only when synchronous).
        """
        manages(model, version)
        if max_executors < min_executors:
            raise InvalidRequest("max_worker cannot be less than min_worker.")
        if min_executors < 0 or max_executors > MAX_EXECUTORS:
            raise InvalidRequest(
                f"min_worker={min_executors}, max_worker={max_executors}: expected 0 to {MAX_EXECUTORS}."
            )
        target = self._registry.find(model, version)
        self._registry.scale(target, min_executors, max_executors)
        changed()
        if not synchronous:
            await begun()
            return Progress.STARTED
        await settled(target)
        progress = _progress(target, min_executors)
        # If as many executors as this call asks for are in service, a concurrent call asked for the failed
        # ones. If the target is 0, an old failure does not matter.
        failure = target.failure if target.target and progress is Progress.PARTIAL else None
        await self._registry.written()
        if failure is not None:
            raise failure.with_traceback(None)
        return progress

    async def set_default(self, model: str, version: str) -> None:
        """Make `version` the default version, used by requests that name none."""
        manages(model, version)
        self._registry.set_default(model, version)
        changed()
        await self._registry.written()

    def describe(self, model: str, version: str | None) -> list[VersionDescription]:
        """Describe one version (None: the default; "all": every version)."""
        if version != "all":
            return [_describe(self._registry.find(model, version))]
        self._registry.find(model, None)
        return [_describe(one) for one in self._registry.served()[model].versions.values()]

    def quarantined(self, model: str, version: str) -> list[ConvictedRequest]:
        """Return the requests that a version does not run, because they crash its executors."""
        return self._registry.find(model, version).batcher.quarantine.convicts()

    def lift_quarantine(self, model: str, version: str, digest: str | None = None) -> int:
        """Let a quarantined request run when it is sent again (None: all of them); return their number.

        Raises:
            NotFound: no request of that digest is quarantined.
        """
        manages(model, version)
        lifted = self._registry.find(model, version).batcher.quarantine.lift(digest)
        if digest is not None and not lifted:
            raise NotFound(f"No request of digest {digest} is quarantined.")
        return lifted

    async def describe_customized(
        self, model: str, version: str | None, request: InferRequest
    ) -> tuple[VersionDescription, InferResponse]:
        """Describe one version and call its handler's `describe_handle` (`request` supplies the headers).

        Raises:
            Unavailable, HandlerFailed: no executor can answer, or the handler failed or answered in parts.
        """
        target = self._registry.find(model, version)
        if target.target == 0:
            raise Unavailable(
                f'Model "{model}" has no worker to serve describe request. '
                "Please use scale workers API to add workers."
            )
        asked = msgspec.structs.replace(request, headers=(*request.headers, ("describe", "True")))
        answer = await self._dataplane.infer(model, version, asked, group=alone(asked.request_id))
        if isinstance(answer, StreamedResponse):
            raise HandlerFailed("Failed to get customized model metadata.", status=500)
        return _describe(target), answer

    def list_models(self, limit: int, page_token: int) -> Page:
        """Return one page of at most `limit` models with the URLs of their default versions; see `paged`."""
        origins = {name: self._registry.find(name, None).origin for name in sorted(self._registry.served())}
        # Functions of workflows are hidden, as in TorchServe; the models of workflows are not.
        known = [(name, origin.archive.url) for name, origin in origins.items() if not origin.is_function]
        return paged(known, limit, page_token)

    def has_executors(self, model: str) -> bool:
        """Whether the default version has at least one executor (KServe v1 readiness)."""
        return self._registry.find(model, None).pool.size > 0


def _check_numbers(asked: Asked) -> None:
    if asked.executors > MAX_EXECUTORS or asked.executors < 0:
        raise InvalidRequest(f"initial_workers={asked.executors}: expected 0 to {MAX_EXECUTORS}.")
    if asked.batch_size is not None and asked.batch_size > MAX_BATCH_SIZE:
        raise InvalidRequest(f"batch_size={asked.batch_size}: expected at most {MAX_BATCH_SIZE}.")


def _progress(version: Version, asked: int) -> Progress:
    """Compare the executors in service with the number that this call asked for, not with the target."""
    return Progress.DONE if version.pool.in_service >= asked else Progress.PARTIAL


def _describe(version: Version) -> VersionDescription:
    environment, isolation = version.origin.archive.environment, version.origin.isolation
    return VersionDescription(
        key=version.key,
        url=version.origin.archive.url,
        runtime=version.origin.runtime,
        settings=version.settings,
        isolation="thread" if isolation == "shared" and version.pool.has_own_process else isolation,
        state=version.state,
        condition=condition(version),
        failure=version.failure_text,
        loaded_at_startup=version.origin.loaded_at_startup,
        uses_venv=environment is not None and environment.python is not None,
        executors=version.pool.statuses(),
        queue_capacity=version.batcher.queue_capacity,
        queue_length=version.batcher.queue_length,
        quarantined=version.batcher.quarantine.convicted,
        signer=version.origin.archive.signer,
    )


_TURNS_TO_BEGIN = 2  # loop iterations: in the first the reconciler's task starts, then the pool's work


async def begun() -> None:
    """Yield to the event loop until an idle reconciler has started, for a call that is not synchronous.

    Once it has started, the planned executors count, as they do in TorchServe before it answers: requests
    wait for them, and `describe` lists them. A local client may call within a millisecond.
    A busy reconciler (draining, for example) starts later; this function does not wait for it.
    """
    for _ in range(_TURNS_TO_BEGIN):
        await asyncio.sleep(0)


async def settled(version: Version) -> None:
    """Wait until a version has reached its desired state.

    Raises:
        Conflict: the version was unregistered meanwhile.
    """
    await version.settled.wait()
    if not version.wanted:
        name, number = version.key
        raise Conflict(f"Model version {number} of model {name} was unregistered while it was loading")


UNSET_BATCH_SIZE = -1  # TorchServe's own defaults; sending them means the same as leaving them out
UNSET_BATCH_DELAY = -100


def integer(values: Mapping[str, object], name: str) -> int | None:
    """Return the integer called `name`; None when it is absent or empty.

    Raises:
        InvalidRequest: the value is not an integer, or its magnitude exceeds `MAX_NUMBER`. (TorchServe uses
            its default instead.)
    """
    value = values.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, float) and value.is_integer():  # some clients write every number as 1.0
        value = int(value)
    try:
        number = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None:
        raise InvalidRequest(f"Parameter {name} must be a whole number, found: {str(value)[:100]!r}")
    if abs(number) > MAX_NUMBER:
        raise InvalidRequest(f"Parameter {name} must be a whole number of at most {MAX_NUMBER}")
    return number


def text(values: Mapping[str, object], name: str) -> str | None:
    """Return the string called `name`; None when it is absent or empty.

    Raises:
        InvalidRequest: the value is not a string.
    """
    value = values.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"Parameter {name} must be a text, found: {str(value)[:100]!r}")
    return value


def flag(values: Mapping[str, object], name: str, default: bool) -> bool:
    """Return the boolean called `name`. Every string except `true` (in any letter case) is false.

    Raises:
        InvalidRequest: the value is neither a boolean nor a string.
    """
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, (bool, str)):
        raise InvalidRequest(f"Parameter {name} must be true or false, found: {str(value)[:100]!r}")
    return value is True or str(value).lower() == "true"


def registration(values: Mapping[str, object], default_executors: int) -> Wanted:
    """Read the archive and its settings from query parameters, a JSON object, or the fields of a message.

    Raises:
        InvalidRequest: `url` is missing, or a value has the wrong type.
    """
    if values.get("url") is None:
        raise InvalidRequest("Parameter url is required.")
    url = text(values, "url") or ""
    batch_size = integer(values, "batch_size")
    batch_delay = integer(values, "max_batch_delay")
    executors = integer(values, "initial_workers")
    asked = Asked(
        batch_size=None if batch_size == UNSET_BATCH_SIZE else batch_size,
        max_batch_delay_ms=None if batch_delay == UNSET_BATCH_DELAY else batch_delay,
        executors=default_executors if executors is None else executors,
        response_timeout_s=integer(values, "response_timeout"),
        startup_timeout_s=integer(values, "startup_timeout"),
    )
    return Wanted(
        url,
        asked,
        name=text(values, "model_name"),
        handler=text(values, "handler"),
        runtime=text(values, "runtime"),
        signs=flag(values, "s3_sse_kms", default=False),
    )
