"""Why an executor was lost: the kinds, and the words that describe and the log show."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum


class LossKind(Enum):
    """What ended a worker; the values are labels of a metric and never change."""

    EXIT = "exit"  # it ended by itself, with an exit code
    SIGNAL = "signal"  # something sent it a signal: a crash in native code, or somebody's kill
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed it
    TIMEOUT = "timeout"  # it had a batch, and was silent for longer than the response time-out
    HANG = "hang"  # it was idle, and gave no sign of life
    PROTOCOL = "protocol"  # what it sent was no message
    LOAD = "load"  # it came up, and its handler did not
    STOPPED = "stopped"  # the server ended it in good order


@dataclass(frozen=True, slots=True)
class Loss:
    """One lost worker: `cause` in words."""

    kind: LossKind
    cause: str

    @property
    def crashed(self) -> bool:
        """Whether it went down by itself: what it was running may be to blame."""
        return self.kind in _CRASHES


_CRASHES = frozenset({LossKind.EXIT, LossKind.SIGNAL, LossKind.OUT_OF_MEMORY, LossKind.PROTOCOL})
OOM_WORDS = "the kernel's out-of-memory killer ended it"


def loss_of_exit(code: int, killed_for_memory: bool = False) -> Loss:
    """The loss that an exit status tells of: 0 or more a code, negative the number of a signal.

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
    """An exit status in words.

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
    """How long to wait before executor number `losses` + 1 in a row is started; None: give up.

    `losses` counts from the last time an executor answered a batch. The first comes back at once, the others
    after TorchServe's Fibonacci steps; past `max_retry_timeout_s` since the first loss it stays down.
    """
    if now_s - first_loss_s > max_retry_timeout_s:
        return None
    return BACKOFF_S[min(losses, len(BACKOFF_S)) - 1]
