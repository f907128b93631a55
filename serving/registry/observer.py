"""Who wants to know what happens to versions; `serving/observation.py` turns it into metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torchere.serving.batching.pending import Pending
from torchere.serving.execution.executor import BatchReport
from torchere.serving.types import ModelKey


class VersionObserver(Protocol):
    """Watches one version. Called on the event loop."""

    def batch_finished(self, pendings: Sequence[Pending], report: BatchReport, executor_s: float) -> None:
        """A batch was answered; `executor_s` is from its dispatch to its report."""

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """An executor is ready, `load_s` after it was started."""


class RegistryObserver(Protocol):
    """Watches a registry. Called on the event loop."""

    def watch(self, key: ModelKey) -> VersionObserver:
        """A version is being built."""

    def registered(self, key: ModelKey, queue_length: Callable[[], int]) -> None:
        """It is in the serving map now; `queue_length` tells at any time how many requests wait."""

    def gone(self, key: ModelKey, *, was_last: bool) -> None:
        """A version is gone; `was_last` when the model has no other."""
