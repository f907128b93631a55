"""One executor thread: it loads a handler, warms it up, and then runs the batches of an inbox."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Protocol

from torchere.serving.execution.executor import BatchReport, ExecutorState, ExecutorStatus
from torchere.serving.execution.host import HandlerHost, PartialSink
from torchere.serving.execution.inflight import InFlight
from torchere.serving.types import InferResponse

Inbox = queue.SimpleQueue[InFlight | None]
AHEAD_BYTES = 2**18  # of parts that are on their way to the loop, which would have them all in one turn
LOOK_S = 1.0  # how soon a thread that waits for the loop sees that there is none any more


class ThreadOwner(Protocol):
    """Who owns a thread, and hears of it on the event loop."""

    def partial(self, batch: InFlight, index: int, part: InferResponse) -> None:
        """A part of a streamed answer is there."""

    def finished(self, batch: InFlight, report: BatchReport) -> None:
        """A batch is through."""

    def untouched(self, batch: InFlight) -> None:
        """A batch was not begun: nobody waits for it any more."""

    def stopped(self, thread: ExecutorThread) -> None:
        """A thread took an order to end, and does, after everything that was given before."""


class ExecutorThread:
    """One thread and its handler. The thread loads, warms up and then serves the pool's inbox."""

    def __init__(
        self, executor_id: int, gpu_id: int | None, host: HandlerHost, owner: ThreadOwner, inbox: Inbox
    ) -> None:
        self._host = host
        self._owner = owner
        self.inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self.status = ExecutorStatus(
            executor_id, ExecutorState.STARTING, datetime.now(timezone.utc), os.getpid(), gpu_id=gpu_id
        )
        self.ready = False  # its state says so: it may get batches
        self.left_behind = False  # it hangs, and another has taken its place: it ends when it comes back
        self._thread = threading.Thread(target=self._run, name=f"executor-{executor_id}", daemon=True)

    async def start(self, timeout_s: float) -> None:
        """Start the thread and load the handler in it; raises `LoadFailed`."""
        self._thread.start()
        await self._in_thread(self._host.load, timeout_s)

    async def warm_up(self, timeout_s: float) -> None:
        """Warm up, then serve batches; raises `LoadFailed`."""
        await self._in_thread(self._host.warm_up, timeout_s)
        self.status = replace(self.status, state=ExecutorState.READY)
        self.ready = True
        self._commands.put(None)

    def retire(self) -> None:
        """End, after the batches that were given before; one that does not serve yet, at once."""
        if self.ready:
            self.inbox.put(None)
        else:
            self.left_behind = True  # or it would serve after all, if it is just about to
            self.abandon()

    def abandon(self) -> None:
        """End a thread that does not serve yet."""
        self._commands.put(None)
        self.status = replace(self.status, state=ExecutorState.STOPPED)
        self.ready = False

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
        owner = self._owner
        while not self.left_behind:
            batch = self.inbox.get()
            if batch is None:
                self._tell(owner.stopped, self)
                return
            if batch.take(self):
                report = self._host.run(batch.requests, self._partial_sink(batch), batch.gone)
                self._tell(owner.finished, batch, report)
                del report  # or the last batch's tensors stay alive while the thread is idle
            else:
                self._tell(owner.untouched, batch)
            del batch

    def _partial_sink(self, batch: InFlight) -> PartialSink:
        ahead_bytes = 0

        def send(index: int, part: InferResponse) -> None:
            nonlocal ahead_bytes
            self._tell(self._owner.partial, batch, index, part)
            ahead_bytes += len(part.body)
            if ahead_bytes >= AHEAD_BYTES:
                ahead_bytes = 0
                self._wait_for_the_loop(batch)

        return send

    def _wait_for_the_loop(self, batch: InFlight) -> None:
        """Wait until the loop has taken what was told, and the batch is not held."""
        taken = threading.Event()
        self._tell(batch.when_free, taken.set)
        while not taken.wait(LOOK_S) and not self._loop.is_closed():
            pass

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)


def _succeed(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], err: BaseException) -> None:
    if not done.done():
        done.set_exception(err)
