"""The threads of a pool: how they come and go, and the inbox they share."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

from torchere.serving.errors import LoadFailed
from torchere.serving.execution.devices import new_places
from torchere.serving.execution.executor import (
    ExecutorState,
    ExecutorStatus,
    FreeCallback,
    LoadedCallback,
    LoadSpec,
    age_s,
    those_that_stay,
)
from torchere.serving.execution.executor_thread import ExecutorThread, Inbox
from torchere.serving.execution.inflight import InFlight

ThreadMaker = Callable[[int, int | None, Inbox], ExecutorThread]  # executor id, GPU, where its batches lie


class Crew:
    """The executor threads of one version. Methods run on the event loop.

    `on_change` is called when a thread begins to serve, or failed to take the place of a hung one.
    """

    def __init__(
        self,
        spec: LoadSpec,
        *,
        startup_timeout_s: float,
        next_id: Callable[[], int],
        make_thread: ThreadMaker,
        on_loaded: LoadedCallback,
        on_change: FreeCallback,
    ) -> None:
        self._spec = spec
        self._startup_timeout_s = startup_timeout_s
        self._next_id = next_id
        self._make_thread = make_thread
        self._on_loaded = on_loaded
        self._on_change = on_change
        self._inbox: Inbox = queue.SimpleQueue()  # shared, unless batches are sent to an executor by its id
        self._retiring: list[ExecutorThread] = []  # they finish what they are at, and end
        self._restarts: dict[ExecutorThread, asyncio.Task[None]] = {}
        self.threads: list[ExecutorThread] = []

    @property
    def ready(self) -> int:
        """How many threads are loaded and warm, also those that are stuck in a call."""
        count = 0
        for thread in self.threads:  # asked for with every request: no generator
            count += thread.ready
        return count

    @property
    def all_ended(self) -> bool:
        """Whether of those that were to end none is in a call any more."""
        return not self._retiring

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """A snapshot of every executor, oldest first."""
        return tuple([thread.status for thread in self.threads])

    def send(self, batch: InFlight, executor_id: int | None) -> ExecutorThread | None:
        """Give a batch to the executor named, which is returned, or to whichever takes it first."""
        named = [thread for thread in self.threads if thread.status.executor_id == executor_id]
        (named[0].inbox if named else self._inbox).put(batch)
        return named[0] if named else None

    def take_back(self) -> list[InFlight]:
        """The batches in the shared inbox, which no thread has begun with, and none gets now."""
        lay_there = []
        with contextlib.suppress(queue.Empty):
            while True:
                lay_there.append(self._inbox.get_nowait())
        batches = [batch for batch in lay_there if batch is not None]
        for _ in range(len(lay_there) - len(batches)):
            self._inbox.put(None)  # orders to end, for those that hang
        return batches

    async def resize(self, count: int) -> None:
        """Start or stop threads; see `ExecutorPool`. A surplus thread ends after the batches before it."""
        self.threads = [one for one in self.threads if one.status.state is not ExecutorState.FAILED]
        staying = those_that_stay(self.threads, count, [thread.ready for thread in self.threads])
        surplus = [thread for thread in self.threads if thread not in staying]
        self.threads = staying
        for thread in surplus:
            if thread.ready:
                self._retiring.append(thread)
            elif thread in self._restarts:
                self._restarts[thread].cancel()
            thread.retire()
        new = count - len(self.threads)
        places = new_places(new, self._next_id, self._spec.gpu_ids, self.statuses())
        fresh = [self._new_thread(*place) for place in places]
        self.threads += fresh
        try:
            # One after the other: the first loads the weights, the others find them loaded.
            for thread in fresh:
                await self._start(thread)
        except BaseException:
            for thread in fresh:
                self._forget(thread)
            raise

    async def warm_up(self) -> None:
        """Warm up what was loaded and put it in service."""
        fresh = [thread for thread in self.threads if thread.status.state is ExecutorState.STARTING]
        try:
            for thread in fresh:
                await self._warm_up(thread)
        except BaseException:
            for thread in fresh:
                if not thread.ready:
                    self._forget(thread)
            raise

    async def _start(self, thread: ExecutorThread) -> None:
        try:
            await thread.start(self._startup_timeout_s)
        except RuntimeError as err:  # the system would not; what the handler raises comes as LoadFailed
            raise LoadFailed.of(self._spec.model_name, self._spec.model_version, str(err)) from err

    async def _warm_up(self, thread: ExecutorThread) -> None:
        await thread.warm_up(self._startup_timeout_s)
        self._on_loaded(thread.status.executor_id, age_s(thread.status))
        self._on_change()

    def _new_thread(self, executor_id: int, gpu_id: int | None) -> ExecutorThread:
        inbox: Inbox = queue.SimpleQueue() if self._spec.pinned else self._inbox
        return self._make_thread(executor_id, gpu_id, inbox)

    def _forget(self, thread: ExecutorThread) -> None:
        if thread in self.threads:
            self.threads.remove(thread)
        thread.abandon()

    def leave_behind(self, thread: ExecutorThread, cause: str) -> None:
        """Put a fresh thread in the place of one that hangs in a batch."""
        thread.left_behind = True
        if thread.inbox is not self._inbox:
            thread.inbox.put(None)  # it may be through just now, and wait for what is never sent
        if thread in self._retiring:
            self._retiring.remove(thread)
            if thread.inbox is self._inbox and self.threads:
                # Its order to end lies there, for whichever takes it: one that serves is to end in its place.
                self._retiring.append(self.threads[0])
                self.threads[0] = thread
        if thread not in self.threads:
            return
        fresh = self._new_thread(thread.status.executor_id, thread.status.gpu_id)
        fresh.status = replace(
            fresh.status,
            state=ExecutorState.RESTARTING,
            last_failure=cause,
            last_failure_at=datetime.now(timezone.utc),
            losses=thread.status.losses + 1,
        )
        self.threads[self.threads.index(thread)] = fresh
        self._restarts[fresh] = task = asyncio.ensure_future(self._bring_up(fresh))
        task.add_done_callback(lambda _: self._restarts.pop(fresh))

    async def _bring_up(self, thread: ExecutorThread) -> None:
        try:
            await self._start(thread)
            await self._warm_up(thread)
        except LoadFailed as err:  # the handler hangs or fails in a second instance, too
            thread.abandon()
            thread.status = replace(thread.status, state=ExecutorState.FAILED, last_failure=err.detail)
            self._on_change()

    def stopped(self, thread: ExecutorThread) -> None:
        """Forget a thread that has ended."""
        # A shared inbox does not say which thread takes the order to end: any one does, and all are alike.
        if thread.left_behind:
            thread.inbox.put(None)  # it was meant for one of the others
        elif thread in self.threads and self._retiring:
            self.threads[self.threads.index(thread)] = self._retiring.pop()
        elif thread in self._retiring:
            self._retiring.remove(thread)

    async def close(self) -> None:
        """End all threads, those in a call behind it."""
        await self.resize(0)
        # Who is still in a call has nothing to do with the executors of the next load.
        self._inbox = queue.SimpleQueue()
