"""One request on its way: who gets its answer, and the parts of a streamed one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from torchere.serving.batching.unread_parts import UnreadParts
from torchere.serving.errors import ServingError
from torchere.serving.types import InferRequest, InferResponse, StreamedResponse

Reply: TypeAlias = Callable[[InferResponse | StreamedResponse | ServingError], None]
"""Gets the answer of a request, on the event loop, once; it must not raise."""

UNTOLD = (0.0, 0.0, 0.0, 0.0)


def told(outcome: InferResponse | StreamedResponse | ServingError) -> None:
    """Stands where a `Reply` was that has its answer."""


def alone(request: InferRequest) -> str:
    """The group of a request that shares its batch with no other, and so waits for none."""
    return f"alone {request.request_id}"


class Pending:
    """A request that was admitted and is not answered yet. Lives on the event loop.

    `group` says who may share its batch: requests of equal group only. It is done exactly once, by whichever
    comes first: the answer, the deadline, or its client going away; what comes later is dropped.
    """

    __slots__ = (
        *("_reply", "answered", "company_s", "deadline_timer", "dequeued_s", "enqueued_s"),
        *("group", "request", "stages_s", "stream"),
    )

    def __init__(self, request: InferRequest, group: str, enqueued_s: float, reply: Reply) -> None:
        self.request = request
        self.group = group
        self.enqueued_s = enqueued_s
        self.dequeued_s = 0.0  # 0: still waiting in the queue
        self.company_s = 0.0  # how long it waited while an executor was free, for a fuller batch
        self.stages_s = UNTOLD  # of the last batch it was in
        self.answered = False
        self.stream: UnreadParts | None = None
        self.deadline_timer: asyncio.TimerHandle | None = None
        self._reply = reply

    @property
    def open(self) -> bool:
        """Whether somebody still waits for (the rest of) the answer."""
        return self.stream is not None or not self.answered

    def add_part(self, part: InferResponse, place: Callable[[Pending], UnreadParts]) -> UnreadParts | None:
        """Hand on one part of a streamed answer; the first one answers the client's wait.

        Args:
            part: what the handler sent.
            place: makes where the parts wait for the client.

        Returns:
            That place, when the executor is to wait for the client before it makes more.
        """
        stream = self.stream
        if stream is None:
            if self.answered:
                return None
            stream = self.stream = place(self)
            self._answer(StreamedResponse(part, _Chunks(stream)))  # who may give it up at once
        stream.add(part.body)
        return stream if stream.held else None

    def finish(self, outcome: InferResponse | ServingError) -> None:
        """Complete the answer; a no-op when it was complete already."""
        if self.deadline_timer is not None:
            self.deadline_timer.cancel()
        if self.stream is not None:
            stream, self.stream = self.stream, None
            if isinstance(outcome, ServingError):
                stream.end(outcome)
            else:
                stream.add(outcome.body)
                stream.end()
        elif not self.answered:
            self._answer(outcome)

    def _answer(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        self.answered = True
        reply, self._reply = self._reply, told  # or they would hold each other, and the request with them
        reply(outcome)


class _Chunks:
    """The parts for whoever reads them, who may be cancelled, or never begin: then they are dropped."""

    __slots__ = ("_parts",)

    def __init__(self, parts: UnreadParts) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        part = await self._parts.take()
        if part is None:
            raise StopAsyncIteration
        return part

    def __del__(self) -> None:
        self._parts.abandon()


class AwaitedReply:
    """A `Reply` for a coroutine: it awaits `future`, and gets the answer or the error raised."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[InferResponse | StreamedResponse] = (
            asyncio.get_running_loop().create_future()
        )

    def __call__(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Let the coroutine go on."""
        if self.future.done():  # cancelled: nobody waits any more
            return
        if isinstance(outcome, ServingError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
