"""gRPC calls answered by coroutines (streams, and methods that wait), each in a task of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, cast

from google.protobuf.message import Message

from torchere.serving.batching.request import Request
from torchere.serving.frontend.budgets import INLINE_BYTES, Lease, in_thread, outcome_of
from torchere.serving.frontend.call_scope import CANCELLED, CallScope
from torchere.serving.frontend.grpc.call import OWN_MARKS, SLOTS, Call, Method, UnaryCall
from torchere.serving.frontend.http2.messages import Compressed, MessageFailed, Received, StatusCode
from torchere.serving.frontend.http2.stream import Stream

Waiting = Callable[[Any, Call], Awaitable[Any]]  # coroutine functions: one message each way
Streaming = Callable[[Any, Call], AsyncIterator[Any]]  # async generators, closed when a call ends early
Answerer = Callable[["TaskCall", Any], Awaitable[None]]

# Limits of one call's queued messages; at either limit its stream is paused.
MESSAGES_AHEAD = 16
BYTES_AHEAD = 2**20
MESSAGE_S = 0.0001  # event loop's time for a short message: its decoding, its tasks and its answer
SHUTTING_DOWN = "The server is shutting down: call again"
FIRST_MESSAGE_S = 1.0  # how long to wait for the first message of a stream that began before shutdown


class TaskCall(Call):
    """A call answered by its own task."""

    __slots__ = (*SLOTS, *OWN_MARKS, "_answer", "_expiry", "_scope", "task")

    def __init__(self, answer: Answerer, method: Method, stream: Stream) -> None:
        Call.__init__(self, method, stream)
        self._answer = answer
        self._expiry: asyncio.TimerHandle | None = None
        self._scope: CallScope | None = None
        self.task: asyncio.Task[None] | None = None

    def begin(self, request: Any) -> None:
        """Start the task."""
        self.task = asyncio.get_running_loop().create_task(self._run(request))
        self.method.tasks.add(self.task)
        self.task.add_done_callback(self._done)
        self._expiry = self.expire_later()

    def on_failure(self, error: MessageFailed) -> None:
        """End the call, because a message can't be accepted."""
        super().on_failure(error)
        self.on_cancel()

    def on_cancel(self) -> None:
        """Cancel the task."""
        super().on_cancel()
        if self.task is not None:
            self.task.cancel()

    async def _run(self, request: Any) -> None:
        metadata = self.metadata
        self._scope = CallScope(
            "grpc",
            self.started_s,
            lambda: metadata,
            self.method.code_of,
            caller=self.stream.caller,
            many=not self.takes_one,
        )
        self._scope.read_s = self.read_s
        self._scope.operation = self.operation()
        try:
            await self._answer(self, request)
        except asyncio.CancelledError:
            self._scope.finish(CANCELLED["grpc"])  # no effect if the call was already ended here
            raise
        except Exception as error:  # the top of the call
            self.fail(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        # Not in `_run`, because a task that is cancelled at once never begins.
        self.method.tasks.discard(task)
        self.task = None  # breaks a reference cycle of call, task and request
        if self._expiry is not None:
            self._expiry.cancel()

    def _ended(self, code: StatusCode) -> None:
        if self._scope is not None:
            self._scope.finish(code.name)
        super()._ended(code)

    @property
    def prediction(self) -> Request | None:
        """The prediction of the call; None for other calls, and for streams that may hold several."""
        return None if self._scope is None else self._scope.request


class UnaryTaskCall(TaskCall, UnaryCall):
    """A call with one request message, answered by a task."""

    __slots__ = ()


class StreamTaskCall(TaskCall):
    """A call with any number of request messages, answered by a task while they arrive."""

    __slots__ = ("_half_closed", "_messages", "_messages_bytes", "_stops", "_wanted")
    takes_one: ClassVar[bool] = False

    def __init__(self, answer: Answerer, method: Method, stream: Stream) -> None:
        super().__init__(answer, method, stream)
        self._messages: deque[Received | Compressed] = deque()
        self._messages_bytes = 0
        self._wanted: asyncio.Future[None] | None = None
        self._half_closed = False
        self._stops = False  # shutdown: the call ends when it would wait for a message
        self.begin(self._requests())

    def on_message(self, message: Received | Compressed) -> None:
        """Queue a message; pause the stream while the queue is full."""
        self._messages.append(message)
        self._messages_bytes += len(message)
        if len(self._messages) >= MESSAGES_AHEAD or self._messages_bytes >= BYTES_AHEAD:
            self.stream.pause()
        self._wake()

    def on_half_close(self) -> None:
        """End the queue."""
        self._half_closed = True
        self._wake()

    def on_drain(self, *, is_stop: bool) -> None:
        """If the server stops, end the call after the answers to the received messages.

        Clients keep idle calls open, for which the stop would otherwise wait for its whole grace period.
        """
        if is_stop:
            delay_s = 0.0 if self.stream.messages else FIRST_MESSAGE_S
            asyncio.get_running_loop().call_later(delay_s, self._stop)

    def _ended(self, code: StatusCode) -> None:
        self._messages.clear()  # frees their bytes in the budget: the client may read the answer slowly
        super()._ended(code)

    async def _requests(self) -> AsyncIterator[Message]:
        while True:
            while self._messages:
                yield await self._next()
            if self._half_closed:
                return
            self.stream.resume()
            if self._messages:
                # Give way to others: a client that sends many small messages would otherwise block the loop.
                await self.stream.budgets.turns.another(len(self._messages) * MESSAGE_S)
            elif not self._half_closed:
                if self._stops and not self.stream.waits_for_client:  # no message is incomplete
                    raise MessageFailed(StatusCode.UNAVAILABLE, SHUTTING_DOWN)
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted

    async def _next(self) -> Any:
        message = self._messages.popleft()
        size = len(message)
        self._messages_bytes -= size
        if isinstance(message, Compressed):
            decoded = await self._inflated_and_decoded(message)
        elif self.takes_long(message):
            decodes = self.stream.budgets.decodes
            decoded = _decoded(await decodes.run(partial(self.decoded_apart, message), self.stream.caller))
        else:
            decoded = self.decoded(message)
        self.stream.consumed(size)
        return decoded

    async def _inflated_and_decoded(self, message: Compressed) -> Any:
        """Decompress a message and decode it; if it is long, in threads, where the decoding is queued."""
        inflated = message.inflated_if_short()
        if inflated is not None:
            return self.decoded(inflated)
        decodes, caller = self.stream.budgets.decodes, self.stream.caller
        lease = self.stream.hold_while_inflating(message)
        if len(message) <= INLINE_BYTES:  # one read may bring hundreds, and a thread for each costs loop time
            try:
                return _decoded(await decodes.run(partial(self._inflated_apart, message), caller))
            finally:
                lease.end()
        inflated = await asyncio.shield(_inflating(message, lease))
        size = len(inflated)
        self.stream.keep(size)
        decoding = decodes.run(partial(self.decoded_apart, inflated), caller)
        del inflated
        try:
            return _decoded(await decoding)
        finally:
            self.stream.let_go(size)

    def _inflated_apart(self, message: Compressed) -> Any:
        """As `decoded_apart`, for a short message that is still compressed."""
        return outcome_of(lambda: self.decoded_apart(message.inflated()), MessageFailed)

    def _stop(self) -> None:
        self._stops = True
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


def _decoded(found: Any) -> Any:
    """Return the result of `decoded_apart`, or raise it if it is an error."""
    try:
        if isinstance(found, MessageFailed):
            raise found
        return found
    finally:
        del found  # the error's traceback references this frame: a cycle that keeps the message


def _inflating(message: Compressed, lease: Lease) -> asyncio.Future[bytes]:
    """Decompress a message in a thread, then end the lease. Do not cancel it, because the thread goes on."""

    def end(done: asyncio.Future[bytes]) -> None:
        lease.end()
        if not done.cancelled():
            done.exception()  # asyncio would log an error that a cancelled call does not retrieve

    inflating = in_thread(message.inflated)
    inflating.add_done_callback(end)
    return inflating


def waiting_answer(implementation: Waiting) -> Answerer:
    """Return an answerer that sends the one message that a coroutine function returns."""

    async def answer(call: TaskCall, request: Any) -> None:
        call.answer(await implementation(request, call))

    return answer


def streaming_answer(implementation: Streaming) -> Answerer:
    """Return an answerer that sends the messages of an async generator, no faster than the client reads."""

    async def answer(call: TaskCall, request: Any) -> None:
        made = cast("AsyncGenerator[Message, None]", implementation(request, call))
        async with aclosing(made) as messages:
            async for message in messages:
                call.stream.send(call.method.encode(message))
                await call.stream.drained()
        call.end()

    return answer
