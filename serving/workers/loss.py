"""Causes of a lost executor: their kinds, and their texts for the describe call and the log."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum


class LossKind(Enum):
    """What kind of cause ended a worker. The values are labels of a metric and never change."""

    EXIT = "exit"  # it ended by itself, with an exit code
    SIGNAL = "signal"  # a signal ended it: a crash in native code, or a kill command
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed it, for its own memory use or a neighbour's
    TIMEOUT = "timeout"  # it had a batch, and sent nothing for longer than the response time-out
    HANG = "hang"  # it was idle, and missed its heartbeats
    PROTOCOL = "protocol"  # it sent an invalid message
    LOAD = "load"  # it started, but its handler did not load
    ENDED = "ended"  # its handler meant to end it: it raised SystemExit or another BaseException
    CUT_OFF = "cut_off"  # another machine of its group does not answer, or has not come
    STOPPED = "stopped"  # the server ended it in good order


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one worker: its kind, its cause as text, and the number of the signal that ended it."""

    kind: LossKind
    cause: str
    signal_number: int = 0  # 0: no signal
    of_room: bool = False  # of a process that it shared: the cause may be another version
    silent_s: float = 0.0  # it gave no sign of life for so long before it was given up

    @property
    def crashed(self) -> bool:
        """Whether the worker ended by itself, which is evidence against a request that it ran."""
        return self.kind in _CRASHES or (self.kind is LossKind.SIGNAL and self.signal_number in _FAULTS)

    @property
    def was_killed(self) -> bool:
        """Whether another process ended the worker by a signal, or a network did."""
        return self.kind is LossKind.CUT_OFF or (self.kind is LossKind.SIGNAL and not self.crashed)

    @property
    def makes_suspects(self) -> bool:
        """Whether any version that shared the process may have ended it, also one that was only loading."""
        return self.of_room and (self.crashed or self.kind is LossKind.OUT_OF_MEMORY)

    def of_load(self) -> Loss | None:
        """Return the loss with a cause that says it interrupted a load; None: the load was to blame.

        It is to blame for a kill for memory outside of a room: the load has usually taken the memory.
        """
        if not (self.was_killed or self.of_room):
            return None
        return replace(self, cause=f"{self.cause} while it was loading")

    @property
    def came_from_outside(self) -> bool:
        """Whether the worker was killed from outside, so that the model itself may be in order."""
        return self.was_killed or self.kind is LossKind.OUT_OF_MEMORY

    @property
    def hints_at_memory(self) -> bool:
        """Whether a lack of memory may be the cause: the kernel kills by the same signal as an operator."""
        return self.came_from_outside and self.kind is not LossKind.CUT_OFF

    @property
    def blames_the_model(self) -> bool:
        """Whether the model may be broken, so that restarts become rarer and end."""
        return not (self.came_from_outside or self.kind is LossKind.ENDED)


_CRASHES = frozenset({LossKind.EXIT, LossKind.PROTOCOL})
# The kernel sends these to a process for a fault in it, or the process sends them itself (abort). Any other
# signal usually comes from outside: an operator, a supervisor, or the out-of-memory killer, which ends the
# largest process of a control group and not the one that asked for the last page.
_FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
    | {signal.SIGSYS}
)


def loss_of_exit(code: int, killed_for_memory: bool = False) -> Loss:
    """Return the loss for an exit status: an exit code from 0 up, or the negative number of a signal.

    >>> loss_of_exit(7).cause
    'exited with code 7'
    >>> loss_of_exit(-9, killed_for_memory=True).cause
    "killed by signal 9 (SIGKILL): the kernel's out-of-memory killer ended it"
    """
    if code >= 0:
        return Loss(LossKind.EXIT, f"exited with code {code}")
    name = next((f" ({each.name})" for each in signal.Signals if each == -code), "")
    words = f"killed by signal {-code}{name}"
    if killed_for_memory:
        words = f"{words}: the kernel's out-of-memory killer ended it"
        return Loss(LossKind.OUT_OF_MEMORY, words, -code)
    return Loss(LossKind.SIGNAL, words, -code)


def loss_of_slow_load(startup_timeout_s: float) -> Loss:
    """Return the loss of a worker that did not load in time; the text begins as TorchServe's log line does.

    >>> loss_of_slow_load(2.5).cause
    'Backend worker did not respond in given time: not loaded within startup_timeout=2.5 s'
    """
    cause = f"not loaded within startup_timeout={startup_timeout_s:g} s"
    return Loss(LossKind.LOAD, f"Backend worker did not respond in given time: {cause}")


