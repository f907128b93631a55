"""What counts for `/ping`, and what is told of a version without an executor in service."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.frontend.dataplane import DataPlane, living, unready_because
from torchere.serving.registry.version import VersionState, condition
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import ModelKey
from torchere.serving.workers.executor import ExecutorState


def version(state: VersionState, *, target: int, size: int, gave_up: int = 0) -> Any:
    pool = SimpleNamespace(size=size)
    return SimpleNamespace(state=state, target=target, pool=pool, living_executors=size - gave_up)


@pytest.mark.parametrize(
    ("one", "count"),
    [
        (version(VersionState.READY, target=2, size=2), 2),
        (version(VersionState.READY, target=2, size=2, gave_up=1), 1),
        (version(VersionState.LOADING, target=2, size=0), 2),
        (version(VersionState.FAILED, target=2, size=0), 0),
        # Scaled, and the reconciler comes to that next.
        (version(VersionState.READY, target=3, size=1), 3),
        (version(VersionState.READY, target=3, size=2, gave_up=1), 2),
        (version(VersionState.READY, target=1, size=3), 3),
        (version(VersionState.UNLOADING, target=1, size=0), 1),
        (version(VersionState.UNLOADING, target=0, size=0), 0),
    ],
)
def test_executors_that_are_on_their_way_count_and_those_that_gave_up_do_not(one: Any, count: int) -> None:
    assert living(one) == count


@pytest.mark.parametrize(
    ("state", "executors", "told"),
    [
        (VersionState.LOADING, ["starting"], "loading"),
        (VersionState.FAILED, [], "failed"),
        (VersionState.READY, ["restarting", "failed"], "restarting"),
        (VersionState.READY, ["ready"], "restarting"),  # the connection ended, and not yet the process
        (VersionState.READY, ["suspect", "failed"], "suspect"),
        (VersionState.READY, ["failed", "failed"], "failed"),
    ],
)
def test_describe_and_probes_say_the_same_of_a_version_without_an_executor_in_service(
    state: VersionState, executors: list[str], told: str
) -> None:
    statuses = tuple(SimpleNamespace(state=ExecutorState(each)) for each in executors)
    pool = SimpleNamespace(statuses=lambda: statuses)
    one: Any = SimpleNamespace(key=ModelKey("m", "1"), state=state, ready=False, pool=pool)
    assert condition(one) == told
    assert told in unready_because(one)
    where = ": GET /models/m on the management port, or the server's log, says why"
    assert unready_because(one).endswith(where) is (told == "failed")


def test_a_version_with_an_executor_in_service_is_ready() -> None:
    one: Any = SimpleNamespace(state=VersionState.READY, ready=True)
    assert condition(one) == "ready"


@pytest.mark.parametrize("at_startup", [True, False])
@pytest.mark.parametrize("of_all", [True, False])
def test_a_model_that_was_registered_after_the_start_makes_the_server_unready_only_if_set(
    at_startup: bool, of_all: bool
) -> None:
    one = SimpleNamespace(key="m:1", state=VersionState.LOADING, target=1, ready=False)
    registry: Any = SimpleNamespace(
        missing=list,
        versions=lambda: [one],
        find=lambda model, version: one,
        of_the_start=lambda version: at_startup,
    )
    plane = DataPlane(registry, Metrics(), readiness_of_all_models=of_all)
    plane.opened()
    assert plane.readiness().ready is not (at_startup or of_all)
    assert not plane.model_readiness("m", None).ready
