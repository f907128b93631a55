"""Who may do something slow now, who waits for that, and who is one too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchere.serving.errors import Unavailable


class Turns:
    """So many at once, so many more that wait, in the order they came. Lives on the event loop.

    Args:
        what: what they do, in the plural, for the text of the refusal.
        at_once: how many may be at it.
        waiting: how many may wait besides; one more is refused at once.
    """

    def __init__(self, what: str, at_once: int, waiting: int) -> None:
        self._what = what
        self._limit = at_once + waiting
        self._places = asyncio.Semaphore(at_once)
        self._inside = 0  # those that wait included

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for a turn, and keep it while the block runs.

        Raises:
            Unavailable: too many wait already.
        """
        if self._inside >= self._limit:
            raise Unavailable(f"Too many {self._what} wait already: {self._limit}. Try again later.")
        self._inside += 1
        try:
            async with self._places:
                yield
        finally:
            self._inside -= 1
