"""Who wants to know what happens to versions; `serving/observation.py` turns it into metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torchere.handlers.metric_types import MetricDeclaration
from torchere.serving.execution.executor import BatchReport
from torchere.serving.execution.run import Run
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import ModelKey

if TYPE_CHECKING:
    from torchere.serving.registry.version import Version


class VersionObserver(Protocol):
    """Watches one version. Called on the event loop."""

    @property
    def meter(self) -> VersionNumbers:
        """What counts its requests."""

    def batches_running(self, batches: int, now_s: float) -> None:
        """The number of batches that executors have, or were sent, has changed to `batches`."""

    def batch_finished(self, run: Run, report: BatchReport, executor_s: float) -> None:
        """A run was answered, `executor_s` after a lane began with it."""

    def left_unread(self) -> None:
        """A streamed answer was given up, because its client read it too slowly."""

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """An executor is ready, `load_s` after it was started."""

    def executor_lost(self, reason: str) -> None:
        """An executor was lost, and comes back if it can; `reason` is one of a fixed set of words."""


class RegistryObserver(Protocol):
    """Watches a registry. Called on the event loop."""

    @property
    def declared_metrics(self) -> tuple[MetricDeclaration, ...]:
        """The metrics that handlers find in `context.metrics`."""

    def watch(self, key: ModelKey) -> VersionObserver:
        """A version is being built."""

    def registered(self, version: Version, weight: Callable[[], float]) -> None:
        """It is in the serving map now.

        It tells at any time how loaded it is, and `weight` its share of the requests that name no version.
        """

    def gone(self, version: Version, *, was_last: bool) -> None:
        """A version is gone; `was_last` when the model has no other."""
