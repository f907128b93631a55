"""Calls answered by coroutines: a task each, which ends with its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, ClassVar, cast

from google.protobuf.message import Message

from torchere.serving.frontend.call_scope import CANCELLED, CallScope
from torchere.serving.frontend.grpc.call import Call, Method, OneRequest
from torchere.serving.frontend.http2.messages import Packed, Received
from torchere.serving.frontend.http2.receiver import Receiver
from torchere.serving.frontend.http2.status import StatusCode
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.types import NO_DEADLINE

Unary = Callable[[Any, Call], Awaitable[Any]]
Answerer = Callable[["RunningCall", Any], Awaitable[None]]
Streaming = Callable[[Any, Call], AsyncIterator[Any]]  # async generators, closed when a call ends early

# Of one call that wait to be taken; with either, its client has to wait.
MESSAGES_AHEAD = 16
BYTES_AHEAD = 2**20
# How long after its deadline a call is ended from here. The data plane ends predictions on time, and counts
# them; this is for calls that wait for something else.
LATE_S = 0.1


class RunningCall(Call):
    """A call with a task of its own; a `Receiver`."""

    __slots__ = ("_answer", "_expiry", "_scope", "_tasks", "task")

    def __init__(self, method: Method, stream: Stream, answer: Answerer, tasks: set[Any]) -> None:
        super().__init__(method, stream)
        self._answer = answer
        self._tasks = tasks
        self._expiry: asyncio.TimerHandle | None = None
        self._scope: CallScope | None = None
        self.task: asyncio.Task[None] | None = None

    def run(self, request: Any, *, many: bool) -> None:
        """Begin to answer; `many`: the client may send several predictions."""
        loop = asyncio.get_running_loop()
        self.task = loop.create_task(self._run(request, many=many))
        self._tasks.add(self.task)
        self.task.add_done_callback(self._done)
        if self.deadline_s != NO_DEADLINE:
            self._expiry = loop.call_later(self.deadline_s - self.started_s + LATE_S, self._expire)

    def flawed(self, code: StatusCode, message: str) -> None:
        """What the client sends can't be taken."""
        super().flawed(code, message)
        self.gone()

    def gone(self) -> None:
        """The client gave it up."""
        if self.task is not None:
            self.task.cancel()

    async def _run(self, request: Any, *, many: bool) -> None:
        metadata = self.metadata
        self._scope = CallScope("grpc", self.started_s, lambda: metadata, self.method.code_of, many=many)
        self._scope.read_s = self.read_s
        try:
            await self._answer(self, request)
        except asyncio.CancelledError:
            self._scope.finish(CANCELLED["grpc"])  # without effect where it was ended from here
            raise
        except Exception as error:  # the top of every call
            self.badly(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        # Not in `_run`, which a task that is given up at once never begins.
        self._tasks.discard(task)
        self.task = None  # or both, and the request, would stay until a collector comes
        if self._expiry is not None:
            self._expiry.cancel()

    def _over(self, code: StatusCode) -> None:
        if self._scope is not None:
            self.timeline = self._scope.timeline
        super()._over(code)

    def _expire(self) -> None:
        if not self.stream.ended:  # uvloop has its timers go before `_done`
            self.failed(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.gone()


class OneRequestCall(OneRequest, RunningCall):
    """A call with one message of the client's."""

    __slots__ = ()

    def begin(self, request: Any) -> None:
        """Begin to answer."""
        self.run(request, many=False)


class ManyRequestsCall(RunningCall):
    """A call with any number of the client's messages, answered while they come."""

    __slots__ = ("_coming", "_coming_bytes", "_is_over", "_wanted")
    takes_one: ClassVar[bool] = False

    def __init__(self, method: Method, stream: Stream, answer: Answerer, tasks: set[Any]) -> None:
        super().__init__(method, stream, answer, tasks)
        self._coming: deque[Received | Packed] = deque()
        self._coming_bytes = 0
        self._wanted: asyncio.Future[None] | None = None
        self._is_over = False
        self.run(self._requests(), many=True)

    def message(self, message: Received | Packed) -> None:
        """One of the client's messages."""
        self._coming.append(message)
        self._coming_bytes += len(message)
        if len(self._coming) >= MESSAGES_AHEAD or self._coming_bytes >= BYTES_AHEAD:
            self.stream.pause()
        self._wake()

    def half_closed(self) -> None:
        """There are no more."""
        self._is_over = True
        self._wake()

    async def _requests(self) -> AsyncIterator[Message]:
        while True:
            while self._coming:
                yield self.decoded(await self._next())
            if self._is_over:
                return
            self.stream.resume()
            if not (self._coming or self._is_over):
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted

    async def _next(self) -> Received:
        message = self._coming.popleft()
        self._coming_bytes -= len(message)
        plain = await message.unpacked() if isinstance(message, Packed) else message
        self.stream.taken(len(message))
        return plain

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


def one_to_one(method: Method, implementation: Unary, tasks: set[Any]) -> Callable[[Stream], Receiver]:
    """What opens calls of a method with one message each way."""

    async def answer(call: RunningCall, request: Any) -> None:
        call.well_with(await implementation(request, call))

    def opened(stream: Stream) -> Receiver:
        return OneRequestCall(method, stream, answer, tasks)

    return opened


def to_many(
    method: Method, implementation: Streaming, tasks: set[Any], *, from_many: bool
) -> Callable[[Stream], Receiver]:
    """What opens calls of a method that answers in any number of messages."""
    kind = ManyRequestsCall if from_many else OneRequestCall

    async def answer(call: RunningCall, request: Any) -> None:
        made = cast("AsyncGenerator[Message, None]", implementation(request, call))
        async with aclosing(made) as messages:
            async for message in messages:
                call.stream.send(method.encode(message))
                await call.stream.drained()
        call.well()

    def opened(stream: Stream) -> Receiver:
        return kind(method, stream, answer, tasks)

    return opened
