"""What operators are told of versions that change while they wait."""

import asyncio
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.batching.quarantine import Quarantine
from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import ModelSettings, ServerSettings
from torchere.serving.errors import Conflict, InvalidRequest, LoadFailed, NotFound
from torchere.serving.frontend.call_scope import CallScope
from torchere.serving.frontend.control import ControlPlane, Progress, begun
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.reconciler import Reconciler
from torchere.serving.registry.version import Version, VersionState
from torchere.serving.types import ModelKey


class LoadingRegistry:
    """Knows one version, which loads until the test sets `version.settled`."""

    def __init__(self) -> None:
        self.version: Any = SimpleNamespace(
            key=ModelKey("slow", "1.0"),
            target=1,
            wanted=True,
            failure=None,
            state=VersionState.READY,
            settled=asyncio.Event(),
            settings=ModelSettings(),
            pool=SimpleNamespace(in_service=1),
        )
        self.discarded: list[Any] = []
        self.is_written = asyncio.Event()
        self.is_written.set()

    async def register(self, wanted: Any) -> Any:
        return self.version

    def find(self, model: str, version: str | None) -> Any:
        return self.version

    def scale(self, version: Any, min_executors: int, max_executors: int) -> None:
        """It is loading anyway."""

    async def unregister(self, model: str, version: str | None) -> Any:
        return self.version

    def missing(self) -> tuple[str, ...]:
        return ()

    def set_default(self, model: str, version: str) -> None:
        """It is."""

    async def written(self) -> None:
        await self.is_written.wait()

    def discard(self, version: Any) -> None:
        self.discarded.append(version)


def outcome_of(change: Any, **became: Any) -> tuple[Any, LoadingRegistry]:
    """What a call comes to when its version becomes so while it waits."""

    async def main() -> tuple[Any, LoadingRegistry]:
        registry = LoadingRegistry()
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(change(plane))
        await asyncio.sleep(0)
        assert not waiting.done()
        vars(registry.version).update(became)
        registry.version.settled.set()
        return (await asyncio.gather(waiting, return_exceptions=True))[0], registry

    return asyncio.run(main())


def register(plane: ControlPlane) -> Any:
    return plane.register(Wanted("slow.mar", Asked(executors=1)))


def scale(plane: ControlPlane) -> Any:
    return plane.scale("slow", None, min_executors=1, max_executors=1, synchronous=True)


@pytest.mark.parametrize("change", [register, scale])
@pytest.mark.parametrize("failure", [None, LoadFailed("unregistered", "while it was loading")])
def test_who_waits_for_a_version_that_is_unregistered_is_told_so(change: Any, failure: Any) -> None:
    error, registry = outcome_of(change, wanted=False, failure=failure)
    assert isinstance(error, Conflict)
    assert error.message == "Model version 1.0 of model slow was unregistered while it was loading"
    assert registry.discarded == []  # somebody else has done that, and its name may be another's by now


def test_a_registration_that_does_not_load_is_taken_back() -> None:
    failure = LoadFailed("Failed to start workers", "no weights")
    error, registry = outcome_of(register, failure=failure, state=VersionState.FAILED)
    assert (error, registry.discarded) == (failure, [registry.version])


def test_a_version_that_failed_has_no_executors_if_none_are_wanted() -> None:
    progress, _ = outcome_of(scale, target=0, failure=LoadFailed("Failed to start workers", "no weights"))
    assert progress is Progress.DONE


def test_who_asked_for_more_executors_than_another_call_left_is_not_told_that_they_are_there() -> None:
    def scale_to_two(plane: ControlPlane) -> Any:
        return plane.scale("slow", None, min_executors=2, max_executors=2, synchronous=True)

    progress, _ = outcome_of(scale_to_two, settings=ModelSettings().scaled(1, 1))
    assert progress is Progress.PARTIAL


