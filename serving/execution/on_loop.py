"""Runs a tiny model's batches on the event loop itself, or in the worker process beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from torchere.serving.execution.executor import BatchSink, FreeCallback
from torchere.serving.execution.host import HandlerHost
from torchere.serving.execution.inline import InlineChoice
from torchere.serving.execution.offload import Offload
from torchere.serving.types import InferRequest

_MEMORY = 0.9  # of the running mean, per batch


class OnLoop:
    """The executor that is the event loop: one handler, used on the loop only.

    `offload` takes what piles up; None: it waits for the loop.
    """

    def __init__(self, choice: InlineChoice, on_free: FreeCallback, offload: Offload | None) -> None:
        self._choice = choice
        self._on_free = on_free
        self._worker = offload  # whether or not it may be used
        self.may_offload = False  # a second batch may run at the same time as one here
        self._loop = asyncio.get_running_loop()
        self.host: HandlerHost | None = None  # None: not loaded
        self._resting = False  # a batch has run in this turn of the loop, and other work comes first now
        self._request_s = 0.0  # processor time of a request in its batch, the running mean

    @property
    def wants_host(self) -> bool:
        """Whether batches may come to run on the loop, and there is no handler for them yet."""
        return self._choice.allowed and self.host is None

    def take(self, host: HandlerHost) -> None:
        """Run batches by this handler, which is loaded."""
        self.host = host

    @property
    def _offload(self) -> Offload | None:
        """The worker process, where it may be used."""
        return self._worker if self.may_offload else None

    @property
    def free(self) -> int:
        """How many batches it takes now."""
        offload = self._offload
        if offload is None:
            return 0 if self._resting else 1
        if self._resting:
            return offload.room if offload.busy else 0
        return 1 + offload.room

    def portion(self, waiting: int) -> int:
        """As `ExecutorPool.portion`."""
        offload = self._offload
        return waiting if offload is None else offload.portion(waiting)

    def submit(self, requests: Sequence[InferRequest], sink: BatchSink, behind: int) -> None:
        """Run one batch: here, before this returns, or in the worker process. `behind`: how many wait."""
        offload, size = self._offload, len(requests)
        if offload is not None and offload.wants(size, behind, size * self._request_s):
            offload.submit(requests, sink)
        elif self.host is not None:
            self._run(self.host, requests, sink)

    def _run(self, host: HandlerHost, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self._resting = True
        self._loop.call_soon(self._rested)
        started_s = time.perf_counter()
        report = host.run(requests, sink.partial)
        self._choice.ran_inline(report.cpu_s, time.perf_counter() - started_s)
        self._request_s = _MEMORY * self._request_s + (1 - _MEMORY) * report.cpu_s / len(requests)
        sink.done(report)

    def _rested(self) -> None:
        self._resting = False
        self._on_free()

    async def close(self) -> None:
        """Let go of the handler, and end the worker process."""
        self.host = None
        if self._worker is not None:
            await self._worker.close()
