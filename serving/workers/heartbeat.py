"""Heartbeats of idle workers; a busy worker has the response time-out instead.

Without heartbeats, a worker that is stopped or hangs while idle would count as ready until a client had
waited for the whole response time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """The interval of heartbeats to an idle worker, and the bounds on its silence. Seconds."""

    ask_every_s: float = 2.0
    suspect_after_s: float = 3.0  # since the ping: it gets no batch, and counts as not in service
    dead_after_s: float = 10.0  # since the ping: it is replaced


class Heartbeat:
    """Pings an idle worker: one that does not answer is suspect, and later counts as dead.

    Lives on the event loop. A busy worker is not pinged, but it has to answer a ping that it got while idle.
    """

    def __init__(
        self,
        settings: HeartbeatSettings,
        *,
        idle: Callable[[], bool],  # whether the worker has no batch
        ask: Callable[[], None],  # sends a ping
        on_change: Callable[[], None],  # called when `suspect` changes
        on_dead: Callable[[float], None],  # called when it must be replaced, with the seconds of its silence
        now: Callable[[], float],  # monotonic seconds
    ) -> None:
        self._settings = settings
        self._idle = idle
        self._ask = ask
        self._on_change = on_change
        self._on_dead = on_dead
        self._now = now
        self._tick_s = settings.ask_every_s / 2
        self._heard_s = 0.0
        # In ticks, not seconds: a blocked event loop can't receive an answer.
        self._unanswered_ticks: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.suspect = False

    def start(self) -> None:
        """Begin to watch a new worker, which has just reported that it is ready."""
        self.stop()
        self.suspect = False  # without `on_change`: the suspicion was of the worker before it
        self.answered()
        self._tick()

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """Note a message about a batch: the worker is alive, and will answer an open ping."""
        self._heard_s = self._now()

    def answered(self) -> None:
        """Note the answer to a ping."""
        self.heard()
        self._unanswered_ticks = None
        self._become(suspect=False)

    def _become(self, suspect: bool) -> None:
        if self.suspect != suspect:
            self.suspect = suspect
            self._on_change()

    def _tick(self) -> None:
        settings = self._settings
        if self._unanswered_ticks is not None:
            self._unanswered_ticks += 1
            unanswered_s = self._unanswered_ticks * self._tick_s
            if unanswered_s >= settings.dead_after_s:
                self._on_dead(unanswered_s)
                return
            if unanswered_s >= settings.suspect_after_s:
                self._become(suspect=True)
        elif self._idle() and self._now() - self._heard_s >= settings.ask_every_s:
            self._unanswered_ticks = 0
            self._ask()
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
