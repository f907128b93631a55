"""The reconciler's policy as a table of states."""

import pytest

from torchere.serving.registry.version import (
    TRANSITIONS,
    IllegalTransition,
    Step,
    Version,
    VersionState,
    VersionView,
    next_step,
)

S = VersionState
CASES = {
    "a new version without wanted executors rests": (VersionView(S.NEW, True, 0, 0, False), None),
    "a new version loads": (VersionView(S.NEW, True, 2, 0, False), Step.LOAD),
    "a ready version of the wanted size rests": (VersionView(S.READY, True, 2, 2, False), None),
    "a ready version grows": (VersionView(S.READY, True, 3, 2, False), Step.RESIZE),
    "a ready version shrinks": (VersionView(S.READY, True, 1, 2, False), Step.RESIZE),
    "a ready version with nothing wanted unloads": (VersionView(S.READY, True, 0, 2, False), Step.UNLOAD),
    "a ready version whose executor gave up is tried again": (
        VersionView(S.READY, True, 2, 2, True),
        Step.RESIZE,
    ),
    "a failed version is not tried again by itself": (VersionView(S.FAILED, True, 1, 0, False), None),
    "a failed version is tried again when asked": (VersionView(S.FAILED, True, 1, 0, True), Step.LOAD),
    "a failed version scaled to nothing rests": (VersionView(S.FAILED, True, 0, 0, True), None),
    "an unwanted ready version unloads": (VersionView(S.READY, False, 2, 2, False), Step.UNLOAD),
    "an unwanted new version is removed": (VersionView(S.NEW, False, 0, 0, False), Step.REMOVE),
    "an unwanted failed version is removed": (VersionView(S.FAILED, False, 1, 0, False), Step.REMOVE),
    "a version that is gone stays gone": (VersionView(S.GONE, False, 0, 0, False), None),
}


@pytest.mark.parametrize(("view", "expected"), CASES.values(), ids=CASES.keys())
def test_next_step(view: VersionView, expected: Step | None) -> None:
    assert next_step(view) is expected


@pytest.mark.parametrize("state", S)
def test_every_state_but_the_last_has_a_way_on(state: VersionState) -> None:
    assert bool(TRANSITIONS[state]) is (state is not S.GONE)


def test_an_illegal_step_is_refused_by_name() -> None:
    version = object.__new__(Version)
    version.state = S.GONE
    with pytest.raises(IllegalTransition, match="from gone to ready"):
        version.enter(S.READY)
    assert version.state is S.GONE
