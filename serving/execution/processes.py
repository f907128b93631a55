"""N worker processes, one handler each: for archives that carry their own Python.

A worker that is lost answers its batch with `ExecutorDied`, keeps its cause, and comes back by the rule of
`restart.py`; the others do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torchere.serving.errors import DeadlineExceeded, ExecutorDied, LoadFailed, ServingError
from torchere.serving.execution.executor import (
    BatchReport,
    BatchSink,
    ExecutorState,
    ExecutorStatus,
    FreeCallback,
    LoadedCallback,
    LoadSpec,
    age_s,
)
from torchere.serving.execution.launch import Launcher
from torchere.serving.execution.restart import restart_delay_s
from torchere.serving.execution.worker_process import WorkerProcess
from torchere.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)


class ProcessPool:
    """`ExecutorPool` of worker processes. Methods run on the event loop."""

    def __init__(
        self,
        spec: LoadSpec,
        *,
        response_timeout_s: float,
        startup_timeout_s: float,
        max_retry_timeout_s: float,
        next_id: Callable[[], int],
        on_free: FreeCallback,
        on_loaded: LoadedCallback,
        launcher: Launcher,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._response_timeout_s = response_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._max_retry_timeout_s = max_retry_timeout_s
        self._next_id = next_id
        self._on_free = on_free
        self._on_loaded = on_loaded
        self._launcher = launcher
        self._now = now
        self._slots: list[_Slot] = []

    @property
    def size(self) -> int:
        """How many executors there are to be."""
        return len(self._slots)

    @property
    def in_service(self) -> int:
        """How many executors are loaded, warm and alive."""
        return sum(slot.status.state is ExecutorState.READY for slot in self._slots)

    @property
    def free(self) -> int:
        """How many batches may be submitted now."""
        return sum(slot.is_free for slot in self._slots)

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """A snapshot of every executor, oldest first."""
        return tuple(slot.status for slot in self._slots)

    async def resize(self, count: int) -> None:
        """Start or stop workers; see `ExecutorPool`. A surplus worker finishes its batch first."""
        surplus, self._slots = self._slots[count:], self._slots[:count]
        await asyncio.gather(*(slot.retire() for slot in surplus))
        fresh = [self._new_slot() for _ in range(count - len(self._slots))]
        self._slots += fresh
        results = await asyncio.gather(*(slot.start() for slot in fresh), return_exceptions=True)
        for slot, result in zip(fresh, results, strict=True):
            if isinstance(result, BaseException):
                self._slots.remove(slot)
                await slot.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def warm_up(self) -> None:
        """Warm up what was loaded and put it in service."""
        fresh = [slot for slot in self._slots if slot.status.state is ExecutorState.STARTING]
        await asyncio.gather(*(slot.warm_up() for slot in fresh))
        self._on_free()

    def submit(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Run one batch on a free executor."""
        next(slot for slot in self._slots if slot.is_free).run(requests, sink)

    async def close(self) -> None:
        """Answer what is inside and stop the workers."""
        slots, self._slots = self._slots, []
        await asyncio.gather(*(slot.close() for slot in slots))

    def _new_slot(self) -> _Slot:
        gpu_ids = self._spec.gpu_ids
        executor_id = self._next_id()
        return _Slot(self, executor_id, gpu_ids[executor_id % len(gpu_ids)] if gpu_ids else None)


