"""The life of a version: its states, the legal steps between them, and the lease a request holds."""

from __future__ import annotations

from enum import Enum


class VersionState(Enum):
    """States of one version, in the order of an ordinary life."""

    NEW = "new"  # registered; nothing is loaded, because nobody asked for an executor yet
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"  # admits nothing, finishes what is in
    UNLOADING = "unloading"
    GONE = "gone"
    FAILED = "failed"  # could not be loaded; the cause is kept


TRANSITIONS: dict[VersionState, frozenset[VersionState]] = {
    VersionState.NEW: frozenset({VersionState.LOADING, VersionState.GONE}),
    VersionState.LOADING: frozenset({VersionState.WARMING, VersionState.FAILED}),
    VersionState.WARMING: frozenset({VersionState.READY, VersionState.FAILED}),
    VersionState.READY: frozenset({VersionState.DRAINING}),
    VersionState.DRAINING: frozenset({VersionState.UNLOADING}),
    VersionState.UNLOADING: frozenset({VersionState.NEW, VersionState.GONE}),
    VersionState.FAILED: frozenset({VersionState.LOADING, VersionState.GONE}),
    VersionState.GONE: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A step that the life of a version does not have: a bug in the reconciler."""


def check_transition(old: VersionState, new: VersionState) -> VersionState:
    """Return `new` if a version may go there from `old`.

    Raises:
        IllegalTransition: when it may not.
    """
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"a version cannot go from {old.value} to {new.value}")
    return new
