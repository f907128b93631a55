"""The reconciler's policy as a table of states."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.registry.version import (
    TRANSITIONS,
    IllegalTransition,
    Step,
    Version,
    VersionState,
    next_step,
)

S = VersionState


def in_state(state: VersionState, wanted: bool, target: int, size: int, retry: bool = False) -> Any:
    pool = SimpleNamespace(size=size)
    return SimpleNamespace(state=state, wanted=wanted, target=target, pool=pool, retry=retry)


CASES = {
    "a new version without wanted executors rests": (in_state(S.NEW, True, 0, 0), None),
    "a new version loads": (in_state(S.NEW, True, 2, 0), Step.LOAD),
    "a ready version of the wanted size rests": (in_state(S.READY, True, 2, 2), None),
    "a ready version grows": (in_state(S.READY, True, 3, 2), Step.RESIZE),
    "a ready version shrinks": (in_state(S.READY, True, 1, 2), Step.RESIZE),
    "a ready version with nothing wanted unloads": (in_state(S.READY, True, 0, 2), Step.UNLOAD),
    "a ready version whose executor gave up is tried again": (
        in_state(S.READY, True, 2, 2, retry=True),
        Step.RESIZE,
    ),
    "a failed version is not tried again by itself": (in_state(S.FAILED, True, 1, 0), None),
    "a failed version is tried again when asked": (in_state(S.FAILED, True, 1, 0, retry=True), Step.LOAD),
    "a failed version scaled to nothing rests": (in_state(S.FAILED, True, 0, 0, retry=True), None),
    "an unwanted ready version unloads": (in_state(S.READY, False, 2, 2), Step.UNLOAD),
    "an unwanted new version is removed": (in_state(S.NEW, False, 0, 0), Step.REMOVE),
    "an unwanted failed version is removed": (in_state(S.FAILED, False, 1, 0), Step.REMOVE),
    "a version that is gone stays gone": (in_state(S.GONE, False, 0, 0), None),
}


@pytest.mark.parametrize(("version", "expected"), CASES.values(), ids=CASES.keys())
def test_next_step(version: Version, expected: Step | None) -> None:
    assert next_step(version) is expected


@pytest.mark.parametrize("state", S)
def test_every_state_but_the_last_has_a_way_on(state: VersionState) -> None:
    assert bool(TRANSITIONS[state]) is (state is not S.GONE)


def test_an_illegal_step_is_refused_by_name() -> None:
    version = object.__new__(Version)
    version.state = S.GONE
    with pytest.raises(IllegalTransition, match="from gone to ready"):
        version.enter(S.READY)
    assert version.state is S.GONE
