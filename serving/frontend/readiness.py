"""What readiness is, and what it takes from one version; `DataPlane` has the rules."""

from __future__ import annotations

from dataclasses import dataclass

from torchere.serving.registry.version import Version, VersionState
from torchere.serving.workers.executor import ExecutorState

ON_THEIR_WAY = (VersionState.NEW, VersionState.LOADING, VersionState.WARMING)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether traffic may come, and if not, why."""

    ready: bool
    reasons: tuple[str, ...] = ()


def unready_because(version: Version) -> str:
    """Why a version that should serve does not, in words."""
    if version.state is not VersionState.READY:
        return f"{version.key} is {version.state.value}"
    states = sorted({status.state.value for status in version.pool.statuses()} - {ExecutorState.READY.value})
    return f"{version.key} has no executor in service ({', '.join(states) or 'all hang'})"


def living(version: Version) -> int:
    """How many of its executors count for `/ping`: those that load or restart do, as in TorchServe.

    So do those that are wanted and that the reconciler makes next: what it is at may take a while.
    """
    if version.state is VersionState.FAILED:
        return 0
    if version.state in ON_THEIR_WAY:
        return version.target
    return version.living_executors + max(0, version.target - version.pool.size)
