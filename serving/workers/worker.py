"""The server's side of one worker: its current process, its executors, and its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torchere.serving.errors import DeadlineExceeded, ExecutorDied, LoadFailed
from torchere.serving.workers.executor import ExecutorState, ExecutorStatus, Outage
from torchere.serving.workers.heartbeat import Heartbeat
from torchere.serving.workers.launch import ENDING_GRACE_S
from torchere.serving.workers.loss import Loss, LossKind, LossRow, loss_of_slow_load
from torchere.serving.workers.messages import Done
from torchere.serving.workers.run import Run
from torchere.serving.workers.send_ahead import FULL_AHEAD, QUICK_S, inside_a_lane
from torchere.serving.workers.worker_process import ProcessEvents, WorkerProcess
from torchere.serving.workers.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

_MEMORY = 0.8  # weight of the old value in the running mean of the handler's time, per batch
CANCEL_GRACE_S = 2.0  # for a coroutine that is cancelled; the lane looks every 0.05 s
_LOOK_S = 0.05  # polling interval of the runs of a process that is to end
KILLS_AT_FIRST_LOAD = 2  # how often a first load is tried again after a loss that it did not cause


class Worker:
    """One worker, which keeps its executor ids across restarts of its process. Lives on the event loop.

    `executors` has the id and the GPU (None: the CPU) of each of its lanes.
    """

    def __init__(self, settings: WorkerSettings, executors: Sequence[tuple[int, int | None]]) -> None:
        self._settings = settings
        self._mean_run_s = QUICK_S
        self._inside_a_lane = 1
        self._row = LossRow(settings.max_retry_timeout_s, settings.spec.max_restarts)
        self._ready_s: float | None = None  # monotonic, when the process entered service
        self._supervisor: asyncio.Task[None] | None = None
        self._retiring = False  # the worker is to end
        self._restarting = False  # a process is brought up in place of a lost one, step by step
        self._retired: WorkerProcess | None = None  # the replaced process; its other lanes finish their runs
        self._ending: asyncio.Task[None] | None = None  # of the last process that was replaced
        self._over: asyncio.Future[Loss]  # the process is lost, or was replaced because it hangs
        started_at = datetime.now(timezone.utc)
        self._statuses = [
            ExecutorStatus(executor_id, ExecutorState.STARTING, started_at, 0, gpu_id=gpu_id)
            for executor_id, gpu_id in executors
        ]
        self._heartbeat = Heartbeat(
            settings.heartbeat,
            idle=lambda: not self._process.inside,
            ask=lambda: self._process.ping(),  # noqa: PLW0108 - of the process there is then
            on_change=self._suspicion_changed,
            on_dead=self._hung_while_idle,
            now=settings.now,
        )
        self.in_service = 0  # lanes that are loaded, warm and alive
        self.outage: Outage | None = None  # since its last lane left service; None: one serves, or none did
        self._process = self._new_process()

    def _new_process(self) -> WorkerProcess:
        self._over = asyncio.get_running_loop().create_future()
        events = ProcessEvents(
            serving=lambda: self._one_more_serves(process),
            pong=self._heartbeat.answered,
            done=lambda message: self._on_done(process, message),
            hung=lambda run: self._hung(process, run),
            gone=self._look_whether_in_service,
        )
        process = WorkerProcess(self._settings, self.first_id, events)
        over = self._over
        process.lost.add_done_callback(lambda lost: None if over.done() else over.set_result(lost.result()))
        return process

    @property
    def first_id(self) -> int:
        """The executor id of the worker's first lane."""
        return self._statuses[0].executor_id

    @property
    def executor_ids(self) -> tuple[int, ...]:
        """The ids of its executors."""
        return tuple(status.executor_id for status in self._statuses)

    @property
    def state(self) -> ExecutorState:
        """The state of its first executor; all have the same, except lanes being added."""
        return self._statuses[0].state

    def statuses(self) -> list[ExecutorStatus]:
        """Return a snapshot of each executor, oldest first."""
        return list(self._statuses)

    def _change(self, **changes: Any) -> None:
        """Change fields of the statuses of all executors."""
        self._statuses = [replace(status, **changes) for status in self._statuses]
        self._look_whether_in_service()

    def _look_whether_in_service(self) -> None:
        # The state alone is late: a loss may be known only seconds after the connection ends.
        is_in_service = self.state is ExecutorState.READY and self._process.reachable
        lanes = self._process.serving if is_in_service else 0
        if lanes:
            self.outage = None
        elif self.in_service:
            self.outage = Outage(self._settings.now(), self._settings.now())
        self.in_service = lanes

    @property
    def load(self) -> int:
        """The number of runs inside."""
        return len(self._process.inside)

    @property
    def free(self) -> int:
        """The number of runs that may be submitted for idle lanes."""
        if self._retiring or self._process.is_exclusive:
            return 0
        return self._process.idle_lanes if self.in_service else 0

    @property
    def ahead(self) -> int:
        """The number of runs of full batches that may be submitted, including those ahead of a free lane."""
        settings = self._settings
        if self._retiring or self._process.is_exclusive or not settings.sends_ahead or settings.spec.pinned:
            return 0
        if settings.spec.batch_size > 1:
            most = self.in_service + FULL_AHEAD if self.in_service else 0
        else:
            most = self.in_service * self._inside_a_lane
        ahead = most - len(self._process.inside)
        return ahead if ahead > 0 else 0

    async def start(self) -> None:
        """Start the process and load its lanes; raise `LoadFailed` if that fails."""
        while True:
            try:
                return await self._start()
            except LoadFailed:
                launcher = self._settings.launcher
                if self._process.needs_own_process and not launcher.has_own_process:
                    self._log(logging.INFO, "gets a process of its own, for its model changes itself")
                    launcher.has_own_process = True
                    self._process = self._new_process()
                elif not await self._replaced_after_kill():
                    raise

    async def _start(self) -> None:
        await self._process.start()
        self._change(
            state=ExecutorState.STARTING if self._supervisor is None else ExecutorState.RESTARTING,
            started_at=datetime.now(timezone.utc),
            started_s=time.monotonic(),
            pid=self._process.pid,
        )
        gpu_ids = [status.gpu_id for status in self._statuses]
        await self._process.load(gpu_ids, self._settings.startup_timeout_s)

    async def warm_up(self) -> None:
        """Warm up and enter service, supervised from now on; raise `LoadFailed` if that fails."""
        while True:
            try:
                await self._process.warm_up(self._settings.startup_timeout_s)
            except LoadFailed:
                if not self._ended_in_service():
                    if not await self._replaced_after_kill():
                        raise
                    await self.start()
                    continue
            except asyncio.CancelledError:
                if self._process.serving and not self._retiring:  # its lanes finish their runs
                    self._enter_service()
                raise
            return self._enter_service()

    def _enter_service(self) -> None:
        self._heartbeat.start()
        if self._supervisor is None:
            self._supervisor = asyncio.ensure_future(self._supervise())

    def _ended_in_service(self) -> bool:
        """Return whether a lane in service ended the process: an ordinary loss, for the supervisor."""
        lost = self._process.lost
        return self._process.serving > 0 and lost.done() and lost.result().kind is not LossKind.LOAD

    async def _replaced_after_kill(self) -> bool:
        """Return whether a first process that was killed or lost its room while it loaded was replaced."""
        loss = await self._kill_while_loading()
        if loss is None or self._supervisor is not None:
            return False
        rendezvous = self._settings.spec.rendezvous
        waits = loss.kind is LossKind.CUT_OFF and rendezvous is not None and rendezvous.is_patient
        if self._row.losses >= KILLS_AT_FIRST_LOAD and not waits:
            return False
        if loss.makes_suspects:  # its load must not cost the others a second room
            self._log(logging.WARNING, "gets a process of its own: it was loading when the shared one ended")
            self._settings.launcher.has_own_process = True
        self._note_loss(loss)
        await asyncio.sleep(self._row.restart_delay_s(self._settings.now()) or 0.0)
        self._process = self._new_process()
        return True

    async def _kill_while_loading(self) -> Loss | None:
        """Return the loss of a process if its load was not the cause; None: the load failed."""
        lost = self._process.lost
        if self._process.pid:  # else it was not even started
            await asyncio.wait({lost}, timeout=ENDING_GRACE_S)  # its sockets may have ended before
        return lost.result().of_load() if lost.done() else None

    def _one_more_serves(self, process: WorkerProcess) -> None:
        if process is not self._process:
            return
        if process.serving > len(self._statuses):  # scaled down meanwhile
            process.retire_lane()
            return
        at = process.serving - 1
        status = self._statuses[at] = replace(self._statuses[at], state=ExecutorState.READY)
        if self._ready_s is None:
            self._ready_s = self._settings.now()
        self._look_whether_in_service()
        self._settings.on_loaded(status.executor_id, time.monotonic() - status.started_s)
        self._settings.on_free()  # do not wait for the other lanes

    async def add(self, executors: Sequence[tuple[int, int | None]]) -> None:
        """Load further lanes, which do not enter service yet.

        Raises:
            LoadFailed: the new lanes did not load; lanes in service continue.
        """
        process = self._process
        # During a restart a lane may serve already, but a second step would take the answer of the first.
        serves = self.state in (ExecutorState.READY, ExecutorState.SUSPECT) and not self._restarting
        state = ExecutorState.STARTING if serves else ExecutorState.RESTARTING
        self._statuses += [
            ExecutorStatus(executor_id, state, datetime.now(timezone.utc), process.pid, gpu_id=gpu_id)
            for executor_id, gpu_id in executors
        ]
        if not serves:
            return  # they are loaded with its next process, or right after it
        try:
            await process.add_lanes([gpu_id for _, gpu_id in executors], self._settings.startup_timeout_s)
        except BaseException as err:
            self._drop([executor_id for executor_id, _ in executors], process, err)

    async def warm_up_added(self) -> None:
        """Warm up the added lanes and put them in service; raise `LoadFailed` if that fails."""
        process = self._process
        fresh = self.executor_ids[process.serving :]
        try:
            await process.warm_up(self._settings.startup_timeout_s)
        except BaseException as err:
            serving = self.executor_ids[: self._process.serving]
            self._drop([executor_id for executor_id in fresh if executor_id not in serving], process, err)

    def _drop(self, executor_ids: Sequence[int], process: WorkerProcess, err: BaseException) -> None:
        """Remove lanes that did not load, and raise the error; replace the process if they took too long."""
        if process is not self._process and isinstance(err, (LoadFailed, asyncio.TimeoutError)):
            return  # they are loaded with its next process
        self._statuses = [status for status in self._statuses if status.executor_id not in executor_ids]
        if not isinstance(err, asyncio.TimeoutError):  # if the load was cancelled, the version ends its runs
            raise err
        self._replace_process(Loss(LossKind.TIMEOUT, "a lane did not load in time"))
        loss = loss_of_slow_load(self._settings.startup_timeout_s)
        raise self._settings.spec.failed(loss.cause) from None

    def remove(self, count: int) -> None:
        """End the last `count` lanes, each after the runs that were sent to it before."""
        kept = len(self._statuses) - count
        while self._process.serving > kept:
            self._process.retire_lane()
        self._statuses = self._statuses[:kept]
        self._look_whether_in_service()

    def submit(self, run: Run) -> None:
        """Send a run to the process, which must have room for it."""
        self._process.submit(run)

    def _on_done(self, process: WorkerProcess, message: Done) -> None:
        if process is not self._process:
            return
        self._heartbeat.heard()
        settings = self._settings
        # With several lanes, reports of the others must not hide that one lane hangs repeatedly.
        in_service_s = 0.0 if self._ready_s is None else settings.now() - self._ready_s
        proves_health = len(self._statuses) == 1 or in_service_s > settings.response_timeout_s
        if self._row.losses and proves_health and not message.end_cause:
            self._row.end()
        if 0 <= message.handler_s < math.inf:  # the value from the worker is not trusted
            self._mean_run_s = _MEMORY * self._mean_run_s + (1 - _MEMORY) * message.handler_s
        self._inside_a_lane = inside_a_lane(self._mean_run_s, process.serving)

    def _suspicion_changed(self) -> None:
        """Change the state after a missed heartbeat, or after its late answer."""
        if self.state in (ExecutorState.READY, ExecutorState.SUSPECT):
            suspect = self._heartbeat.suspect
            state = ExecutorState.SUSPECT if suspect else ExecutorState.READY
            lanes = self._process.serving  # those that are still loading keep their state
            self._statuses[:lanes] = [replace(status, state=state) for status in self._statuses[:lanes]]
            self._look_whether_in_service()
            self._log(logging.WARNING, "gives no sign of life" if suspect else "gives signs of life again")
            self._settings.on_free()

    def _hung_while_idle(self, silent_s: float) -> None:
        self._change(state=ExecutorState.RESTARTING)
        cause = f"hung: idle, and no sign of life for {silent_s:g} s"
        self._process.kill(Loss(LossKind.HANG, cause, silent_s=silent_s))

    def _hung(self, process: WorkerProcess, run: Run) -> None:
        """Answer the run of a lane that was silent for too long, and replace the lane's process.

        If the lane has several runs (`asyncCommunication`), this one is cancelled first, which may suffice.
        """
        timeout_s = self._settings.response_timeout_s
        cause = f"no answer within response_timeout={timeout_s:g} s"
        loss = Loss(LossKind.TIMEOUT, cause, silent_s=timeout_s)
        is_late = DeadlineExceeded(f"The model did not answer within {timeout_s:g} s.")
        run.fail(ExecutorDied(cause) if self._settings.hangs_as_deaths else is_late)
        if self._settings.spec.at_once > 1:
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._end_hung, process, run, loss)
        else:
            self._end_hung(process, run, loss)

    def _end_hung(self, process: WorkerProcess, run: Run, loss: Loss) -> None:
        if run.run_id not in process.inside or process is self._retired:  # ended, or about to be
            return
        if process is not self._process or process.hangs():
            if process is self._process:
                self._change(state=ExecutorState.RESTARTING)
            process.kill(loss)
        else:
            self._replace_process(loss)

    def _replace_process(self, loss: Loss) -> None:
        """Start a new process, and let the other lanes of the old one finish their runs."""
        process = self._process
        if self._settings.spec.gpu_ids or self._retired is not None or self._retiring:
            process.kill(loss)  # two processes may not fit in memory, and three must not run
            return
        self._retired = process
        self._ending = asyncio.ensure_future(self._end_retired(process, loss))
        if not self._over.done():
            self._over.set_result(loss)

    async def _end_retired(self, process: WorkerProcess, loss: Loss) -> None:
        until_s = time.monotonic() + self._settings.response_timeout_s
        while not (process.hangs() or process.lost.done()) and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        process.kill(loss)
        lost = await asyncio.shield(process.lost)
        process.take_apart(ExecutorDied(lost.cause))
        self._retired = None

    async def _supervise(self) -> None:
        """Restart the process after each loss, until the worker is closed or the restart rule gives up."""
        while not self._retiring and self.state is not ExecutorState.FAILED:
            # Shielded: cancelling this task must not cancel the shared future.
            loss = await asyncio.shield(self._over)
            if self._retiring:
                return
            self._note_loss(loss)
            self._restarting = True
            if not await self._restart():
                self._change(state=ExecutorState.FAILED)
            self._restarting = False
            self._settings.on_free()  # also after giving up, so that waiting requests are answered

    async def _restart(self) -> bool:
        settings = self._settings
        logger.info("Auto recovery start timestamp: %d", time.time() * 1000)
        while True:
            delay_s = self._row.restart_delay_s(settings.now())
            if delay_s is None:
                return False
            if self.outage is not None:
                self.outage = self.outage._replace(restart_s=settings.now() + delay_s)
            logger.info("Retry worker: %d in %g seconds.", self.first_id, delay_s)
            await asyncio.sleep(delay_s)
            self._process = self._new_process()
            loss: Loss | None = None
            try:
                await self.start()
                await self.warm_up()
                while missing := [status.gpu_id for status in self._statuses[self._process.serving :]]:
                    await self._process.add_lanes(missing, settings.startup_timeout_s)
                    await self._process.warm_up(settings.startup_timeout_s)
            except LoadFailed as err:
                loss = await self._kill_while_loading() or Loss(LossKind.LOAD, err.detail)
                if self._process.serving and self._process.reachable:  # as in `add`, these lanes continue
                    self._log(logging.ERROR, f"goes on without the lanes that were added: {err.detail}")
                    self._statuses = self._statuses[: self._process.serving]
                    loss = None
            except asyncio.TimeoutError:
                loss = loss_of_slow_load(settings.startup_timeout_s)
            if loss is None or self._ended_in_service():
                logger.info("Auto recovery succeeded, reset recoveryStartTS")
                return True
            self._process.kill(loss)  # it is alive if the server could not even ask it to load
            self._note_loss(loss)

    def _note_loss(self, loss: Loss) -> None:
        now_s = self._settings.now()
        in_service_s = 0.0 if self._ready_s is None else now_s - self._ready_s
        self._row.add(loss, max(0.0, in_service_s - loss.silent_s), now_s)
        self._ready_s = None
        self._change(
            state=ExecutorState.RESTARTING,
            last_failure=loss.cause,
            last_failure_at=datetime.now(timezone.utc),
            losses=self._statuses[0].losses + 1,
        )
        self._log(logging.ERROR, f"was lost: {loss.cause}. Worker disconnected.", cause=loss.kind.value)
        self._settings.on_lost(loss.kind.value)
        self._answer_lost(loss)

    def _log(self, level: int, words: str, **extra: str) -> None:
        spec, text = self._settings.spec, "worker %d of model %s version %s %s"
        logger.log(level, text, self.first_id, spec.model_name, spec.model_version, words, extra=extra)

    def _answer_lost(self, loss: Loss) -> None:
        self._heartbeat.stop()
        if self._process is not self._retired:
            is_oom = loss.kind is LossKind.OUT_OF_MEMORY
            self._process.take_apart(ExecutorDied(loss.cause, crashed=loss.crashed, out_of_memory=is_oom))

    async def retire(self) -> None:
        """Finish the runs inside, then stop."""
        self._retiring = True
        if self._ending is not None:  # a replaced process finishes its runs, for one response time-out
            await asyncio.wait({self._ending})
        while self._process.inside and not self._process.lost.done():
            await asyncio.sleep(_LOOK_S)
        if self._process.lost.done():
            loss = self._process.lost.result()
            if self._process.inside:  # else the loss was logged before
                self._log(logging.ERROR, f"was lost while it drained: {loss.cause}", cause=loss.kind.value)
            self._answer_lost(loss)
        await self.close()

    async def close(self) -> None:
        """Stop the process now; answer the runs inside with `ExecutorDied`."""
        self._retiring = True
        self._heartbeat.stop()
        unloaded = ExecutorDied("the version was unloaded")
        self._process.fail_all(unloaded)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._retired is not None:
            self._retired.fail_all(unloaded)
            self._retired.kill(Loss(LossKind.STOPPED, "stopped by the server"))
        if self._process.pid:
            await self._process.stop()
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)
        self._change(state=ExecutorState.STOPPED)
