"""The server's view of a worker with several processes: names ranks in the cause of a loss."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.loss import Loss, LossKind, loss_of_rank
from torchere.serving.workers.messages import RankLost, RankPids
from torchere.serving.workers.oom import OomWatch

MAX_CAUSE_CHARACTERS = 300  # of the cause that a worker gives for its end
_SILENT = (LossKind.TIMEOUT, LossKind.HANG, LossKind.LOAD)


class Group:
    """The ranks of one worker process and its children. If it has no ranks, causes stay as they are."""

    def __init__(self, spec: LoadSpec, oom: OomWatch) -> None:
        self._is_group = spec.is_group
        self._ranks = spec.ranks
        self._oom = oom
        self._others: Sequence[int] = ()  # process ids of ranks 1 and up on this machine

    def hear(self, message: RankLost | RankPids, kill: Callable[[Loss], None]) -> None:
        """Take a message of rank 0 about the other ranks; end the group by `kill` if one is lost."""
        if isinstance(message, RankPids):  # the worker is not trusted: it may name too many
            self._others = message.pids[: self._ranks - 1] if self._is_group else ()
            return
        code, cause = message.exit_code, message.cause[:MAX_CAUSE_CHARACTERS]
        killed_for_memory = code == -signal.SIGKILL and self._oom.claim()
        kill(loss_of_rank(message.rank, code, cause, killed_for_memory, message.is_cut_off))

    def of_silence(self, loss: Loss, first: int) -> Loss:
        """Return the loss, naming the ranks that a signal has stopped. Call it before they are killed.

        Args:
            loss: the reason for which the server ends the group.
            first: the process id of rank 0.
        """
        if not self._is_group or loss.kind not in _SILENT:
            return loss
        stopped = [str(number) for number, pid in enumerate((first, *self._others)) if _is_stopped(pid)]
        if not stopped:
            return loss
        ranks = f"rank {stopped[0]} is" if len(stopped) == 1 else f"ranks {', '.join(stopped)} are"
        return replace(loss, cause=f"{loss.cause}: {ranks} stopped by a signal")

    def of_first(self, loss: Loss) -> Loss:
        """Return the loss of a process that has ended by itself; in a group its cause names rank 0."""
        return replace(loss, cause=f"rank 0: {loss.cause}") if self._is_group else loss


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error, ValueError, OverflowError):  # gone, or not a process id
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