@pytest.mark.parametrize("in_service", [1, 2])
def test_a_call_that_asks_for_executors_that_are_there_is_not_told_of_the_failure_of_another(
    in_service: int,
) -> None:
    def scale_to_a_range(plane: ControlPlane) -> Any:
        return plane.scale("slow", None, min_executors=2, max_executors=5, synchronous=True)

    failure = LoadFailed("Failed to start workers", "no memory for five")
    pool = SimpleNamespace(in_service=in_service)
    outcome, _ = outcome_of(scale_to_a_range, failure=failure, pool=pool)
    assert outcome is (Progress.DONE if in_service == 2 else failure)


def test_who_asked_for_no_executors_does_not_wait_for_those_of_another_call() -> None:
    def register_none(plane: ControlPlane) -> Any:
        return plane.register(Wanted("slow.mar", Asked()))

    async def main() -> Any:
        registry = LoadingRegistry()
        registry.version.target = 0
        registry.version.settled.set()
        registry.version.settings = ModelSettings().scaled(3, 3)  # the other call
        registry.version.failure = LoadFailed("Failed to start workers", "no memory for three")
        registry.version.state = VersionState.FAILED
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        outcome = await register_none(plane)
        assert registry.discarded == []
        return outcome

    assert asyncio.run(main()).progress is Progress.DONE


class SlowPool:
    """Has its executors, three at most, as soon as it begins; they load until the test says so."""

    def __init__(self) -> None:
        self.size = self.in_service = 0
        self.loaded = asyncio.Event()

    async def resize(self, count: int) -> None:
        if count > 3:
            raise LoadFailed("Failed to start workers", "no room")
        self.size = self.in_service = count
        await self.loaded.wait()

    async def warm_up(self) -> None:
        """They are."""


