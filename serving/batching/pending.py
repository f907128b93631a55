"""One request on its way: the future its client waits on, and the parts of a streamed answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from torchere.serving.errors import ServingError
from torchere.serving.types import InferRequest, InferResponse, StreamedResponse


def alone(request: InferRequest) -> str:
    """The group of a request that shares its batch with no other, and so waits for none."""
    return f"alone {request.request_id}"


class Pending:
    """A request that was admitted and is not answered yet. Lives on the event loop.

    `group` says who may share its batch: requests of equal group only. It is done exactly once, by whichever
    comes first: the answer, the deadline, or its client going away; what comes later is dropped.
    """

    __slots__ = ("answer", "deadline_timer", "dequeued_s", "enqueued_s", "group", "request", "stream")

    def __init__(
        self, request: InferRequest, group: str, enqueued_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request = request
        self.group = group
        self.enqueued_s = enqueued_s
        self.dequeued_s = 0.0  # 0: still waiting in the queue
        self.answer: asyncio.Future[InferResponse | StreamedResponse] = loop.create_future()
        self.stream: asyncio.Queue[bytes | ServingError | None] | None = None
        self.deadline_timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """Whether somebody still waits for (the rest of) the answer."""
        return self.stream is not None or not self.answer.done()

    def add_part(self, part: InferResponse) -> None:
        """Hand on one part of a streamed answer; the first one answers the client's wait."""
        if self.stream is None:
            if self.answer.done():
                return
            self.stream = asyncio.Queue()
            self.answer.set_result(StreamedResponse(part, self._chunks(self.stream)))
        self.stream.put_nowait(part.body)

    def finish(self, outcome: InferResponse | ServingError) -> None:
        """Complete the answer; a no-op when it was complete already."""
        if self.deadline_timer is not None:
            self.deadline_timer.cancel()
        if self.stream is not None:
            self._finish_stream(self.stream, outcome)
        elif not self.answer.done():
            if isinstance(outcome, ServingError):
                self.answer.set_exception(outcome)
            else:
                self.answer.set_result(outcome)

    def _finish_stream(
        self, stream: asyncio.Queue[bytes | ServingError | None], outcome: InferResponse | ServingError
    ) -> None:
        if isinstance(outcome, ServingError):
            stream.put_nowait(outcome)
        else:
            stream.put_nowait(outcome.body)
            stream.put_nowait(None)
        self.stream = None

    @staticmethod
    async def _chunks(stream: asyncio.Queue[bytes | ServingError | None]) -> AsyncIterator[bytes]:
        while (part := await stream.get()) is not None:
            if isinstance(part, ServingError):
                raise part
            yield part
