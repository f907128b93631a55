"""N executor threads in this process on one copy of the weights.

For handlers whose work happens outside the GIL (TorchScript `forward` does). Each thread has its own handler
instance and its own context; the model itself is shared through `SharedModels`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from torchere.handlers.resolve import BUILT_IN_HANDLERS
from torchere.handlers.shared_models import SharedModels
from torchere.serving.errors import DeadlineExceeded, ExecutorDied
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
from torchere.serving.execution.host import HandlerHost, PartialSink
from torchere.serving.execution.inflight import InFlight
from torchere.serving.execution.inline import InlineChoice
from torchere.serving.types import InferRequest, InferResponse

Inbox = queue.SimpleQueue[InFlight | None]


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
    ) -> None:
        self._spec = spec
        self._response_timeout_s = response_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._next_id = next_id
        self._on_free = on_free
        self._on_loaded = on_loaded
        self._loop = asyncio.get_running_loop()
        self._shared = SharedModels()
        self._shared_inbox: Inbox = queue.SimpleQueue()
        self._threads: list[_ExecutorThread] = []
        self._retiring: list[_ExecutorThread] = []  # they finish what they are at, and end
        self._inline = InlineChoice(allowed=spec.handler in BUILT_IN_HANDLERS and not spec.pinned)
        self._inline_host: HandlerHost | None = None  # loaded with the first executors
        self._inside: dict[InFlight, _ExecutorThread | None] = {}  # None: whichever thread takes it

    @property
    def size(self) -> int:
        """How many executors there are to be."""
        return len(self._threads)

    @property
    def in_service(self) -> int:
        """How many executors are loaded, warm and alive."""
        return sum(thread.status.state is ExecutorState.READY for thread in self._threads)

    @property
    def free(self) -> int:
        """How many batches may be submitted now."""
        executors = min(1, self.in_service) if self._runs_inline else self.in_service
        return max(0, executors - len(self._inside))

    @property
    def _runs_inline(self) -> bool:
        return self._inline_host is not None and self._inline.active

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
        return tuple(thread.status for thread in self._threads)

    async def resize(self, count: int) -> None:
        """Start or stop threads; see `ExecutorPool`. A surplus thread ends after the batches before it."""
        surplus, self._threads = self._threads[count:], self._threads[:count]
        self._retiring += surplus
        for thread in surplus:
            thread.retire()
        fresh = [self._new_thread() for _ in range(count - len(self._threads))]
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
        for thread in self._threads:
            if thread.status.state is ExecutorState.STARTING:
                await thread.warm_up(self._startup_timeout_s)
                self._on_loaded(thread.status.executor_id, age_s(thread.status))
        if self._inline.allowed and self._threads and self._inline_host is None:
            host = HandlerHost(self._spec, _first(self._spec.gpu_ids), self._shared)
            await asyncio.to_thread(host.load)  # quick: the weights are there
            self._inline_host = host
        gc.freeze()  # what is loaded stays: a walk over it would hold up the loop for a tenth of a second
        self._on_free()

    def submit(
        self, requests: Sequence[InferRequest], sink: BatchSink, executor_id: int | None = None
    ) -> None:
        """Run one batch on the executor named, or on whichever takes it first."""
        named = [thread for thread in self._threads if thread.status.executor_id == executor_id]
        batch = InFlight(requests, sink)
        self._inside[batch] = named[0] if named else None
        if self._runs_inline and not named:
            self._loop.call_soon(self._run_inline, batch)
            return
        batch.watch(self._response_timeout_s, self._timed_out)
        (named[0].inbox if named else self._shared_inbox).put(batch)

    def _run_inline(self, batch: InFlight) -> None:
        if self._inline_host is None:  # the pool was closed meanwhile, and the batch is answered
            self._inside.pop(batch, None)
            return
        started_s = time.perf_counter()
        report = self._inline_host.run(batch.requests, batch.partial)
        self._inline.ran_inline(report.cpu_s, time.perf_counter() - started_s)
        self._inside.pop(batch, None)
        batch.answer(report)

    def _partial(self, batch: InFlight, index: int, part: InferResponse) -> None:
        batch.watch(self._response_timeout_s, self._timed_out)  # it bounds the silence only
        batch.partial(index, part)

    def _finished(self, batch: InFlight, report: BatchReport) -> None:
        self._inside.pop(batch, None)
        self._inline.ran_in_thread(report.cpu_s)
        if batch.answered:  # it was too late; but the executor is free again
            self._on_free()
        batch.answer(report)

    def _timed_out(self, batch: InFlight) -> None:
        # A thread can't be killed: the clients are answered, the executor stays busy until the call returns.
        batch.fail(DeadlineExceeded(f"The model did not answer within {self._response_timeout_s:g} s."))

    async def close(self) -> None:
        """Answer what is inside, end the threads, let go of the weights."""
        for batch in tuple(self._inside):
            batch.fail(ExecutorDied("the version was unloaded"))
        await self.resize(0)
        self._inline_host = None
        self._shared = SharedModels()

    def _new_thread(self) -> _ExecutorThread:
        gpu_ids = self._spec.gpu_ids
        executor_id = self._next_id()
        gpu_id = gpu_ids[executor_id % len(gpu_ids)] if gpu_ids else None
        host = HandlerHost(self._spec, gpu_id, self._shared)
        inbox: Inbox = queue.SimpleQueue() if self._spec.pinned else self._shared_inbox
        return _ExecutorThread(executor_id, gpu_id, host, self, inbox)

    def _forget(self, thread: _ExecutorThread) -> None:
        if thread in self._threads:
            self._threads.remove(thread)
        thread.abandon()

    def _stopped(self, thread: _ExecutorThread) -> None:
        # A shared inbox does not say which thread takes the order to end: any one does, and all are alike.
        if thread in self._threads and self._retiring:
            self._threads[self._threads.index(thread)] = self._retiring.pop()
        elif thread in self._retiring:
            self._retiring.remove(thread)


def _first(gpu_ids: tuple[int, ...]) -> int | None:
    return gpu_ids[0] if gpu_ids else None


class _ExecutorThread:
    """One thread and its handler. The thread loads, warms up and then serves the pool's inbox."""

    def __init__(
        self, executor_id: int, gpu_id: int | None, host: HandlerHost, pool: ThreadPool, inbox: Inbox
    ) -> None:
        self._host = host
        self._pool = pool
        self.inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self.status = ExecutorStatus(
            executor_id, ExecutorState.STARTING, datetime.now(timezone.utc), os.getpid(), gpu_id=gpu_id
        )
        self._thread = threading.Thread(target=self._run, name=f"executor-{executor_id}", daemon=True)

    async def start(self, timeout_s: float) -> None:
        """Start the thread and load the handler in it; raises `LoadFailed`."""
        self._thread.start()
        await self._in_thread(self._host.load, timeout_s)

    async def warm_up(self, timeout_s: float) -> None:
        """Warm up, then serve batches; raises `LoadFailed`."""
        await self._in_thread(self._host.warm_up, timeout_s)
        self.status = replace(self.status, state=ExecutorState.READY)
        self._commands.put(None)

    def retire(self) -> None:
        """End, after the batches that were given before."""
        self.inbox.put(None)

    def abandon(self) -> None:
        """End a thread that does not serve yet."""
        self._commands.put(None)
        self.status = replace(self.status, state=ExecutorState.STOPPED)

    async def _in_thread(self, command: Callable[[], None], timeout_s: float) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._commands.put((command, done))
        try:
            await asyncio.wait_for(done, timeout_s)
        except asyncio.TimeoutError:
            # The thread can't be killed; it ends by itself when the handler comes back.
            raise self._host.too_slow(timeout_s) from None

    def _run(self) -> None:
        while (item := self._commands.get()) is not None:
            command, done = item
            try:
                command()
            except BaseException as err:  # carried to the waiting coroutine, whatever it is
                self._tell(_fail, done, err)
            else:
                self._tell(_succeed, done)
            del item, command, done
        if self.status.state is ExecutorState.READY:
            self._serve()

    def _serve(self) -> None:
        pool = self._pool
        while (batch := self.inbox.get()) is not None:
            report = self._host.run(batch.requests, self._partial_sink(batch))
            self._tell(pool._finished, batch, report)
            del batch, report  # or the last batch's tensors stay alive while the thread is idle
        self._tell(pool._stopped, self)

    def _partial_sink(self, batch: InFlight) -> PartialSink:
        return lambda index, part: self._tell(self._pool._partial, batch, index, part)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)


def _succeed(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], err: BaseException) -> None:
    if not done.done():
        done.set_exception(err)