class _Slot:
    """One place for a worker, and the worker that is in it; keeps its id through restarts."""

    def __init__(self, pool: ProcessPool, executor_id: int, gpu_id: int | None) -> None:
        self._pool = pool
        self._worker = WorkerProcess(pool._spec, executor_id, gpu_id, pool._launcher)
        self.response_timeout_s = pool._response_timeout_s
        self._losses = 0
        self._first_loss_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self._retiring = False
        self._released = asyncio.Event()
        self.status = ExecutorStatus(
            executor_id, ExecutorState.STARTING, datetime.now(timezone.utc), 0, gpu_id=gpu_id
        )

    @property
    def is_free(self) -> bool:
        """Whether a batch may be given to it now."""
        ready = self.status.state is ExecutorState.READY and not self._retiring
        return ready and not self._worker.busy and not self._worker.lost.done()

    async def start(self) -> None:
        """Start the worker and load the handler; raises `LoadFailed`."""
        await self._worker.start()
        self.status = replace(
            self.status,
            state=ExecutorState.STARTING,
            started_at=datetime.now(timezone.utc),
            pid=self._worker.pid,
        )
        await self._worker.load(self._pool._startup_timeout_s)

    async def warm_up(self) -> None:
        """Warm up and go into service, supervised from now on; raises `LoadFailed`."""
        await self._worker.warm_up(self._pool._startup_timeout_s)
        self.status = replace(self.status, state=ExecutorState.READY)
        self._pool._on_loaded(self.status.executor_id, age_s(self.status))
        if self._supervisor is None:
            self._supervisor = asyncio.ensure_future(self._supervise())

    def run(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Run one batch on the worker, which is free."""
        self._worker.run(requests, _SlotSink(self, sink))

    def batch_over(self) -> None:
        """The batch inside was answered by the worker."""
        self._losses = 0
        self._released.set()

    def timed_out(self, timeout_s: float) -> None:
        """The worker said nothing for too long: answer its clients and replace it."""
        self.status = replace(self.status, state=ExecutorState.RESTARTING)
        late = DeadlineExceeded(f"The model did not answer within {timeout_s:g} s.")
        self._answer_batch(late)
        self._worker.kill(f"no answer within response_timeout={timeout_s:g} s")

    def _answer_batch(self, error: ServingError) -> None:
        count = self._worker.batch_size
        if (sink := self._worker.take_sink()) is not None:
            sink.done(BatchReport([error] * count))

    async def _supervise(self) -> None:
        """Bring the worker back whenever it is lost, until the slot is closed or the rule gives up."""
        while not self._retiring:
            cause = await asyncio.shield(
                self._worker.lost
            )  # cancelling this task must not end the wait of others
            if self._retiring:
                return
            self._note_loss(cause)
            if not await self._restart():
                self.status = replace(self.status, state=ExecutorState.FAILED)
                self._pool._on_free()  # who waits for this executor must learn that it won't come
                return
            self._pool._on_free()

    async def _restart(self) -> bool:
        while True:
            delay_s = restart_delay_s(
                self._losses, self._first_loss_s, self._pool._now(), self._pool._max_retry_timeout_s
            )
            if delay_s is None:
                return False
            logger.info("Retry worker: %d in %g seconds.", self.status.executor_id, delay_s)
            await asyncio.sleep(delay_s)
            self._worker = WorkerProcess(
                self._pool._spec, self.status.executor_id, self.status.gpu_id, self._pool._launcher
            )
            try:
                await self.start()
                await self.warm_up()
            except LoadFailed as err:
                self._note_loss(err.detail)
                continue
            return True

    def _note_loss(self, cause: str) -> None:
        spec = self._pool._spec
        if self._losses == 0:
            self._first_loss_s = self._pool._now()
        self._losses += 1
        self.status = replace(self.status, state=ExecutorState.RESTARTING, last_failure=cause)
        logger.error(
            "worker %d of model %s version %s was lost: %s",
            self.status.executor_id,
            spec.model_name,
            spec.model_version,
            cause,
        )
        self._answer_batch(ExecutorDied(cause))

    async def retire(self) -> None:
        """Finish the batch inside, then stop."""
        self._retiring = True
        while self._worker.busy and not self._worker.lost.done():
            self._released.clear()
            released = asyncio.ensure_future(self._released.wait())
            either: list[asyncio.Future[Any]] = [released, self._worker.lost]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            released.cancel()
        await self.close()

    async def close(self) -> None:
        """Stop the worker now; a batch inside is answered with `ExecutorDied`."""
        self._retiring = True
        self._answer_batch(ExecutorDied("the version was unloaded"))
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._worker.pid:
            await self._worker.stop()
        self.status = replace(self.status, state=ExecutorState.STOPPED)


class _SlotSink:
    """Passes on what a batch gives; its timer bounds the silence of the worker, not a stream's length."""

    __slots__ = ("_sink", "_slot", "_timer")

    def __init__(self, slot: _Slot, sink: BatchSink) -> None:
        self._slot = slot
        self._sink = sink
        self._timer = self._arm()

    def _arm(self) -> asyncio.TimerHandle:
        timeout_s = self._slot.response_timeout_s
        return asyncio.get_running_loop().call_later(timeout_s, self._slot.timed_out, timeout_s)

    def partial(self, index: int, part: InferResponse) -> None:
        self._timer.cancel()
        self._timer = self._arm()
        self._sink.partial(index, part)

    def done(self, report: BatchReport) -> None:
        self._timer.cancel()
        if not any(isinstance(outcome, ExecutorDied) for outcome in report.outcomes):
            self._slot.batch_over()
        self._sink.done(report)
