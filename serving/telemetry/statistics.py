"""How often and how long each version ran, in plain numbers: for APIs that show them as JSON.

Prometheus has its own families; nothing here is one. Lives on the event loop, so there is no lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Spent:
    """How often something happened, and how long that took in all."""

    count: int = 0
    seconds: float = 0.0

    @property
    def ns(self) -> int:
        """The time in whole nanoseconds."""
        return round(self.seconds * 1e9)

    def add(self, seconds: float, times: int = 1) -> None:
        """It happened `times` times, for `seconds` each time."""
        self.count += times
        self.seconds += seconds * times


@dataclass(slots=True)
class BatchSizeStatistics:
    """Batches of one size."""

    handler: Spent = field(default_factory=Spent)
    around: Spent = field(default_factory=Spent)  # what the executor adds: hand-over, decoding, encoding


@dataclass(slots=True)
class VersionStatistics:
    """What one version did since it was registered. A request counts once, however many rows it has."""

    success: Spent = field(default_factory=Spent)  # from admission to answer
    fail: Spent = field(default_factory=Spent)
    queue: Spent = field(default_factory=Spent)  # of requests that were run
    handler: Spent = field(default_factory=Spent)
    around: Spent = field(default_factory=Spent)
    executions: int = 0  # calls of the handler
    last_ms: int = 0  # when the last batch ended, milliseconds since 1970; 0: never
    batches: dict[int, BatchSizeStatistics] = field(default_factory=dict)  # by size

    def batch_finished(
        self, succeeded_s: Sequence[float], failed_s: Sequence[float], executor_s: float, handler_s: float
    ) -> None:
        """A batch was answered.

        Args:
            succeeded_s: for each request that has an answer, how long it waited.
            failed_s: likewise for each that ended with an error.
            executor_s: from dispatch to report.
            handler_s: of that, in the handler.
        """
        around_s = max(0.0, executor_s - handler_s)
        if succeeded_s:
            self._over(self.success, succeeded_s, executor_s)
            self.handler.add(handler_s, len(succeeded_s))
            self.around.add(around_s, len(succeeded_s))
        if failed_s:
            self._over(self.fail, failed_s, executor_s)
        self.executions += 1
        self.last_ms = time.time_ns() // 1_000_000
        if size := len(succeeded_s) + len(failed_s):
            of_size = self.batches.get(size)
            if of_size is None:
                of_size = self.batches[size] = BatchSizeStatistics()
            of_size.handler.add(handler_s)
            of_size.around.add(around_s)

    def _over(self, spent: Spent, waits_s: Sequence[float], executor_s: float) -> None:
        count, waited_s = len(waits_s), sum(waits_s)
        spent.count += count
        spent.seconds += waited_s + count * executor_s
        self.queue.count += count
        self.queue.seconds += waited_s


class StatisticsTable:
    """The statistics of every registered version."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], VersionStatistics] = {}

    def of(self, model: str, version: str) -> VersionStatistics:
        """Those of one version, which begin when they are first asked for."""
        return self._versions.setdefault((model, version), VersionStatistics())

    def forget(self, model: str, version: str) -> None:
        """The version is gone."""
        self._versions.pop((model, version), None)
