"""N executor threads in this process on one copy of the weights.

For handlers whose work happens outside the GIL (TorchScript `forward` does). Each thread has its own handler
instance and its own context; the model itself is shared through `SharedModels`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import torch

from torchere.handlers.resolve import BUILT_IN_HANDLERS, UNEVEN_HANDLERS
from torchere.handlers.shared_models import SharedModels
from torchere.serving.errors import DeadlineExceeded, ExecutorDied
from torchere.serving.execution.crew import Crew
from torchere.serving.execution.executor import (
    BatchReport,
    BatchSink,
    ExecutorState,
    ExecutorStatus,
    FreeCallback,
    LoadedCallback,
    LoadSpec,
)
from torchere.serving.execution.executor_thread import ExecutorThread, Inbox
from torchere.serving.execution.host import HandlerHost
from torchere.serving.execution.inflight import InFlight
from torchere.serving.execution.inline import InlineChoice
from torchere.serving.execution.letting_go import LettingGo, freeze
from torchere.serving.execution.offload import Offload
from torchere.serving.execution.on_loop import OnLoop
from torchere.serving.execution.send_ahead import FULL_AHEAD, ahead_of_threads
from torchere.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)

MAX_LEFT_BEHIND = 3  # threads that hang, for each there is to be; after that the rest stay as they are
HostMaker = Callable[[LoadSpec, int | None, SharedModels], HandlerHost]


class ThreadPool:
    """`ExecutorPool` of threads. Methods run on the event loop."""

    def __init__(
        self,
        spec: LoadSpec,
        *,
        response_timeout_s: float,
        startup_timeout_s: float,
        next_id: Callable[[], int],
        on_free: FreeCallback,
        on_loaded: LoadedCallback,
        make_host: HostMaker = HandlerHost,
        offload: Offload | None = None,
        sends_ahead: bool = True,
    ) -> None:
        torch.set_num_threads(1)  # of the event loop's thread, where tiny models may run
        self._spec = spec
        self._make_host = make_host
        self._response_timeout_s = response_timeout_s
        self._on_free = on_free
        self._shared = SharedModels()
        self._crew = Crew(
            spec,
            startup_timeout_s=startup_timeout_s,
            next_id=next_id,
            make_thread=self._new_thread,
            on_loaded=on_loaded,
            on_change=self._crew_changed,
        )
        even = spec.handler in BUILT_IN_HANDLERS and spec.handler not in UNEVEN_HANDLERS
        self._inline = InlineChoice(allowed=even and not spec.pinned, on_gpu=bool(spec.gpu_ids))
        self._here = OnLoop(self._inline, on_free, offload)  # loaded with the first executors
        self._sends_ahead = sends_ahead and not spec.pinned and spec.batch_size == 1
        self._sends_full_ahead = sends_ahead and not spec.pinned and spec.batch_size > 1
        self._overdue = 0  # batches inside that were answered for the executor, which has not come back
        self._left: set[InFlight] = set()  # batches that threads hang in which were left behind
        self._inside: dict[InFlight, ExecutorThread | None] = {}  # None: whichever thread takes it
        self._letting_go = LettingGo()

    @property
    def size(self) -> int:
        """How many executors there are to be."""
        return len(self._crew.threads)

    @property
    def in_service(self) -> int:
        """How many executors are loaded, warm and not stuck in a call."""
        return max(0, self._crew.ready - self._overdue)

    @property
    def free(self) -> int:
        """How many batches may be submitted now."""
        if self.on_loop:
            return 0 if self._inside or not self.in_service else self._here.free
        loaded = self._crew.ready  # those that hang have a batch inside still
        if self._inline.one_at_a_time:
            places = min(1 + self._overdue, loaded)
        else:
            places = loaded + self._sends_ahead * ahead_of_threads(loaded, self._inline.mean_wall_s)
        return max(0, places - len(self._inside))

    @property
    def ahead(self) -> int:
        """See `ExecutorPool.ahead`."""
        loaded = self._crew.ready
        wanted = self._sends_full_ahead and loaded and not self._overdue
        if not wanted or self.on_loop or self._inline.one_at_a_time:
            return 0
        return max(0, loaded + FULL_AHEAD - len(self._inside))

    @property
    def on_loop(self) -> bool:
        """Whether batches run on the event loop now: see `inline.py`."""
        return self._inline.active and self._here.host is not None

    def portion(self, waiting: int) -> int:
        """See `ExecutorPool.portion` and `offload.py`."""
        return self._here.portion(waiting) if self.on_loop else waiting

    def idle_ids(self) -> tuple[int, ...]:
        """The executors that are in service and have nothing to do."""
        busy = {thread or batch.taker for batch, thread in self._inside.items()}
        return tuple(
            thread.status.executor_id
            for thread in self._crew.threads
            if thread.status.state is ExecutorState.READY and thread not in busy
        )

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """A snapshot of every executor, oldest first."""
        return self._crew.statuses()

    async def resize(self, count: int) -> None:
        """Start or stop threads; see `ExecutorPool`. A surplus thread ends after the batches before it."""
        self._here.may_offload = count > 1
        await self._crew.resize(count)

    async def warm_up(self) -> None:
        """Warm up what was loaded and put it in service."""
        await self._crew.warm_up()
        if self._here.wants_host and self._crew.threads and self._shared.shares_all:
            host = self._new_host(None)
            await asyncio.to_thread(host.load)  # quick: the weights are there
            self._here.take(host)
        freeze()
        self._on_free()

    def submit(
        self,
        requests: Sequence[InferRequest],
        sink: BatchSink,
        executor_id: int | None = None,
        *,
        behind: int = 0,
    ) -> None:
        """Run one batch on the executor named, or on whichever takes it first."""
        if executor_id is None and self.on_loop:
            self._here.submit(requests, sink, behind)
            return
        batch = InFlight(requests, sink)
        batch.watch(self._response_timeout_s, self._silent)
        self._inside[batch] = self._crew.send(batch, executor_id)

    def partial(self, batch: InFlight, index: int, part: InferResponse) -> None:
        """Hand on a part of a streamed answer; its thread tells."""
        batch.partial(index, part)
        batch.watch(self._response_timeout_s, self._silent)  # it bounds the silence only

    def finished(self, batch: InFlight, report: BatchReport) -> None:
        """Answer a batch; its thread tells."""
        self._inside.pop(batch, None)
        self._left.discard(batch)
        moved_bytes = _moved_bytes(batch.requests, report)
        self._inline.ran_in_thread(report.cpu_s, report.handler_s, len(batch.requests), moved_bytes)
        if batch.answered:  # it was too late; but the executor is free again
            self._overdue -= batch.overdue
            self._on_free()
        batch.answer(report)

    def untouched(self, batch: InFlight) -> None:
        """Give a batch back that no thread began with."""
        self._inside.pop(batch, None)
        batch.give_back()

    def _silent(self, batch: InFlight) -> None:
        left_s = batch.taken_s + self._response_timeout_s - time.monotonic()
        if left_s > 0:  # it was sent ahead, and the one before it took so long, or still does
            batch.watch(min(left_s, self._response_timeout_s), self._silent)
        else:
            self._timed_out(batch)

    def _timed_out(self, batch: InFlight) -> None:
        spec, timeout_s = self._spec, self._response_timeout_s
        # A thread can't be killed: it is left behind, and ends when the call returns.
        cause = f"no answer within response_timeout={timeout_s:g} s"
        logger.error(
            "an executor thread of model %s version %s hangs: %s", spec.model_name, spec.model_version, cause
        )
        thread = batch.taker
        may_leave = len(self._left) < MAX_LEFT_BEHIND * max(1, self.size)
        if isinstance(thread, ExecutorThread) and may_leave:
            self._inside.pop(batch, None)
            self._left.add(batch)
            self._crew.leave_behind(thread, cause)
        else:
            batch.overdue = True
            self._overdue += 1
        batch.fail(DeadlineExceeded(f"The model did not answer within {timeout_s:g} s."))

    def _crew_changed(self) -> None:
        """A thread begins to serve, or failed to take the place of a hung one."""
        for batch in () if self._crew.ready else self._crew.take_back():
            self.untouched(batch)  # nobody is left to take it
        self._on_free()

    async def close(self) -> None:
        """Answer what is inside, end the threads, let go of the weights."""
        self._letting_go.closed()
        await self._crew.close()
        inside, self._inside, self._overdue = self._inside, {}, 0
        for batch in inside:
            batch.overdue = False
            batch.fail(ExecutorDied("the version was unloaded"))
        self._shared = SharedModels()
        await self._here.close()
        self._let_go()

    def _new_host(self, gpu_id: int | None) -> HandlerHost:
        host = self._make_host(self._spec, gpu_id, self._shared)
        self._letting_go.watch(host)
        return host

    def _new_thread(self, executor_id: int, gpu_id: int | None, inbox: Inbox) -> ExecutorThread:
        return ExecutorThread(executor_id, gpu_id, self._new_host(gpu_id), self, inbox)

    def stopped(self, thread: ExecutorThread) -> None:
        """Forget a thread that has ended; it tells."""
        self._crew.stopped(thread)
        self._let_go()

    def _let_go(self) -> None:
        if self._crew.all_ended:
            self._letting_go.none_in_a_call()


def _moved_bytes(requests: Sequence[InferRequest], report: BatchReport) -> int:
    came = sum(len(parameter.value) for request in requests for parameter in request.parameters)
    goes = sum(len(outcome.body) for outcome in report.outcomes if isinstance(outcome, InferResponse))
    return came + goes
