"""A rank other than 0: a process forked on any machine of a group, which does as rank 0 says (`ranks.py`)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable

import msgspec

from torchere.handlers.loading.devices import sees_only_cpu
from torchere.handlers.loading.weights import SharedModels
from torchere.serving.errors import InvalidRequest, LoadFailed, ServingError
from torchere.serving.logs.levels import set_level
from torchere.serving.logs.worker_lines import name_rank
from torchere.serving.process.allocator import settle_loaded
from torchere.serving.process.signals import die_with_parent
from torchere.serving.workers.executor import LoadSpec, Outcome
from torchere.serving.workers.frames import FrameReader
from torchere.serving.workers.host import HandlerHost
from torchere.serving.workers.machines import interface_variables
from torchere.serving.workers.messages import (
    Join,
    Loaded,
    LoadError,
    LogLevel,
    Message,
    Ping,
    Pong,
    RankDone,
    Run,
    WarmUp,
    encode_frame,
    raw_bytes,
    run_with_raw,
    to_rank,
)


def prepare_to_fork(spec: LoadSpec) -> None:
    """Import the libraries that each rank of a machine needs, in the process that forks the ranks.

    Where torch may find a GPU, no library that asks for one is imported: the driver does not survive a fork.
    """
    from torchere.handlers.loading.parallel import import_libraries  # noqa: PLC0415 - few models are in ranks

    model = spec.manifest.get("model") or {}
    if import_libraries(spec.archive_dir, model, spec.model_config, may_ask_driver=sees_only_cpu()):
        settle_loaded()  # garbage collections in the ranks must not copy the pages that they share


def use_batch_policy() -> None:
    """Make a thread of this process that wakes up wait for its turn, and not preempt one that computes.

    The threads of a collective wake each other many times in each run. With the default policy (sched(7):
    SCHED_OTHER) a waking thread takes the core from a rank that all others wait for. The server keeps the
    default policy, so it still preempts a rank.

    Threads and child processes that are started later inherit the policy. One that an operator chose, by
    `chrt` or systemd's `CPUSchedulingPolicy`, stays. Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _RankMain:
    """A rank other than 0: it does as rank 0 says. `local`: its number on its machine."""

    def __init__(self, spec: LoadSpec, local: int, connection: socket.socket, gpu_id: int | None) -> None:
        self._spec = spec
        self._local = local
        self._connection = connection
        self._frames = FrameReader(connection)
        self._host = HandlerHost(spec, gpu_id, SharedModels(), answers=False)

    def serve(self) -> None:
        """Answer messages until rank 0 closes the connection."""
        while not self._host.end_cause and (payload := self._frames.next()) is not None:
            message = to_rank.decode(payload)
            if isinstance(message, Ping):
                self._send(Pong())
            elif isinstance(message, LogLevel):
                set_level(message.logger, message.level)
            elif isinstance(message, Run):
                self._run(message)
            else:
                self._step(message)

    def _run(self, message: Run) -> None:
        raw = self._frames.raw(raw_bytes(message)) if message.large else memoryview(b"")
        if raw is None:
            return
        report = self._host.run(run_with_raw(message, raw).requests, drop_part)
        self._send(RankDone(has_failed(report.outcomes), self._host.end_cause))

    def _step(self, message: Join | WarmUp) -> None:
        try:
            if isinstance(message, Join):
                os.environ.update(environment(self._spec, self._met(message), self._local))
                name_rank(message.rank)
                self._host.own_process()
                self._host.load()
            else:
                if self._spec.parallel_type != "pp":
                    self._host.warm_up()
                settle_loaded()
        except LoadFailed as err:
            self._send(LoadError(err.detail, err.out_of_memory))
        else:
            self._send(Loaded())

    def _met(self, join: Join) -> Join:
        """Return the message; on another machine than rank 0's, with host and interface as seen from here."""
        if join.host:
            return join
        host = self._connection.getpeername()[0].removeprefix("::ffff:")
        interface = interface_variables([self._connection], "")
        return msgspec.structs.replace(join, host=host, interface=interface)

    def _send(self, message: Message) -> None:
        self._connection.sendall(encode_frame(message))


def serve_rank(
    parent: int, spec: LoadSpec, local: int, connection: socket.socket, gpu_id: int | None
) -> None:
    """Serve rank 0 over this connection, in a process that was just forked by `parent`; end with the parent.

    `local` is the number of the rank on its machine.
    """
    die_with_parent()
    if os.getppid() == parent:  # else the parent has ended meanwhile
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # rank 0 is gone
            _RankMain(spec, local, connection, gpu_id).serve()


def has_failed(outcomes: Iterable[Outcome]) -> bool:
    """Whether a rank has failed in its batch; an invalid request does not count: all ranks refuse it."""
    errors = (outcome for outcome in outcomes if isinstance(outcome, ServingError))
    return any(not isinstance(error, InvalidRequest) for error in errors)


def drop_part(index: int, part: object) -> None:
    """Drop a part of an answer: rank 0 answers."""


def environment(spec: LoadSpec, join: Join, local: int) -> dict[str, str]:
    """Return the variables that torchrun sets, by https://docs.pytorch.org/docs/stable/elastic/run.html."""
    return {
        "RANK": str(join.rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(join.ranks),
        "LOCAL_WORLD_SIZE": str(spec.ranks),
        "GROUP_RANK": str(join.machine),
        "GROUP_WORLD_SIZE": str(join.machines),
        "ROLE_RANK": str(join.rank),
        "ROLE_WORLD_SIZE": str(join.ranks),
        "ROLE_NAME": "default",
        "MASTER_ADDR": join.host,
        "MASTER_PORT": str(join.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": join.run_id,
        "OMP_NUM_THREADS": str(spec.intra_op_threads),
        **join.interface,
    }
