"""Who wants to know what happens to versions; `serving/observation.py` turns it into metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchere.handlers.metric_types import MetricDeclaration
from torchere.serving.batching.admission import Admission
from torchere.serving.batching.pending import Pending
from torchere.serving.execution.executor import BatchReport, ExecutorPool
from torchere.serving.types import ModelKey


class VersionObserver(Protocol):
    """Watches one version. Called on the event loop."""

    def batch_finished(self, pendings: Sequence[Pending], report: BatchReport, executor_s: float) -> None:
        """A batch was answered; `executor_s` is from its dispatch to its report."""

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """An executor is ready, `load_s` after it was started."""


class RegistryObserver(Protocol):
    """Watches a registry. Called on the event loop."""

    @property
    def declared_metrics(self) -> tuple[MetricDeclaration, ...]:
        """The metrics that handlers find in `context.metrics`."""

    def watch(self, key: ModelKey) -> VersionObserver:
        """A version is being built."""

    def registered(self, key: ModelKey, batcher: Admission, pool: ExecutorPool) -> None:
        """It is in the serving map now; `batcher` and `pool` tell at any time how loaded it is."""

    def gone(self, key: ModelKey, *, was_last: bool) -> None:
        """A version is gone; `was_last` when the model has no other."""
