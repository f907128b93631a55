"""What counts for `/ping`."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.frontend.dataplane import living
from torchere.serving.registry.version import VersionState


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
