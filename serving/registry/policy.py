"""What to do next about a version: a pure function of what it is and what is wanted of it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torchere.serving.registry.version import VersionState


class Step(Enum):
    """What the reconciler can do."""

    LOAD = "load"
    RESIZE = "resize"
    UNLOAD = "unload"  # drain, free everything; back to NEW, or on to GONE when it is not wanted
    REMOVE = "remove"  # nothing is loaded: just forget it


class VersionView(NamedTuple):
    """What the policy may look at."""

    state: VersionState
    wanted: bool
    target: int  # executors wanted
    size: int  # executors there are
    retry: bool  # a FAILED version, or an executor that gave up, is to be tried again


def next_step(view: VersionView) -> Step | None:
    """The single next step towards what is wanted; None: nothing can or need be done."""
    if not view.wanted:
        return _towards_gone(view.state)
    if view.state is VersionState.NEW and view.target > 0:
        return Step.LOAD
    if view.state is VersionState.FAILED and view.retry:
        return Step.LOAD if view.target > 0 else None
    if view.state is VersionState.READY and (view.target != view.size or view.retry):
        return Step.RESIZE if view.target > 0 else Step.UNLOAD
    return None


def _towards_gone(state: VersionState) -> Step | None:
    if state in (VersionState.NEW, VersionState.FAILED):
        return Step.REMOVE
    return Step.UNLOAD if state is VersionState.READY else None


def scaled_target(size: int, min_executors: int, max_executors: int) -> int:
    """How many executors a version gets: it is moved no further than into the range."""
    return min(max(size, min_executors), max_executors)