class BeginningRegistry(LoadingRegistry):
    """Its version has the real reconciler."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlowPool()
        origin: Any = None
        batcher: Any = SimpleNamespace(pump=lambda: None)
        settings = ModelSettings().scaled(3, 3)
        pool: Any = self.pool
        self.version = Version(self.version.key, origin, settings, pool, batcher, observer=origin)
        self.reconciler = Reconciler(1.0, origin)

    async def register(self, wanted: Any) -> Any:
        self.reconciler.wake(self.version)
        return self.version

    def scale(self, version: Any, min_executors: int, max_executors: int) -> None:
        self.reconciler.wake(version)


def test_a_registration_that_has_loaded_is_not_undone_by_the_failure_of_another_call() -> None:
    async def main() -> Any:
        registry = BeginningRegistry()
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        registering = asyncio.ensure_future(register(plane))
        await begun()
        registry.version.target = 4  # the other call, while three load
        registry.reconciler.wake(registry.version)
        registry.pool.loaded.set()
        outcome = await registering
        assert registry.version.failure is not None
        assert registry.discarded == []
        return outcome

    assert asyncio.run(main()).progress is Progress.DONE


def test_who_waits_for_executors_that_gave_up_and_do_not_load_again_is_told_why() -> None:
    async def main() -> None:
        registry = BeginningRegistry()
        registry.pool.loaded.set()
        registry.reconciler.wake(registry.version)
        await registry.version.settled.wait()
        failure = LoadFailed("Failed to start workers", "no memory")

        async def resize(count: int) -> None:
            raise failure

        async def close() -> None:
            """It is empty."""

        registry.pool.size = registry.pool.in_service = 0  # those that gave up are dropped
        vars(registry.pool).update(resize=resize, close=close)
        batcher: Any = SimpleNamespace(pump=lambda: None, fail_queued=lambda error: None)
        registry.version.batcher = batcher
        registry.version.retry = True
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        with pytest.raises(LoadFailed) as caught:
            await scale(plane)
        assert caught.value is failure

    asyncio.run(main())


def register_and_leave(plane: ControlPlane) -> Any:
    return plane.register(Wanted("slow.mar", Asked()), synchronous=False)


def scale_and_leave(plane: ControlPlane) -> Any:
    return plane.scale("slow", None, min_executors=3, max_executors=3, synchronous=False)


@pytest.mark.parametrize("change", [register_and_leave, scale_and_leave])
def test_who_does_not_wait_finds_executors_that_begin_to_load_all_the_same(change: Any) -> None:
    async def main() -> int:
        registry = BeginningRegistry()
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        await change(plane)
        executors = registry.pool.size
        registry.pool.loaded.set()
        await registry.version.settled.wait()
        return executors

    assert asyncio.run(main()) == 3


def test_a_failure_that_is_told_again_and_again_keeps_nobody_who_asked() -> None:
    failure = LoadFailed("Failed to start workers", "no weights")
    for _ in range(3):
        error, _ = outcome_of(scale, failure=failure, pool=SimpleNamespace(in_service=0))
        assert error is failure
    assert len(traceback.extract_tb(failure.__traceback__)) == 1


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (Asked(batch_size=65_537), "batch_size=65537: expected at most 65536."),
        (Asked(executors=1025), "initial_workers=1025: expected 0 to 1024."),
    ],
)
def test_a_wish_beyond_all_bounds_is_refused_before_anything_is_read(wish: Any, text: str) -> None:
    async def main() -> None:
        settings = ServerSettings(model_api_enabled=True)
        await ControlPlane(LoadingRegistry(), None, settings).register(Wanted("m.mar", wish))  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(main())
    assert caught.value.message == text


CHANGES = {
    "register": register,
    "register without workers": lambda plane: plane.register(Wanted("slow.mar", Asked())),
    "scale": scale,
    "unregister": lambda plane: plane.unregister("slow", None),
    "set the default": lambda plane: plane.set_default("slow", "1.0"),
}


def change_being_written(change: Any, meanwhile: Callable[[LoadingRegistry], None]) -> tuple[bool, Any]:
    """Whether a settled change is answered before its snapshot is written, and the registry behind it."""

    async def main() -> tuple[bool, LoadingRegistry]:
        registry = LoadingRegistry()
        registry.is_written.clear()
        registry.version.settled.set()
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        asked = asyncio.ensure_future(change(plane))
        await asyncio.sleep(0.01)
        early = asked.done()
        meanwhile(registry)
        registry.is_written.set()
        await asked
        return early, registry

    return asyncio.run(main())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_in_the_snapshot_before_it_is_answered(change: Any) -> None:
    early, _ = change_being_written(change, lambda registry: None)
    assert early is False


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_in_effect_is_known_to_its_call_also_when_the_client_does_not_wait(change: Any) -> None:
    async def main() -> bool:
        registry = LoadingRegistry()
        registry.is_written.clear()
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        call = CallScope("grpc", 0.0, tuple, lambda error: "INTERNAL")
        asked = asyncio.ensure_future(change(plane))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        return asked.cancelled() and call.has_changed

    assert asyncio.run(main())


@pytest.mark.parametrize("change", [register, scale])
def test_a_registration_that_is_undone_is_not_in_effect_and_a_number_of_executors_is(change: Any) -> None:
    async def main() -> bool:
        registry = LoadingRegistry()
        registry.version.failure = LoadFailed("no")
        registry.version.state = VersionState.FAILED
        registry.version.pool.in_service = 0
        registry.version.settled.set()
        plane = ControlPlane(registry, None, ServerSettings(model_api_enabled=True))  # type: ignore[arg-type]
        call = CallScope("rest", 0.0, tuple, lambda error: 500)
        with pytest.raises(LoadFailed):
            await change(plane)
        return call.has_changed

    assert asyncio.run(main()) == (change is scale)


@pytest.mark.parametrize("change", [register, scale])
def test_what_another_call_makes_of_a_version_while_a_change_is_written_is_not_its_failure(
    change: Any,
) -> None:
    def fail(registry: LoadingRegistry) -> None:
        registry.version.failure = LoadFailed("Model slow was unregistered.", "It was loading.")

    _, registry = change_being_written(change, fail)
    assert registry.discarded == []


def test_the_quarantine_of_a_request_that_is_not_quarantined_is_not_found() -> None:
    async def main() -> None:
        registry = LoadingRegistry()
        registry.version.batcher = SimpleNamespace(quarantine=Quarantine())
        plane = ControlPlane(registry, None, ServerSettings())  # type: ignore[arg-type]
        assert plane.quarantined("slow", "1.0") == []
        assert plane.lift_quarantine("slow", "1.0") == 0
        with pytest.raises(NotFound):
            plane.lift_quarantine("slow", "1.0", "unknown")

    asyncio.run(main())
