"""A worker of several processes: the ranks of `torch.distributed`, with the environment that torchrun gives.

The worker process that the server knows is rank 0. It forks the other ranks of its machine before it loads
its handler, and meets those of further machines (`machines.py`). It has each of them load, warm up and run
with it, and answers alone, as in TorchServe. With `pp` the other ranks only load; their handlers must start
their part of the work then. When a rank ends, all end, and the server learns which rank it was. To the pool
the group is one worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import msgspec

from torchere.handlers.loading.devices import kind_of
from torchere.handlers.loading.weights import SharedModels
from torchere.serving.logs.worker_lines import name_rank
from torchere.serving.process.signals import live
from torchere.serving.types import NO_DEADLINE, InferRequest
from torchere.serving.workers.devices import show_devices
from torchere.serving.workers.executor import BatchReport, LoadSpec
from torchere.serving.workers.frames import FrameReader, Parts, send_all
from torchere.serving.workers.host import HandlerHost, PartialSink
from torchere.serving.workers.machines import (
    MachinesMissing,
    interface_variables,
    meet,
    open_store,
    reached_at,
)
from torchere.serving.workers.messages import (
    FromRank,
    Join,
    Load,
    Loaded,
    LoadError,
    Message,
    Ping,
    Pong,
    RankDone,
    RankLost,
    RankPids,
    WarmUp,
    encode_frame,
    encode_run,
    from_rank,
    load_of,
    pong_of,
)
from torchere.serving.workers.rank import (
    environment,
    has_failed,
    prepare_to_fork,
    serve_rank,
    use_batch_policy,
)

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STEP_GRACE_S = 5.0  # for other ranks, when one has failed in a batch: they may wait for it in a collective
SILENT_S = 2.0  # after a ping: a rank that has not answered is named in the log
ENDING_S = 1.0  # for ranks to end by themselves; the server grants their worker twice as much
LAST_WORDS_S = 0.2  # for a machine's report on a lost rank, if another rank's end is read first
_LOOK_S = 0.5
_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True, slots=True)
class _Rank:
    """Rank 0's view of another rank."""

    number: int
    pid: int  # 0: on another machine
    connection: socket.socket
    frames: FrameReader
    machine: str = ""  # the address of the other machine
    place: int = 0  # of its machine in the group
    replies: queue.SimpleQueue[Loaded | RankDone] = field(default_factory=queue.SimpleQueue)

    def send(self, parts: Parts) -> None:
        """Send a message; a rank that has ended is noticed by the thread that reads its replies."""
        with contextlib.suppress(OSError):
            send_all(self.connection, parts)


