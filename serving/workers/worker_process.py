"""The server's side of one worker process: its sockets, the runs inside it, and its loss."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import msgspec

from torchere.serving.errors import NoRoom, ServingError
from torchere.serving.io.watchdog import was_late, within
from torchere.serving.logs.levels import follow
from torchere.serving.logs.worker_lines import new_token, relay_all
from torchere.serving.workers import messages
from torchere.serving.workers.frames import FrameSocket
from torchere.serving.workers.lanes import MAX_LANES, LaneSocket
from torchere.serving.workers.launch import ENDING_GRACE_S, LAST_WORDS_S, Launched, open_lanes
from torchere.serving.workers.loss import (
    Loss,
    LossKind,
    loss_of_end,
    loss_of_rank,
    loss_of_silence,
    loss_of_slow_load,
)
from torchere.serving.workers.run import Run
from torchere.serving.workers.worker_settings import WorkerSettings

logger = logging.getLogger("torchere.worker")

KILLED_GRACE_S = 10.0  # after SIGKILL: the kernel may take seconds to free much memory, on a GPU, too
MAX_CAUSE_CHARACTERS = 300  # of the cause that a worker gives for its end
LOOK_AGAIN_S = 1.0  # grace after a blocked event loop, before a lane counts as silent
_LOAD = attrgetter("inside", "since_s")  # of a lane: its runs, then since when it is busy


@dataclass(frozen=True, slots=True)
class ProcessEvents:
    """Callbacks for the events of a process. Called on the event loop."""

    serving: Callable[[], None]  # one more lane is in service
    pong: Callable[[], None]  # the process answered a ping
    done: Callable[[messages.Done], None]  # the process sent a report
    hung: Callable[[Run], None]  # a lane was silent for the response time-out; its run is not answered yet
    gone: Callable[[], None]  # the process can't receive messages any more


class WorkerProcess:
    """One process and the runs inside it. Methods run on the event loop.

    `lost` completes with the cause when the process has ended, possibly seconds after `ProcessEvents.gone`.
    """

    def __init__(self, settings: WorkerSettings, executor_id: int, events: ProcessEvents) -> None:
        self._settings = settings
        self._spec = settings.spec
        self._executor_id = executor_id  # of its first lane, for its log lines
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._launched: Launched  # this, `_control` and `_output` are set by `start`
        self._control: FrameSocket
        self._output: asyncio.Task[None]
        self._lanes: list[LaneSocket] = []  # lanes in service come first
        self._leaving_lanes: set[LaneSocket] = set()  # retired, until their sockets end
        self.serving = 0  # lanes that are loaded and warm
        self._step_reply: asyncio.Future[None] | None = None  # of the step (load, warm-up) under way
        self._killed: Loss | None = None  # the reason, if the server killed it
        self._log_token = new_token()
        self._reaper: asyncio.Task[None] | None = None
        self._places: list[int] = []  # places free for reuse
        self._places_used = self._last_run_id = 0
        self._last_signs: dict[int, float] | None = None  # `_begun` at the page's end; None: it is open
        self._lanes_loaded = 0  # lanes ever opened, ended ones included: all lane numbers are below this
        self._heard_s = 0.0  # monotonic time of the last report
        self._watch: asyncio.TimerHandle | None = None
        self._looked_late = False
        self._end_cause = ""  # why it ends by itself; it has begun no run after its last report
        self.needs_own_process = False  # the load failed because the process is shared
        self.inside: dict[int, Run] = {}  # by run id, in the order they were sent
        self.is_exclusive = False  # the run inside must be alone: no other may be sent
        self.lost: asyncio.Future[Loss] = self._loop.create_future()
        self.pid = 0  # before the start
        self._rank_pids: Sequence[int] = ()  # of the group's ranks from 1 on, on this machine

    @property
    def reachable(self) -> bool:
        """Whether messages can reach the process."""
        if not self.pid or self._reaper is not None:
            return False
        return self._control.open and all(lane.frames.open for lane in self._lanes[: self.serving])

    async def start(self) -> None:
        """Start the process and connect to it; the handler is not loaded yet.

        Raises:
            LoadFailed: the system can't start the process.
        """
        try:
            self._launched = launched = await self._settings.launcher.launch(self._spec.most_requests)
        except OSError as err:
            raise self._spec.failed(f"the worker process could not be started: {err}") from err
        self.pid = launched.pid
        self._control = FrameSocket(launched.control, self._on_control, self._on_end, messages.CONTROL_BYTES)
        # The exit ends it too, because a forked child may keep the sockets open.
        launched.exit_code.add_done_callback(lambda _: self._on_end(""))
        spec = self._spec
        origin = {"model": spec.model_name, "version": spec.model_version, "executor": self._executor_id}
        has_ended, report = launched.exit_code.done, self._settings.on_metrics
        self._output = asyncio.ensure_future(
            relay_all(launched.output, self._log_token, origin, logger, has_ended, report=report)
        )

    async def load(self, gpu_ids: Sequence[int | None], timeout_s: float) -> None:
        """Load a lane for each of `gpu_ids` (None: on the CPU).

        Raises:
            LoadFailed: a lane failed to load, or not in time; the process has ended then.
        """
        follow(self)
        await self._load(messages.load_of(self._spec, tuple(gpu_ids), self._log_token), timeout_s)

    async def add_lanes(self, gpu_ids: Sequence[int | None], timeout_s: float) -> None:
        """Load further lanes.

        Raises:
            LoadFailed: the new lanes failed to load; lanes in service continue.
            TimeoutError: the new lanes are still loading after `timeout_s`.
        """
        await self._load(messages.AddLanes(tuple(gpu_ids)), timeout_s)

    async def _load(self, message: messages.Load | messages.AddLanes, timeout_s: float) -> None:
        """Load lanes, and give each a data socket."""
        self._open_lanes(len(message.gpu_ids))
        await self._step(message, timeout_s)

    def _open_lanes(self, count: int) -> None:
        """Open the data sockets of `count` lanes; raise `LoadFailed` if that fails."""
        try:
            sockets = open_lanes(self._launched, count)
        except OSError as err:
            raise self._spec.failed(f"its sockets could not be opened: {err}") from err
        self._lanes += [LaneSocket(each, self._on_data, self._on_lane_end, self._spec) for each in sockets]
        self._lanes_loaded += count

    async def warm_up(self, timeout_s: float) -> None:
        """Warm up the loaded lanes and put them in service.

        Raises:
            LoadFailed: as for `load`, or while other lanes serve as for `add_lanes`.
            TimeoutError: as for `add_lanes`.
            CancelledError: lanes in service continue; without any, the process has ended.
        """
        await self._step(messages.WarmUp(), timeout_s)
        if self.serving < len(self._lanes):  # the worker is hostile
            self.kill(Loss(LossKind.PROTOCOL, "said that its lanes are warm before they were"))
            raise self._spec.failed("it said that its lanes are warm before they were")

    async def _step(self, message: messages.ControlToWorker, timeout_s: float) -> None:
        is_beside = self.serving > 0
        if self.lost.done():  # lost between two steps
            self._drop_unready()
            raise self._spec.failed(self.lost.result().cause)
        self._step_reply = self._loop.create_future()
        self._order(message)
        try:
            await within(self._step_reply, timeout_s)
        except BaseException as err:
            self._drop_unready()
            if is_beside or (self.serving and isinstance(err, asyncio.CancelledError)):
                raise  # lanes in service may have runs
            if not isinstance(err, asyncio.TimeoutError):
                await self._kill_and_reap(Loss(LossKind.LOAD, "the load failed or was given up"))
                raise
            await self._kill_and_reap(loss_of_slow_load(timeout_s))
            raise self._spec.failed(self.lost.result().cause) from None
        finally:
            self._step_reply = None

    def _order(self, message: messages.ControlToWorker) -> None:
        self._control.send([messages.encode_frame(message)])

    def ping(self) -> None:
        """Send a ping; a process with a single lane answers it between two runs."""
        self._order(messages.Ping())

    def set_log_level(self, name: str, level: int) -> None:
        """Change the level of a logger in the process."""
        self._order(messages.LogLevel(name, level))

    def retire_lane(self) -> None:
        """End the last lane in service, after the runs that were sent to it before."""
        self.serving -= 1
        lane = self._lanes.pop(self.serving)
        self._leaving_lanes.add(lane)
        lane.frames.finish()

    def _drop_unready(self) -> None:
        """Remove the lanes that are not in service: a step for them failed."""
        for lane in self._lanes[self.serving :]:
            lane.frames.close()
        del self._lanes[self.serving :]

    @property
    def idle_lanes(self) -> int:
        """The number of lanes in service that are idle; with `at_once` above 1, of runs that fit inside."""
        if self._spec.at_once > 1:
            return max(0, self.serving * self._spec.at_once - len(self.inside))
        idle = 0
        for at in range(self.serving):  # read for every request: a generator is slower
            idle += not self._lanes[at].inside
        return idle

    def submit(self, run: Run) -> None:
        """Send a run to the least loaded lane; at least one must be in service."""
        self._last_run_id = run_id = self._last_run_id + 1
        place = self._places[-1] if self._places else self._places_used
        try:
            parts = messages.encode_run(run_id, place, run.requests, self._launched.page.to_worker)
        except (ValueError, MemoryError) as err:
            failure = NoRoom("Out of resources", f"the batch can't be sent to its worker: {err}")
            self._loop.call_soon(run.fail, failure)  # later: the caller still uses the run
            return
        if not self.serving:
            raise RuntimeError("submit() without a lane that serves")
        lane = self._lanes[0]
        if lane.inside and self.serving > 1:
            lane = min(self._lanes[: self.serving], key=_LOAD)
        if self._places:
            self._places.pop()
        else:
            self._places_used += 1
        page = self._launched.page
        page.prepare(place, self._settings.threads())
        run.run_id, run.place, run.page = run_id, place, page
        run.shares_process = self._launched.is_shared
        run.heard_s = time.monotonic()
        self.inside[run_id] = run
        self.is_exclusive = run.exclusive
        if not lane.inside:
            lane.since_s = run.heard_s
        lane.inside += 1
        run.lane = lane
        lane.frames.send(parts)
        if self._watch is None:
            self._look_in(self._settings.response_timeout_s)

    def _on_data(self, lane: LaneSocket, payload: memoryview) -> None:
        try:
            message = messages.data_of(payload, self._spec)
            if isinstance(message, messages.Done) and message.large:
                done, run = message, self.inside.get(message.run_id)
                size = messages.raw_answer_bytes(done, self._spec, None if run is None else run.requests)
                if done.slot < 0:
                    lane.frames.take(size, partial(self._on_large, lane, done))
                    return
                message = messages.done_with_raw(done, self._launched.page.to_server.take(done.slot, size))
        except (msgspec.MsgspecError, RecursionError, ValueError) as err:
            lane.frames.fail(f"sent a frame that is not a message: {err}")
            return
        self._on_message(lane, message)

    def _on_large(self, lane: LaneSocket, done: messages.Done, raw: memoryview) -> None:
        self._on_message(lane, messages.done_with_raw(done, raw))

    def _on_message(self, lane: LaneSocket, message: messages.DataFromWorker) -> None:
        run = self.inside.get(message.run_id)
        if run is None or run.lane is not lane:
            return
        if isinstance(message, messages.Done):
            self._on_done(message, run, lane)
            lane.frames.begin_turn()  # a report was requested: a large one may take longer than a turn
        elif run.part(message.index, message.part) and run.page is not None:
            run.page.hold(run.place, held=True)

    def _on_done(self, message: messages.Done, run: Run, lane: LaneSocket) -> None:
        del self.inside[message.run_id]
        self.is_exclusive = False
        lane.inside -= 1
        run.lane = None
        self._places.append(run.place)
        self._heard_s = time.monotonic()
        self._end_cause = self._end_cause or message.end_cause[:MAX_CAUSE_CHARACTERS]
        self._events.done(message)
        run.done(messages.report_from_done(message, len(run.requests)))

    def _on_control(self, payload: memoryview) -> None:
        try:
            message = messages.control_from_worker.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as err:
            self._control.fail(f"sent a frame that is not a message: {err}")
            return
        if isinstance(message, messages.Pong):
            self._events.pong()
            self._settings.on_metrics(message.metrics)
        elif isinstance(message, messages.RankLost | messages.RankPids):
            self._hear_of_ranks(message)
        elif isinstance(message, messages.Serving):
            if self.serving < len(self._lanes):
                self.serving += 1
                self._events.serving()
        elif self._step_reply is not None and not self._step_reply.done():
            if isinstance(message, messages.LoadError):
                self.needs_own_process = message.needs_own_process
                self._step_reply.set_exception(self._spec.failed(message.detail, message.out_of_memory))
            elif isinstance(message, messages.Loaded):
                self._step_reply.set_result(None)

    def _hear_of_ranks(self, message: messages.RankLost | messages.RankPids) -> None:
        """Take a message of rank 0 about the other ranks of its group; end the group if one is lost."""
        if isinstance(message, messages.RankPids):  # the worker is not trusted: it may name too many
            self._rank_pids = message.pids[: self._spec.ranks - 1]
            return
        code, cause = message.exit_code, message.cause[:MAX_CAUSE_CHARACTERS]
        killed_for_memory = code == -signal.SIGKILL and self._settings.oom.claim()
        self.kill(loss_of_rank(message.rank, code, cause, killed_for_memory, message.is_cut_off))

    def _look_in(self, left_s: float) -> None:
        self._watch = self._loop.call_later(left_s, self._look, time.monotonic() + left_s)

    def _look(self, due_s: float) -> None:
        """Look for a lane that has been silent for the response time-out, and fail its run."""
        self._watch = None
        timeout_s = self._settings.response_timeout_s
        if not self.inside or self.lost.done():
            return
        if was_late(due_s) and not self._looked_late:  # the event loop was blocked: reports may be unread
            self._looked_late = True  # only once, so that a loop that is always late still finds a hang
            self._look_in(min(LOOK_AGAIN_S, timeout_s))
            return
        self._looked_late = False
        now_s = time.monotonic()
        run, since_s = min(self._silences(now_s), key=lambda each: each[1])
        left_s = since_s + timeout_s - now_s
        if left_s > 0:
            self._look_in(left_s)
            return
        logger.error(
            "Backend worker did not respond in given time: model %s version %s gave no answer within its "
            "responseTimeout of %g s",
            self._spec.model_name,
            self._spec.model_version,
            timeout_s,
        )
        self._look_in(timeout_s if self._spec.at_once == 1 else 0.0)  # other coroutines may hang, too
        run.cancel(0)
        self._events.hung(run)

    def _silences(self, now_s: float) -> Iterator[tuple[Run, float]]:
        """Yield each run and the start of its lane's silence: `now_s` for answered, held and waiting runs."""
        signs = self._begun()
        at_work = [run.lane for run_id, run in self.inside.items() if run_id in signs]
        for run_id, run in self.inside.items():
            sign_s = signs.get(run_id)
            if run.answered or run.held or (sign_s is None and run.lane in at_work):
                yield run, now_s
            elif sign_s is None:
                yield run, max(run.heard_s, self._heard_s)
            else:
                yield run, max(min(sign_s, now_s), run.heard_s)

    def _begun(self) -> dict[int, float]:
        """Return the time of the last progress of each run that a lane has begun."""
        if self._last_signs is not None:
            return self._last_signs
        # A lane that takes several runs at once uses the cell of each run's place (`concurrent_lane.py`).
        cells = min(self._lanes_loaded, MAX_LANES) if self._spec.at_once == 1 else self._places_used
        return self._launched.page.begun(cells) if cells else {}

    def hangs(self) -> bool:
        """Whether no lane works on a run that is still unanswered."""
        signs = self._begun()
        return not any(run_id in signs and not run.answered for run_id, run in self.inside.items())

    def take_apart(self, error: ServingError) -> None:
        """Answer the runs that lanes had begun with `error`, and return the others to their owners.

        Call it after all messages of the process have been read.
        """
        signs = self._begun()
        runs, self.inside = list(self.inside.values()), {}
        for run in runs:  # first: the quarantine records them before other requests run again
            if run.run_id in signs:
                run.fail(error)
        for run in reversed(runs):  # in reverse order: each goes to the front of its queue
            run.give_back()

    def fail_all(self, error: ServingError) -> None:
        """Answer all runs inside with `error`."""
        runs, self.inside = list(self.inside.values()), {}
        for run in runs:
            run.fail(error)

    def kill(self, loss: Loss) -> None:
        """Kill the process; `lost` completes when it has ended."""
        if self._killed is None:
            is_group, pids = self._spec.is_group, (self.pid, *self._rank_pids)
            self._killed = loss_of_silence(loss, pids) if is_group else loss
        if self.pid:
            self._launched.kill(loss)

    async def _kill_and_reap(self, loss: Loss) -> None:
        self.kill(loss)
        try:
            await asyncio.wait_for(asyncio.shield(self.lost), KILLED_GRACE_S)
        except asyncio.TimeoutError:  # a process inside a hung driver does not react to signals
            logger.error("process %d of worker %d does not end by SIGKILL", self.pid, self._executor_id)
            if not self.lost.done():
                self.lost.set_result(loss)

    async def stop(self) -> None:
        """Close the sockets so that the process ends by itself; kill it after `ENDING_GRACE_S`."""
        self._killed = self._killed or Loss(LossKind.STOPPED, "stopped by the server")
        for lane in self._lanes:
            lane.frames.close_writing()
        self._control.close_writing()
        try:
            await asyncio.wait_for(asyncio.shield(self.lost), ENDING_GRACE_S)
        except asyncio.TimeoutError:
            await self._kill_and_reap(Loss(LossKind.STOPPED, "did not stop when asked"))

    def _on_lane_end(self, lane: LaneSocket, fault: str) -> None:
        self._leaving_lanes.discard(lane)
        if fault or lane in self._lanes[: self.serving]:
            self._on_end(fault)

    def _on_end(self, fault: str) -> None:
        """Handle the end of a socket: the process has ended, or has broken the protocol (`fault`)."""
        if fault:
            self.kill(Loss(LossKind.PROTOCOL, fault))
        if self._reaper is None:
            self._reaper = asyncio.ensure_future(self._reap())
            self._events.gone()

    async def _reap(self) -> None:
        """Wait for the end of the process, which may have closed its socket only, and determine the cause."""
        try:
            code = await asyncio.wait_for(asyncio.shield(self._launched.exit_code), ENDING_GRACE_S)
        except asyncio.TimeoutError:
            self.kill(Loss(LossKind.PROTOCOL, "closed its socket without ending"))
            code = await self._launched.exit_code
        loss = self._killed or self._launched.loss(code, self._settings.oom)
        if self._killed is None and self._spec.is_group:
            loss = replace(loss, cause=f"rank 0: {loss.cause}")
        if self._end_cause:  # which the worker has reported
            loss = loss_of_end(self._end_cause)
        await self._read_out()
        if self._step_reply is not None and not self._step_reply.done():
            # A worker killed while it loads has usually asked for more memory than there is.
            by_server = self._killed is not None and not self._killed.hints_at_memory
            out_of_memory = code == -signal.SIGKILL and not by_server
            failure = self._spec.failed(f"{loss.cause} while it was loading", out_of_memory)
            self._step_reply.set_exception(failure)
        if not self.lost.done():
            self.lost.set_result(loss)

    async def _read_out(self) -> None:
        """Read the last messages and output, for at most `LAST_WORDS_S`: a child may keep them open."""
        lanes = [*self._lanes, *self._leaving_lanes]
        last_words = [self._output, *(lane.ended for lane in lanes)]
        await asyncio.wait(last_words, timeout=LAST_WORDS_S)
        self._output.cancel()
        for frames in [*(lane.frames for lane in lanes), self._control]:
            frames.close()
        if self._watch is not None:  # the timer would keep the whole version alive for the response time-out
            self._watch.cancel()
        self._launched.close()
        self._launched.lanes.close()
        self._last_signs = self._begun()
        for run in self.inside.values():
            run.page = None
        self._launched.page.close()
