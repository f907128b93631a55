"""Causes of a lost executor: their kinds, and their texts for the describe call and the log."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum


class LossKind(Enum):
    """The kind of cause that ended a worker; the values are labels of a metric and never change."""

    EXIT = "exit"  # it ended by itself, with an exit code
    SIGNAL = "signal"  # a signal ended it: a crash in native code, or a kill command
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed it
    TIMEOUT = "timeout"  # it had a batch, and sent nothing for longer than the response time-out
    HANG = "hang"  # it was idle, and missed its heartbeats
    PROTOCOL = "protocol"  # it sent an invalid message
    LOAD = "load"  # it started, but its handler did not load
    STOPPED = "stopped"  # the server ended it in good order


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one worker: its kind, and its cause as text."""

    kind: LossKind
    cause: str

    @property
    def crashed(self) -> bool:
        """Whether the worker ended by itself, so that a request it ran may be the cause."""
        return self.kind in _CRASHES


_CRASHES = frozenset({LossKind.EXIT, LossKind.SIGNAL, LossKind.OUT_OF_MEMORY, LossKind.PROTOCOL})
OOM_WORDS = "the kernel's out-of-memory killer ended it"


def loss_of_exit(code: int, killed_for_memory: bool = False) -> Loss:
    """Return the loss for an exit status: an exit code from 0 up, or the negative number of a signal.

    >>> loss_of_exit(7).cause
    'exited with code 7'
    >>> loss_of_exit(-9, killed_for_memory=True).cause
    "killed by signal 9 (SIGKILL): the kernel's out-of-memory killer ended it"
    """
    words = describe_exit(code)
    if killed_for_memory:
        return Loss(LossKind.OUT_OF_MEMORY, f"{words}: {OOM_WORDS}")
    return Loss(LossKind.EXIT if code >= 0 else LossKind.SIGNAL, words)


def describe_exit(code: int) -> str:
    """Describe an exit status as text.

    >>> describe_exit(7)
    'exited with code 7'
    >>> describe_exit(-9)
    'killed by signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


BACKOFF_S = (0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0, 144.0)


def restart_delay_s(
    losses: int, first_loss_s: float, now_s: float, max_retry_timeout_s: float
) -> float | None:
    """Return the seconds to wait before a restart after `losses` losses in a row; None: give up.

    `losses` counts from the last time an executor answered a batch. The first restart is immediate; later
    ones use TorchServe's Fibonacci backoff. Once `max_retry_timeout_s` have passed since the first loss,
    there is no restart.
    """
    if now_s - first_loss_s > max_retry_timeout_s:
        return None
    return BACKOFF_S[min(losses, len(BACKOFF_S)) - 1]
