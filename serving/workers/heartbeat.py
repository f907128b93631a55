"""Signs of life of a worker: an idle one is asked for one now and then, a busy one has its response time-out.

Without this a worker that was stopped or hangs while it has nothing to do would count as ready until a client
had waited for the whole response time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """How often an idle worker is asked, and what follows from its silence. Seconds."""

    ask_every_s: float = 2.0
    suspect_after_s: float = 3.0  # from the question: it gets no batch, and counts as not in service
    dead_after_s: float = 10.0  # from the question: it is replaced


class Step(Enum):
    """What to do about a worker now."""

    NOTHING = "nothing"
    ASK = "ask"
    SUSPECT = "suspect"
    REPLACE = "replace"


def next_step(idle: bool, quiet_s: float, unanswered_s: float | None, settings: HeartbeatSettings) -> Step:
    """Decide about one worker.

    Args:
        idle: It has no batch.
        quiet_s: Since it last said anything.
        unanswered_s: Since it was asked; None: it owes no answer.
        settings: The bounds.
    """
    if unanswered_s is None:
        return Step.ASK if idle and quiet_s >= settings.ask_every_s else Step.NOTHING
    if unanswered_s >= settings.dead_after_s:
        return Step.REPLACE
    return Step.SUSPECT if unanswered_s >= settings.suspect_after_s else Step.NOTHING


class Heartbeat:
    """Watches the worker of one slot. Lives on the event loop.

    Args:
        settings: The bounds.
        idle: Whether the worker has no batch.
        ask: Sends the question.
        on_change: The worker is suspect now, or is not any more.
        on_dead: It has been silent for too long (the argument, in seconds) and must be replaced.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        settings: HeartbeatSettings,
        *,
        idle: Callable[[], bool],
        ask: Callable[[], None],
        on_change: Callable[[], None],
        on_dead: Callable[[float], None],
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._idle = idle
        self._ask = ask
        self._on_change = on_change
        self._on_dead = on_dead
        self._now = now
        self._tick_s = settings.ask_every_s / 2
        self._heard_s = 0.0
        # Ticks, not time: while the loop stood still, nobody listened.
        self._unanswered_ticks: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.suspect = False

    def start(self) -> None:
        """Begin with a new worker, which has just said that it is ready."""
        self.stop()
        self.answered()
        self._tick()

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """It said something about a batch: it is alive, and an answer it owes is on its way."""
        self._heard_s = self._now()

    def answered(self) -> None:
        """It gave the sign of life that it was asked for."""
        self.heard()
        self._unanswered_ticks = None
        self._become(suspect=False)

    def _become(self, suspect: bool) -> None:
        if self.suspect != suspect:
            self.suspect = suspect
            self._on_change()

    def _tick(self) -> None:
        if self._unanswered_ticks is not None:
            self._unanswered_ticks += 1
        unanswered_s = self._unanswered_ticks and self._unanswered_ticks * self._tick_s
        step = next_step(self._idle(), self._now() - self._heard_s, unanswered_s, self._settings)
        if step is Step.REPLACE:
            self._on_dead(unanswered_s or 0.0)
            return
        if step is Step.ASK:
            self._unanswered_ticks = 0
            self._ask()
        elif step is Step.SUSPECT:
            self._become(suspect=True)
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
