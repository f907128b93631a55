"""One place for a worker process: the worker in it, the batches inside, and its supervision."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torchere.serving.errors import DeadlineExceeded, ExecutorDied, LoadFailed, OutOfResources, ServingError
from torchere.serving.execution.executor import ExecutorState, ExecutorStatus, age_s
from torchere.serving.execution.heartbeat import Heartbeat
from torchere.serving.execution.inflight import InFlight
from torchere.serving.execution.loss import Loss, LossKind
from torchere.serving.execution.restart import restart_delay_s
from torchere.serving.execution.send_ahead import QUICK_S, depth
from torchere.serving.execution.slot_settings import SlotSettings
from torchere.serving.execution.wire import Done, Partial, Pong, report_from_done
from torchere.serving.execution.worker_process import WorkerProcess
from torchere.serving.silence import Silence

logger = logging.getLogger(__name__)

_MEMORY = 0.8  # of the running mean of the handler's time, per batch


class Slot:
    """Keeps its executor id through restarts of its worker. Lives on the event loop."""

    def __init__(self, settings: SlotSettings, executor_id: int, gpu_id: int | None) -> None:
        self._settings = settings
        self._inside: dict[int, InFlight] = {}  # by run id, in the order the worker runs them
        self._run_ids = itertools.count()
        self._mean_run_s = QUICK_S
        self._depth = settings.depth or 1  # batches inside at most
        self._losses = 0
        self._first_loss_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self._retiring = False
        self._emptied = asyncio.Event()
        self._silence = Silence(settings.response_timeout_s, self._timed_out)
        self._heartbeat = Heartbeat(
            settings.heartbeat,
            idle=lambda: not self._inside,
            ask=self._ask_for_life,
            on_change=self._suspicion_changed,
            on_dead=self._hung,
            now=settings.now,
        )
        self.in_service = False  # loaded, warm and alive
        self.status = ExecutorStatus(
            executor_id, ExecutorState.STARTING, datetime.now(timezone.utc), 0, gpu_id=gpu_id
        )
        self._worker = self._new_worker()

    def _new_worker(self) -> WorkerProcess:
        return WorkerProcess(
            self._settings.spec,
            self.status.executor_id,
            self.status.gpu_id,
            self._settings.launcher,
            on_message=self._on_message,
            on_gone=self._look_whether_in_service,
            oom=self._settings.oom,
        )

    def _change(self, **changes: Any) -> None:
        """Change fields of the status."""
        self.status = replace(self.status, **changes)
        self._look_whether_in_service()

    def _look_whether_in_service(self) -> None:
        # The state alone is late: it may be seconds from the end of the connection until a loss is known.
        self.in_service = self.status.state is ExecutorState.READY and self._worker.reachable

    @property
    def load(self) -> int:
        """How many batches are inside."""
        return len(self._inside)

    @property
    def room(self) -> int:
        """How many more batches it takes now."""
        if self._retiring or not self.in_service:
            return 0
        room = self._depth - len(self._inside)
        return room if room > 0 else 0

    async def start(self) -> None:
        """Start the worker and load the handler; raises `LoadFailed`."""
        await self._worker.start()
        self._change(
            state=ExecutorState.STARTING if self._supervisor is None else ExecutorState.RESTARTING,
            started_at=datetime.now(timezone.utc),
            started_s=time.monotonic(),
            pid=self._worker.pid,
        )
        await self._worker.load(self._settings.startup_timeout_s)

    async def warm_up(self) -> None:
        """Warm up and go into service, supervised from now on; raises `LoadFailed`."""
        await self._worker.warm_up(self._settings.startup_timeout_s)
        self._change(state=ExecutorState.READY)
        self._heartbeat.start()
        self._settings.on_loaded(self.status.executor_id, age_s(self.status))
        self._settings.on_free()  # others may take long still
        if self._supervisor is None:
            self._supervisor = asyncio.ensure_future(self._supervise())

    def submit(self, batch: InFlight) -> None:
        """Send one batch to the worker, which has room for it."""
        run_id = next(self._run_ids)
        try:
            self._worker.run(run_id, batch.requests)
        except (ValueError, MemoryError) as err:
            failure = OutOfResources("Out of resources", f"the batch can't be sent to its worker: {err}")
            asyncio.get_running_loop().call_soon(batch.fail, failure)  # our caller is not done with it
            return
        if not (self._inside or self._worker.is_paused):
            self._silence.watch()
        self._inside[run_id] = batch

    def _on_message(self, message: Partial | Done | Pong) -> None:
        if isinstance(message, Pong):
            self._heartbeat.answered()
            return
        self._heartbeat.heard()
        batch = self._inside.get(message.run_id)
        if batch is None:
            return
        if isinstance(message, Partial):
            self._heard()
            batch.partial(message.index, message.part)
            if batch.held and self._worker.pause():
                self._silence.over()  # it is we who do not listen
                batch.when_free(self._listen_again)
            return
        del self._inside[message.run_id]
        self._worker.leaves = message.is_last
        self._losses = 0
        self._mean_run_s = _MEMORY * self._mean_run_s + (1 - _MEMORY) * message.handler_s
        self._depth = self._settings.depth or depth(self._mean_run_s)
        if self._inside:
            self._heard()
        else:
            self._silence.over()
            self._emptied.set()
        batch.answer(report_from_done(message, len(batch.requests)))

    def _heard(self) -> None:
        """The worker said something. A paused one may be silent, though what was read still comes."""
        if not self._worker.is_paused:
            self._silence.broken()

    def _listen_again(self) -> None:
        """The client that held the worker up has taken in much of its answer, or was given up."""
        self._worker.resume()
        if self._inside:
            self._silence.watch()

    def _timed_out(self) -> None:
        """The worker said nothing of its batches for too long: answer who waits, and replace it."""
        timeout_s = self._settings.response_timeout_s
        self._change(state=ExecutorState.RESTARTING)
        self._empty(DeadlineExceeded(f"The model did not answer within {timeout_s:g} s."))
        self._worker.kill(Loss(LossKind.TIMEOUT, f"no answer within response_timeout={timeout_s:g} s"))

    def _ask_for_life(self) -> None:
        """Ask the worker in the slot now; the heartbeat outlives each of them."""
        self._worker.ping()

    def _suspicion_changed(self) -> None:
        """The worker owes a sign of life, or has given it."""
        if self.status.state in (ExecutorState.READY, ExecutorState.SUSPECT):
            suspect = self._heartbeat.suspect
            self._change(state=ExecutorState.SUSPECT if suspect else ExecutorState.READY)
            logger.warning(
                "worker %d of model %s version %s %s",
                self.status.executor_id,
                self._settings.spec.model_name,
                self._settings.spec.model_version,
                "gives no sign of life" if suspect else "is there again",
            )
            self._settings.on_free()

    def _hung(self, silent_s: float) -> None:
        """The worker hangs with nothing to do."""
        self._change(state=ExecutorState.RESTARTING)
        self._worker.kill(Loss(LossKind.HANG, f"hung: idle, and no sign of life for {silent_s:g} s"))

    def _empty(self, error: ServingError) -> None:
        """Answer the batch the worker was at with `error`; give back those it had not begun."""
        batches = list(self._inside.values())
        self._inside.clear()
        self._silence.over()
        self._emptied.set()
        # A worker that owed a sign of life when they were sent has begun none of them.
        begun = 0 if self._heartbeat.owes_answer or self._worker.leaves else 1
        for batch in reversed(batches[begun:]):  # the last one first: each goes to the front of its queue
            batch.give_back()
        for batch in batches[:begun]:
            batch.fail(error)

    async def _supervise(self) -> None:
        """Bring the worker back whenever it is lost, until the slot is closed or the rule gives up."""
        while not self._retiring:
            # Shielded: cancelling this task must not end the wait of others.
            loss = await asyncio.shield(self._worker.lost)
            if self._retiring:
                return
            self._note_loss(loss)
            if not await self._restart():
                self._change(state=ExecutorState.FAILED)
            self._settings.on_free()  # also after giving up: who waits must learn that it won't come
            if self.status.state is ExecutorState.FAILED:
                return

    async def _restart(self) -> bool:
        settings = self._settings
        while True:
            delay_s = restart_delay_s(
                self._losses, self._first_loss_s, settings.now(), settings.max_retry_timeout_s
            )
            if delay_s is None:
                return False
            logger.info("Retry worker: %d in %g seconds.", self.status.executor_id, delay_s)
            await asyncio.sleep(delay_s)
            self._worker = self._new_worker()
            try:
                await self.start()
                await self.warm_up()
            except LoadFailed as err:
                self._note_loss(Loss(LossKind.LOAD, err.detail))
                continue
            return True

    def _note_loss(self, loss: Loss) -> None:
        if self._losses == 0:
            self._first_loss_s = self._settings.now()
        self._losses += 1
        self._change(
            state=ExecutorState.RESTARTING,
            last_failure=loss.cause,
            last_failure_at=datetime.now(timezone.utc),
            losses=self.status.losses + 1,
        )
        spec = self._settings.spec
        logger.error(
            "worker %d of model %s version %s was lost: %s",
            self.status.executor_id,
            spec.model_name,
            spec.model_version,
            loss.cause,
            extra={"cause": loss.kind.value},
        )
        self._settings.on_lost(loss.kind.value)
        self._answer_lost(loss)

    def _answer_lost(self, loss: Loss) -> None:
        self._heartbeat.stop()
        out_of_memory = loss.kind is LossKind.OUT_OF_MEMORY
        self._empty(ExecutorDied(loss.cause, crashed=loss.crashed, out_of_memory=out_of_memory))

    async def retire(self) -> None:
        """Finish the batches inside, then stop."""
        self._retiring = True
        while self._inside and not self._worker.lost.done():
            self._emptied.clear()
            emptied = asyncio.ensure_future(self._emptied.wait())
            either: list[asyncio.Future[Any]] = [emptied, self._worker.lost]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            emptied.cancel()
        if self._worker.lost.done():
            self._answer_lost(self._worker.lost.result())
        await self.close()

    async def close(self) -> None:
        """Stop the worker now; batches inside are answered with `ExecutorDied`."""
        self._retiring = True
        self._heartbeat.stop()
        for batch in self._inside.values():
            batch.fail(ExecutorDied("the version was unloaded"))
        self._inside.clear()
        self._silence.stop()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._worker.pid:
            await self._worker.stop()
        self._change(state=ExecutorState.STOPPED)
