"""What stands still: found by looking now and then, without noting the time of each byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Progress = TypeVar("Progress")


class Stalls(Generic[Key, Progress]):
    """Gives up what a client lets wait, and would be held for ever. Used on the event loop only.

    Args:
        every_s: between two looks. What began to wait has between one and two of them.
        waiting: what waits for the client now, and for each what changes as soon as a byte of it moves.
        give_up: ends what did not move from one look to the next.
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
        """Something may wait from now on; said again, it means nothing more."""
        if self._timer is None:
            self._look_later()

    def stop(self) -> None:
        """The connection is gone."""
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
