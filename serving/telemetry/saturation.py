"""`torchere_saturation`: the share of a version's executors that its recent requests need.

One number for autoscalers, alerts and dashboards: 0 if idle, about 1 if every executor is always busy, up to
2 if the queue is full or requests are rejected. It is a mean over `WINDOW_S`, not a point sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

WINDOW_S = 5.0
TICK_S = 0.5  # interval of queue samples; busy time and rejections are summed between two samples


def saturation(*, busy_s: float, executor_s: float, queue_share: float, refused: int, offered: int) -> float:
    """Return the saturation of a version over a period.

        min(1, busy_s / executor_s) + min(1, max(queue_share, refused / offered))

    `busy_s` sums the time in which executors had a batch, and `executor_s` the time in which they were in
    service (0 without executors). `queue_share` is the mean of waiting requests / queue capacity. Requests
    are `refused` because the queue was full or their deadline too near; `offered` includes them.
    """
    busy_share = min(1.0, busy_s / executor_s) if executor_s > 0 else 0.0
    refused_share = refused / offered if offered else 0.0
    return busy_share + min(1.0, max(queue_share, refused_share))


class LoadSample(NamedTuple):
    """The load of a version at one point in time."""

    queued: int = 0  # waiting requests
    queue_room: int = 0  # further requests that may wait
    executors: int = 0  # in service
    wanted: int = 0  # executors that should be in service

    @property
    def queue_share(self) -> float:
        """Waiting requests / queue capacity."""
        places = self.queued + self.queue_room
        return self.queued / places if places else 0.0


class BusyTime:
    """Sums the time that executors had a batch. Call it on the event loop only.

    A batch that was dispatched early waits in the worker for the batch before it. So there are never more
    batches counted than there are executors.
    """

    __slots__ = ("_running", "_since_s", "_total_s", "executors")

    def __init__(self) -> None:
        self.executors = 0  # in service, as last set by `scaled`
        self._running = 0
        self._since_s = 0.0
        self._total_s = 0.0

    def changed(self, running: int, now_s: float) -> None:
        """Set the number of dispatched batches without an answer."""
        busy = self._running if self._running < self.executors else self.executors
        self._total_s += busy * (now_s - self._since_s)
        self._since_s = now_s
        self._running = running

    def scaled(self, executors: int, now_s: float) -> None:
        """Set the number of executors in service."""
        self.changed(self._running, now_s)
        self.executors = executors

    def total_s(self, now_s: float) -> float:
        """Return the busy seconds of all executors until now, including the running batches."""
        return self._total_s + min(self._running, self.executors) * (now_s - self._since_s)


class _Totals(NamedTuple):
    """Sums since the registration of a version; the difference of two describes the time between them."""

    now_s: float
    busy_s: float
    executor_s: float
    queue_share_s: float  # integral of `queue_share` over time
    refused: int
    offered: int


class SaturationWindow:
    """The saturation of one version over the last `WINDOW_S`. Call it on the event loop only.

    If executors are wanted but none is in service, one busy executor is assumed. `requests` returns the
    number of rejected requests and the number of all requests.
    """

    def __init__(
        self, busy: BusyTime, sample: Callable[[], LoadSample], requests: Callable[[], tuple[int, int]]
    ) -> None:
        self._busy = busy
        self._sample = sample
        self._requests = requests
        self._absent_s = 0.0  # time in which executors were wanted but none was in service
        self._last_share = 0.0  # the latest `queue_share`
        self._window: deque[_Totals] = deque()

    def tick(self, now_s: float) -> None:
        """Sample the load; call it every `TICK_S`."""
        window = self._window
        window.append(self._totals(now_s))
        while len(window) > 2 and window[1].now_s <= now_s - WINDOW_S:
            window.popleft()

    def value(self, now_s: float) -> float:
        """Sample the load and return the current saturation."""
        self.tick(now_s)
        before, after = self._window[0], self._window[-1]
        elapsed_s = after.now_s - before.now_s
        return saturation(
            busy_s=after.busy_s - before.busy_s,
            executor_s=after.executor_s - before.executor_s,
            queue_share=(after.queue_share_s - before.queue_share_s) / elapsed_s if elapsed_s > 0 else 0.0,
            refused=after.refused - before.refused,
            offered=after.offered - before.offered,
        )

    def _totals(self, now_s: float) -> _Totals:
        load = self._sample()
        last = self._window[-1] if self._window else _Totals(now_s, 0.0, 0.0, 0.0, 0, 0)
        elapsed_s = now_s - last.now_s
        executors = self._busy.executors
        if not executors and load.wanted:
            self._absent_s += elapsed_s
            executors = 1
        share = load.queue_share
        queue_share_s = last.queue_share_s + (share + self._last_share) / 2 * elapsed_s
        self._last_share = share
        self._busy.scaled(load.executors, now_s)
        busy_s = self._busy.total_s(now_s) + self._absent_s
        executor_s = last.executor_s + executors * elapsed_s
        return _Totals(now_s, busy_s, executor_s, queue_share_s, *self._requests())