class GroupHost(HandlerHost):
    """The host of a handler in rank 0, which makes the other ranks do the same.

    Args:
        spec: the load parameters; `spec.ranks` is the number of processes on each machine.
        gpu_id: the first GPU of the group; None: the CPU.
        shared_models: see `HandlerHost`.
        send: sends a message to the server; called in two threads.

    Raises:
        LoadFailed: a rank could not be started, or the address of the rendezvous could not be bound.
    """

    def __init__(
        self,
        spec: LoadSpec,
        gpu_id: int | None,
        shared_models: SharedModels,
        send: Callable[[Message], None],
    ) -> None:
        self._spec = spec
        self._send = send
        self._ranks: list[_Rank] = []
        self._silent: set[int] = set()  # ranks that have not answered the last ping
        self._pinged_s = 0.0
        self._failed: tuple[int, float] | None = None  # the rank that failed in the running batch, and when
        self._end_causes: dict[int, str] = {}  # of ranks whose handlers have ended them
        self._runs = False  # rank 0 is inside a batch
        self._closing = False
        show_devices(spec, gpu_id, kind_of(spec.model_config))
        on_gpu = gpu_id is not None
        if not on_gpu:
            use_batch_policy()
        prepare_to_fork(spec)
        for number in range(1, spec.ranks):
            self._fork(number, on_gpu)
        send(RankPids(tuple(rank.pid for rank in self._ranks)))
        self._host_of_store = spec.rendezvous.host if spec.rendezvous else LOOPBACK
        machines = self._meet()
        # After the forks: the other ranks must not inherit the store.
        self._store = open_store(self._host_of_store, spec.ranks * machines)
        self._join = self._join_of(machines)
        os.environ.update(environment(spec, self._join, 0))
        name_rank(0)
        super().__init__(spec, 0 if on_gpu else None, shared_models)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def load(self) -> None:
        """Load the handler in all ranks at the same time: they wait for each other while they load.

        Raises:
            LoadFailed: it failed in rank 0. A failure of another rank goes to the server at once, because
                rank 0 may wait for that rank.
        """
        for rank in self._ranks:
            join = msgspec.structs.replace(self._join, rank=rank.number)
            if rank.machine:
                join = msgspec.structs.replace(join, host="", machine=rank.place, interface={})
            rank.send([encode_frame(join)])
        super().load()
        self._collect()

    def warm_up(self) -> None:
        """Warm up all ranks together; raises as `load` does."""
        self.tell(WarmUp())
        super().warm_up()
        self._collect()

    def run(
        self,
        requests: Sequence[InferRequest],
        send_partial: PartialSink,
        gone: Sequence[int] = (),
        is_unwanted: Callable[[], bool] | None = None,
    ) -> BatchReport:
        """Run one batch in all ranks, and return the report of rank 0.

        All ranks must run the same requests, so rank 0 leaves out the late ones for all, and a batch that has
        begun is not given up (`is_unwanted` is ignored).
        """
        now_s = time.monotonic()
        left_out = {at for at, request in enumerate(requests) if request.deadline_s <= now_s}.union(gone)
        requests = [
            request if at in left_out else msgspec.structs.replace(request, deadline_s=NO_DEADLINE)
            for at, request in enumerate(requests)
        ]
        together = [request for at, request in enumerate(requests) if at not in left_out]
        follows = bool(together) and self._spec.parallel_type != "pp"
        if follows:
            self._failed = None
            self._runs = True
            parts = encode_run(0, 0, together)
            for rank in self._ranks:
                rank.send(parts)
        report = super().run(requests, send_partial, gone)
        self._runs = False
        if follows:
            ran = (outcome for at, outcome in enumerate(report.outcomes) if at not in left_out)
            self._end_batch(has_failed(ran))
        return report

    def _end_batch(self, failed: bool) -> None:
        """Wait for the other ranks; `failed`: rank 0 failed, and they may wait for it in vain."""
        try:
            replies = self._collect(STEP_GRACE_S if failed else None)
        except queue.Empty:
            self.end_cause = "its ranks are out of step: one failed, and others wait for it"
            return
        for rank, reply in zip(self._ranks, replies, strict=True):
            if isinstance(reply, RankDone) and reply.end_cause:
                self.end_cause = f"rank {rank.number}: {reply.end_cause}"

    def ping(self) -> None:
        """Ask every rank for a sign of life; the server gets its answer when all have given one."""
        self._pinged_s = time.monotonic()
        self._silent.update(rank.number for rank in self._ranks)
        self.tell(Ping())
        if not self._ranks:  # no other machine came, so there is no rank that could reply
            self._answer_ping()

    def _answer_ping(self) -> None:
        self._send(pong_of(self.drain_metrics()))

    def close(self) -> None:
        """End the other ranks. Those that do not end by themselves are killed with rank 0."""
        self._closing = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.shutdown(socket.SHUT_RDWR)
        limit_s = time.monotonic() + ENDING_S
        for rank in filter(lambda rank: rank.pid, self._ranks):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(rank.pid, os.WNOHANG)[0] == 0 and time.monotonic() < limit_s:
                    time.sleep(0.01)

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks."""
        for rank in self._ranks:
            rank.send([encode_frame(message)])

    def _collect(self, timeout_s: float | None = None) -> list[Loaded | RankDone]:
        """Return the reply of each rank; raise `queue.Empty` if one does not come within `timeout_s`."""
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        replies = []
        for rank in self._ranks:
            left_s = None if limit_s is None else max(0.0, limit_s - time.monotonic())
            replies.append(rank.replies.get(timeout=left_s))
        return replies

    def _fork(self, number: int, on_gpu: bool) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as err:
            ours.close()
            theirs.close()
            raise self._spec.failed(f"rank {number} could not be started: {err}") from err
        if pid == 0:
            for rank in self._ranks:
                rank.connection.close()
            ours.close()
            live(partial(serve_rank, parent, self._spec, number, theirs, number if on_gpu else None))
        theirs.close()
        self._ranks.append(_Rank(number, pid, ours, FrameReader(ours)))

    def _meet(self) -> int:
        """Add the ranks of the other machines to those of this one; return the number of machines."""
        spec = self._spec
        if spec.rendezvous is None:
            return 1
        try:
            machines = meet(spec.rendezvous, spec.ranks, load_elsewhere(spec))
        except MachinesMissing as err:
            self._give_up(spec.ranks * err.found, 1, str(err), is_cut_off=True)
        except OSError as err:
            at = f"{spec.rendezvous.host}:{spec.rendezvous.port}"
            raise spec.failed(f"rank 0 can't listen at {at} for other machines: {err}") from err
        for place, machine in enumerate(machines, 1):
            for number, connection in enumerate(machine.connections, place * spec.ranks):
                reader = FrameReader(connection)
                self._ranks.append(_Rank(number, 0, connection, reader, machine.name, place))
        return len(machines) + 1

    def _join_of(self, machines: int) -> Join:
        """Return the `Join` of rank 0; those of the other ranks are made from it."""
        spec = self._spec
        others = [rank.connection for rank in self._ranks if rank.machine]
        interface = interface_variables(others, _LOOPBACK_INTERFACE)
        run_id = spec.rendezvous.run_id if spec.rendezvous else ""
        host, port = reached_at(self._host_of_store), self._store.port
        run_id = run_id or f"{spec.model_name}_{port}"
        return Join(host, port, 0, spec.ranks * machines, 0, machines, interface, run_id)

    def _watch(self) -> None:
        """Read the replies of the other ranks, in a thread: rank 0 may be inside a collective."""
        poll = select.poll()
        by_descriptor = {rank.connection.fileno(): rank for rank in self._ranks}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(_LOOK_S * 1000):
                for message in _arrived(by_descriptor[descriptor].frames):
                    if not self._take(by_descriptor[descriptor], message):
                        return
            self._look(time.monotonic())

    def _take(self, rank: _Rank, message: FromRank | None) -> bool:
        """Handle a reply (None: the rank has ended); return False if no further reply matters."""
        if message is None or isinstance(message, RankLost):
            if not self._closing:
                self._lose(rank, message)
            return False
        if isinstance(message, LoadError):
            detail = f"rank {rank.number}: {message.detail}"
            self._send(msgspec.structs.replace(message, detail=detail))  # the server ends the worker
            return False
        if isinstance(message, Pong):
            self._silent.discard(rank.number)
            if not self._silent:
                self._answer_ping()
            return True
        if isinstance(message, RankDone):
            if message.failed and self._failed is None:
                self._failed = (rank.number, time.monotonic())
            if message.end_cause:
                self._end_causes[rank.number] = message.end_cause
        rank.replies.put(message)
        return True

    def _lose(self, rank: _Rank, message: RankLost | None) -> NoReturn:
        """End the group, because a rank has ended; `message` is its machine's report, if there is one."""
        if rank.machine and message is None:
            message = self._report_beside(rank)
        if message is not None:
            cause = self._end_causes.get(message.rank, "") or message.cause
            self._give_up(message.rank, message.exit_code, cause)
        cause = self._end_causes.get(rank.number, "")
        if rank.machine:
            cause = cause or f"its machine {rank.machine} does not answer"
            self._give_up(rank.number, 1, cause, is_cut_off=True)
        self._give_up(rank.number, _exit_code(rank.pid), cause)

    def _report_beside(self, rank: _Rank) -> RankLost | None:
        """Return the report of a rank's machine on another of its ranks; None: no report, or it is cut off.

        A machine ends all its ranks when one ends, so the end of this rank may be read before the report.
        """
        limit_s = time.monotonic() + LAST_WORDS_S
        for other in [each for each in self._ranks if each.place == rank.place and each is not rank]:
            last: object = other
            while last is not None:
                other.connection.settimeout(max(0.001, limit_s - time.monotonic()))
                for last in _arrived(other.frames):
                    if isinstance(last, RankLost):
                        return last
        return None

    def _look(self, now_s: float) -> None:
        """End the group if rank 0 waits for a rank that has failed; name ranks that give no sign of life."""
        if self._failed is not None and self._runs and now_s - self._failed[1] > STEP_GRACE_S:
            self._give_up(self._failed[0], 1, "failed in a batch, and other ranks wait for it")
        if self._silent and now_s - self._pinged_s > SILENT_S:
            numbers = ", ".join(map(str, sorted(self._silent)))
            logger.warning("model %s: no sign of life from rank %s", self._spec.model_name, numbers)
            self._pinged_s = now_s

    def _give_up(self, number: int, exit_code: int, cause: str = "", *, is_cut_off: bool = False) -> NoReturn:
        """Tell the server that the group is lost, and wait for it to end this process."""
        with contextlib.suppress(OSError):  # the server is gone
            self._send(RankLost(number, exit_code, cause, is_cut_off))
            time.sleep(STEP_GRACE_S)
        os._exit(1)


def load_elsewhere(spec: LoadSpec) -> Load:
    """Return the load for the other machines: without the paths of this one, and on as many GPUs."""
    gpu_ids = tuple(range(spec.devices)) if spec.gpu_ids else ()
    return load_of(replace(spec, archive_dir="", rendezvous=None, sandbox=None, gpu_ids=()), gpu_ids, "")


def _arrived(frames: FrameReader) -> Iterator[FromRank | None]:
    """Yield the messages that have arrived, and None at the end of the stream."""
    while True:
        message = None
        try:
            if (payload := frames.next()) is not None:
                message = from_rank.decode(payload)
        except (OSError, msgspec.MsgspecError):  # reset, or broken off inside a message
            pass
        yield message
        if message is None or not frames.has_more:
            return


def _exit_code(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # the handler's code has already waited for the process
        return 1
