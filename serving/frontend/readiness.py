"""Readiness results, and the state of one version that they depend on; `DataPlane` has the rules."""

from __future__ import annotations

from dataclasses import dataclass

from torchere.serving.registry.version import Version, VersionState
from torchere.serving.workers.executor import ExecutorState

ON_THEIR_WAY = (VersionState.NEW, VersionState.LOADING, VersionState.WARMING)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the server or a version can take traffic, and if not, the reasons."""

    ready: bool
    reasons: tuple[str, ...] = ()


def unready_because(version: Version) -> str:
    """Return the reason why a version is not ready, as text."""
    if version.state is not VersionState.READY:
        return f"{version.key} is {version.state.value}"
    states = sorted({status.state.value for status in version.pool.statuses()} - {ExecutorState.READY.value})
    return f"{version.key} has no executor in service ({', '.join(states) or 'all hang'})"


def living(version: Version) -> int:
    """Return how many executors count for `/ping`; loading and restarting ones do, as in TorchServe.

    Wanted executors that the reconciler has yet to create count too: its current work may take a while.
    """
    if version.state is VersionState.FAILED:
        return 0
    if version.state in ON_THEIR_WAY:
        return version.target
    return version.living_executors + max(0, version.target - version.pool.size)
