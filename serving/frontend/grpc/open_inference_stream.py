"""Concurrent requests on one stream, answered in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Part = TypeVar("Part")
Item = TypeVar("Item")

IN_FLIGHT = 64  # requests of one stream read ahead of the answers; beyond that reading pauses
PARTS_AHEAD = 16  # parts of one answer buffered while earlier answers are sent


async def in_order(
    requests: AsyncIterator[Request], answer: Callable[[Request], AsyncIterator[Part]]
) -> AsyncIterator[Part]:
    """Yield the parts of the answers to all requests.

    Requests start, and their answers are yielded, in the order of arrival, so requests of a sequence stay in
    order. Closing this iterator cancels all running requests. An exception from `answer` ends the stream, so
    `answer` must report the error of one request as a part.

    Raises:
        Exception: reading `requests` failed; raised after the answers to the requests that were read.
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
    """Marker behind the last item of a pipe, with the error that ended the pipe, if any."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class _Pipe(Generic[Item]):
    """A bounded queue between two tasks: one puts items, the other takes them; at most `ahead` are queued."""

    def __init__(self, ahead: int) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(ahead)

    async def fill(self, source: AsyncIterator[Item]) -> None:
        """Put all items of `source` into the queue."""
        end = _End()
        try:
            async for item in source:
                await self._queue.put(item)
        except Exception as error:  # the top of the task: `items` raises it
            end = _End(error)
        await self._queue.put(end)

    async def items(self) -> AsyncIterator[Item]:
        """Yield the queued items until the end; then raise the error of `source`, if any."""
        while not isinstance(item := await self._queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
