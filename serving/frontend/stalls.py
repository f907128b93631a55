"""Stall detection by periodic comparison, without recording a timestamp for each byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Progress = TypeVar("Progress")


class Stalls(Generic[Key, Progress]):
    """Watchdog that ends transfers on which a client makes no progress. Used on the event loop only.

    Args:
        every_s: seconds between two checks. A stalled transfer ends after one to two intervals.
        waiting: returns the transfers that wait for the client now, each with its progress: a value that
            changes as soon as one byte of it moves.
        give_up: ends the transfers whose progress did not change between two checks.
    """

    __slots__ = ("_every_s", "_give_up", "_is_over", "_loop", "_timer", "_waiting")

    def __init__(
        self,
        every_s: float,
        waiting: Callable[[], Mapping[Key, Progress]],
        give_up: Callable[[dict[Key, Progress]], None],
    ) -> None:
        self._every_s = every_s
        self._waiting = waiting
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def watch(self) -> None:
        """Start checking, because a transfer may wait from now on. Further calls have no effect."""
        if self._timer is None:
            self._look_later()

    def stop(self) -> None:
        """Stop checking for good: the connection is lost."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if not self._is_over:
            self._timer = self._loop.call_later(self._every_s, self._look, self._waiting())

    def _look(self, before: Mapping[Key, Progress]) -> None:
        self._timer = None
        now = self._waiting()
        if not now:
            return
        stalled = {key: found for key, found in now.items() if key in before and before[key] == found}
        if stalled:
            self._give_up(stalled)
        self._look_later()
