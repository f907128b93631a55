"""A bounded queue for long jobs, such as downloads and installations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchere.serving.errors import Unavailable


class Turns:
    """A semaphore with a bounded FIFO queue of waiters. Used on the event loop.

    Up to `at_once` jobs run at the same time and up to `waiting` more wait; any further job is rejected
    immediately. `what` names the jobs in the error message, in the plural.
    """

    def __init__(self, what: str, at_once: int, waiting: int) -> None:
        self._what = what
        self._limit = at_once + waiting
        self._places = asyncio.Semaphore(at_once)
        self._inside = 0  # number of running and waiting jobs

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it until the block ends.

        Raises:
            Unavailable: the queue is full.
        """
        if self._inside >= self._limit:
            raise Unavailable(f"Too many {self._what} wait already: {self._limit}. Try again later.")
        self._inside += 1
        try:
            async with self._places:
                yield
        finally:
            self._inside -= 1