def loss_of_rank(
    rank: int, code: int, cause: str = "", killed_for_memory: bool = False, is_cut_off: bool = False
) -> Loss:
    """Return the loss of a worker that lost a rank; its cause is `cause`, or else the rank's exit status.

    >>> loss_of_rank(2, -9).cause
    'rank 2: killed by signal 9 (SIGKILL)'
    """
    loss = loss_of_exit(code, killed_for_memory)
    if is_cut_off:
        loss = Loss(LossKind.CUT_OFF, cause)
    elif cause:
        loss = replace(loss_of_end(cause), cause=cause)
    return replace(loss, cause=f"rank {rank}: {loss.cause}")


_SILENT = (LossKind.TIMEOUT, LossKind.HANG, LossKind.LOAD)


def loss_of_silence(loss: Loss, pids: Sequence[int]) -> Loss:
    """Return the loss of a group, naming the ranks that a signal has stopped. Call it before they are killed.

    Args:
        loss: the reason for which the server ends the group.
        pids: the process ids of the ranks on this machine.
    """
    stopped = [str(rank) for rank, pid in enumerate(pids) if _is_stopped(pid)] if loss.kind in _SILENT else []
    if not stopped:
        return loss
    ranks = f"rank {stopped[0]} is" if len(stopped) == 1 else f"ranks {', '.join(stopped)} are"
    return replace(loss, cause=f"{loss.cause}: {ranks} stopped by a signal")


def _is_stopped(pid: int) -> bool:
    import psutil  # noqa: PLC0415 - of the server; workers import this module, too

    with suppress(psutil.Error, ValueError, OverflowError):  # gone, or not a process id
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


OUTSIDE_DELAY_S = 5.0  # longest delay after a kill from outside, which is no evidence against the model
RAISED = "its handler raised"  # begins the cause of a worker whose handler meant to end it


def loss_of_end(cause: str) -> Loss:
    """Return the loss of a worker that ended by itself and reported the cause.

    >>> loss_of_end("it lost its GPU").kind
    <LossKind.EXIT: 'exit'>
    """
    kind = LossKind.ENDED if cause.startswith(RAISED) else LossKind.EXIT
    return Loss(kind, f"{cause}, and ended")


# Delays before the first restart in a row, the second and so on: TorchServe's Fibonacci back-off.
BACKOFF_S = (0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0, 144.0)
# A worker that was in service for this long is in good health. An idle one that hangs is replaced after 10 s
# of silence (`heartbeat.py`), which do not count as service.
HEALTHY_S = 10.0


class LossRow:
    """The losses of a worker in a row, which decide about its next restart.

    A row ends when the worker answers a batch, or when it was in good health for `HEALTHY_S`. Kills from
    outside are counted separately. The time out of service after one is not held against the worker, and
    neither is time in service that was shorter than `HEALTHY_S`.

    Args:
        max_retry_timeout_s: seconds out of service, by its own fault, after which it is not restarted.
        max_restarts: restarts in a row after losses of its own (torchrun's `max-restarts`); None: no limit.
    """

    def __init__(self, max_retry_timeout_s: float, max_restarts: int | None = None) -> None:
        self._max_retry_timeout_s = max_retry_timeout_s
        self._max_restarts = max_restarts
        self._own = 0  # losses that did not come from outside
        self._down_s = 0.0  # out of service after those, without the time since the last loss
        self._last_s = 0.0  # monotonic, of the last loss
        self._from_outside = False  # the last loss
        self.losses = 0

    def add(self, loss: Loss, healthy_s: float, now_s: float) -> None:
        """Count a loss at `now_s`, after `healthy_s` seconds in service with signs of life."""
        if healthy_s >= HEALTHY_S:
            self.end()
        if self._own and not self._from_outside:
            self._down_s += now_s - self._last_s - healthy_s
        self._last_s = now_s
        self._from_outside = not loss.blames_the_model
        self._own += loss.blames_the_model
        self.losses += 1

    def end(self) -> None:
        """Forget the losses, because the worker works again."""
        self.losses = self._own = 0
        self._down_s = 0.0

    def restart_delay_s(self, now_s: float) -> float | None:
        """Return the seconds until the next restart; None: give up.

        A worker that was killed from outside is always restarted, after `OUTSIDE_DELAY_S` at most: its model
        may be in order, and a neighbour that drives the machine out of memory must not take it down for good.
        """
        if self._from_outside:
            return min(_back_off_s(self.losses - self._own), OUTSIDE_DELAY_S)
        if self._max_restarts is not None and self._own > self._max_restarts:
            return None
        down_s = self._down_s + now_s - self._last_s
        return None if down_s > self._max_retry_timeout_s else _back_off_s(self._own)


def _back_off_s(losses: int) -> float:
    return BACKOFF_S[min(losses, len(BACKOFF_S)) - 1]
