"""Many requests on one stream, answered in the order they came, while several of them run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Part = TypeVar("Part")
Item = TypeVar("Item")

IN_FLIGHT = 64  # requests of one stream that are read ahead of the answers; then the client has to wait
PARTS_AHEAD = 16  # of one answer that wait for those before it


async def in_order(
    requests: AsyncIterator[Request], answer: Callable[[Request], AsyncIterator[Part]]
) -> AsyncIterator[Part]:
    """The parts of the answers to all requests.

    Requests are begun in the order they come, so those of a sequence stay in order, and their answers leave
    in that order. Closing this iterator ends all that still runs. What `answer` raises ends the stream: an
    error of one request has to become a part of its answer.

    Raises:
        Exception: what reading `requests` raised, after the answers to those that came.
    """
    running: set[asyncio.Task[None]] = set()

    def pumped(source: AsyncIterator[Item], ahead: int) -> _Pipe[Item]:
        pipe: _Pipe[Item] = _Pipe(ahead)
        task = asyncio.ensure_future(pipe.fill(source))
        running.add(task)
        task.add_done_callback(running.discard)
        return pipe

    async def begun() -> AsyncIterator[_Pipe[Part]]:
        async for request in requests:
            yield pumped(answer(request), PARTS_AHEAD)

    try:
        async for pipe in pumped(begun(), IN_FLIGHT).items():
            async for part in pipe.items():
                yield part
    finally:
        ended = list(running)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


class _End:
    """Stands behind the last item of a pipe; with the error that ended it, if there was one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class _Pipe(Generic[Item]):
    """Items that one task makes and another one takes, of which at most `ahead` wait."""

    def __init__(self, ahead: int) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(ahead)

    async def fill(self, source: AsyncIterator[Item]) -> None:
        """Put in all that `source` gives."""
        end = _End()
        try:
            async for item in source:
                await self._queue.put(item)
        except Exception as error:  # the top of the task: whoever takes the items raises it
            end = _End(error)
        await self._queue.put(end)

    async def items(self) -> AsyncIterator[Item]:
        """Take out all there is; raises what `source` raised."""
        while not isinstance(item := await self._queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
