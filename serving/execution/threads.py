"""N executor threads in this process on one copy of the weights.

For handlers whose work happens outside the GIL (TorchScript `forward` does). Each thread has its own handler
instance and its own context; the model itself is shared through `SharedModels`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from torchere.handlers.resolve import BUILT_IN_HANDLERS, UNEVEN_HANDLERS
from torchere.handlers.shared_models import SharedModels
from torchere.serving.errors import DeadlineExceeded, ExecutorDied, LoadFailed
from torchere.serving.execution.devices import new_places
from torchere.serving.execution.executor import (
    BatchReport,
    BatchSink,
    ExecutorState,
    ExecutorStatus,
    FreeCallback,
    LoadedCallback,
    LoadSpec,
    age_s,
    those_that_stay,
)
from torchere.serving.execution.executor_thread import ExecutorThread, Inbox
from torchere.serving.execution.host import HandlerHost
from torchere.serving.execution.inflight import InFlight
from torchere.serving.execution.inline import InlineChoice
from torchere.serving.execution.letting_go import LettingGo
from torchere.serving.execution.offload import Offload
from torchere.serving.execution.on_loop import OnLoop
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
    ) -> None:
        self._spec = spec
        self._make_host = make_host
        self._response_timeout_s = response_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._next_id = next_id
        self._on_free = on_free
        self._on_loaded = on_loaded
        self._shared = SharedModels()
        self._shared_inbox: Inbox = queue.SimpleQueue()
        self._threads: list[ExecutorThread] = []
        self._retiring: list[ExecutorThread] = []  # they finish what they are at, and end
        even = spec.handler in BUILT_IN_HANDLERS and spec.handler not in UNEVEN_HANDLERS
        self._inline = InlineChoice(allowed=even and not spec.pinned, on_gpu=bool(spec.gpu_ids))
        self._here = OnLoop(self._inline, on_free, offload)  # loaded with the first executors
        self._overdue = 0  # batches inside that were answered for the executor, which has not come back
        self._left: set[InFlight] = set()  # batches that threads hang in which were left behind
        self._restarts: dict[ExecutorThread, asyncio.Task[None]] = {}
        self._inside: dict[InFlight, ExecutorThread | None] = {}  # None: whichever thread takes it
        self._letting_go = LettingGo()

    @property
    def size(self) -> int:
        """How many executors there are to be."""
        return len(self._threads)

    @property
    def in_service(self) -> int:
        """How many executors are loaded, warm and not stuck in a call."""
        count = -self._overdue
        for thread in self._threads:  # asked for with every request: no generator
            count += thread.ready
        return count if count > 0 else 0

    @property
    def free(self) -> int:
        """How many batches may be submitted now."""
        if self.on_loop:
            return 0 if self._inside or not self.in_service else self._here.free
        loaded = sum([thread.ready for thread in self._threads])  # those that hang have a batch inside still
        executors = min(1 + self._overdue, loaded) if self._inline.one_at_a_time else loaded
        return max(0, executors - len(self._inside))

    @property
    def on_loop(self) -> bool:
        """Whether batches run on the event loop now: see `inline.py`."""
        return self._inline.active and self._here.host is not None

    def portion(self, waiting: int) -> int:
        """See `ExecutorPool.portion` and `offload.py`."""
        return self._here.portion(waiting) if self.on_loop else waiting

    def idle_ids(self) -> tuple[int, ...]:
        """The executors that are in service and have nothing to do; meant for pinned pools."""
        busy = set(self._inside.values())
        return tuple(
            thread.status.executor_id
            for thread in self._threads
            if thread.status.state is ExecutorState.READY and thread not in busy
        )

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """A snapshot of every executor, oldest first."""
        return tuple([thread.status for thread in self._threads])

    async def resize(self, count: int) -> None:
        """Start or stop threads; see `ExecutorPool`. A surplus thread ends after the batches before it."""
        self._threads = [one for one in self._threads if one.status.state is not ExecutorState.FAILED]
        staying = those_that_stay(self._threads, count, [thread.ready for thread in self._threads])
        surplus = [thread for thread in self._threads if thread not in staying]
        self._threads = staying
        self._here.may_offload = count > 1
        for thread in surplus:
            if thread.ready:
                self._retiring.append(thread)
            elif thread in self._restarts:
                self._restarts[thread].cancel()
            thread.retire()
        new = count - len(self._threads)
        places = new_places(new, self._next_id, self._spec.gpu_ids, self.statuses())
        fresh = [self._new_thread(*place) for place in places]
        self._threads += fresh
        try:
            # One after the other: the first loads the weights, the others find them loaded.
            for thread in fresh:
                await thread.start(self._startup_timeout_s)
        except BaseException:
            for thread in fresh:
                self._forget(thread)
            raise

    async def warm_up(self) -> None:
        """Warm up what was loaded and put it in service."""
        fresh = [thread for thread in self._threads if thread.status.state is ExecutorState.STARTING]
        try:
            for thread in fresh:
                await thread.warm_up(self._startup_timeout_s)
                self._on_loaded(thread.status.executor_id, age_s(thread.status))
        except BaseException:
            for thread in fresh:
                if not thread.ready:
                    self._forget(thread)
            raise
        if self._here.wants_host and self._threads and self._shared.shares_all:
            host = self._make_host(self._spec, None, self._shared)
            await asyncio.to_thread(host.load)  # quick: the weights are there
            self._letting_go.watch(host)
            self._here.take(host)
        gc.freeze()  # what is loaded stays: a walk over it would hold up the loop for a tenth of a second
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
        named = [thread for thread in self._threads if thread.status.executor_id == executor_id]
        self._inside[batch] = named[0] if named else None
        batch.watch(self._response_timeout_s, self._timed_out)
        (named[0].inbox if named else self._shared_inbox).put(batch)

    def partial(self, batch: InFlight, index: int, part: InferResponse) -> None:
        """Hand on a part of a streamed answer; its thread tells."""
        batch.partial(index, part)
        batch.watch(self._response_timeout_s, self._timed_out)  # it bounds the silence only

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

    def _timed_out(self, batch: InFlight) -> None:
        # A thread can't be killed: it is left behind, and ends when the call returns.
        spec, timeout_s = self._spec, self._response_timeout_s
        cause = f"no answer within response_timeout={timeout_s:g} s"
        logger.error(
            "an executor thread of model %s version %s hangs: %s", spec.model_name, spec.model_version, cause
        )
        thread = batch.taker
        may_leave = len(self._left) < MAX_LEFT_BEHIND * max(1, self.size)
        if isinstance(thread, ExecutorThread) and may_leave:
            self._leave_behind(thread, batch, cause)
        else:
            batch.overdue = True
            self._overdue += 1
        batch.fail(DeadlineExceeded(f"The model did not answer within {timeout_s:g} s."))

    def _leave_behind(self, thread: ExecutorThread, batch: InFlight, cause: str) -> None:
        """Put a fresh thread in the place of one that hangs in a batch."""
        self._inside.pop(batch, None)
        self._left.add(batch)
        thread.left_behind = True
        if thread.inbox is not self._shared_inbox:
            thread.inbox.put(None)  # it may be through just now, and wait for what is never sent
        if thread in self._retiring:
            self._retiring.remove(thread)
            if thread.inbox is self._shared_inbox and self._threads:
                # Its order to end lies there, for whichever takes it: one that serves is to end in its place.
                self._retiring.append(self._threads[0])
                self._threads[0] = thread
        if thread not in self._threads:
            return
        fresh = self._new_thread(thread.status.executor_id, thread.status.gpu_id)
        fresh.status = replace(
            fresh.status,
            state=ExecutorState.RESTARTING,
            last_failure=cause,
            last_failure_at=datetime.now(timezone.utc),
            losses=thread.status.losses + 1,
        )
        self._threads[self._threads.index(thread)] = fresh
        self._restarts[fresh] = task = asyncio.ensure_future(self._bring_up(fresh))
        task.add_done_callback(lambda _: self._restarts.pop(fresh))

    async def _bring_up(self, thread: ExecutorThread) -> None:
        try:
            await thread.start(self._startup_timeout_s)
            await thread.warm_up(self._startup_timeout_s)
        except LoadFailed as err:  # the handler hangs or fails in a second instance, too
            thread.abandon()
            thread.status = replace(thread.status, state=ExecutorState.FAILED, last_failure=err.detail)
        else:
            self._on_loaded(thread.status.executor_id, age_s(thread.status))
        self._on_free()

    async def close(self) -> None:
        """Answer what is inside, end the threads, let go of the weights."""
        self._letting_go.closed()
        await self.resize(0)
        # Who is still in a call ends behind it, and has nothing to do with the executors of the next load.
        self._shared_inbox = queue.SimpleQueue()
        inside, self._inside, self._overdue = self._inside, {}, 0
        for batch in inside:
            batch.overdue = False
            batch.fail(ExecutorDied("the version was unloaded"))
        self._shared = SharedModels()
        await self._here.close()
        if not self._retiring:
            self._letting_go.none_in_a_call()

    def _new_thread(self, executor_id: int, gpu_id: int | None) -> ExecutorThread:
        host = self._make_host(self._spec, gpu_id, self._shared)
        self._letting_go.watch(host)
        inbox: Inbox = queue.SimpleQueue() if self._spec.pinned else self._shared_inbox
        return ExecutorThread(executor_id, gpu_id, host, self, inbox)

    def _forget(self, thread: ExecutorThread) -> None:
        if thread in self._threads:
            self._threads.remove(thread)
        thread.abandon()

    def stopped(self, thread: ExecutorThread) -> None:
        """Forget a thread that has ended; it tells."""
        # A shared inbox does not say which thread takes the order to end: any one does, and all are alike.
        if thread in self._threads and self._retiring:
            self._threads[self._threads.index(thread)] = self._retiring.pop()
        elif thread in self._retiring:
            self._retiring.remove(thread)
        if not self._retiring:
            self._letting_go.none_in_a_call()


def _moved_bytes(requests: Sequence[InferRequest], report: BatchReport) -> int:
    came = sum(len(parameter.value) for request in requests for parameter in request.parameters)
    goes = sum(len(outcome.body) for outcome in report.outcomes if isinstance(outcome, InferResponse))
    return came + goes
