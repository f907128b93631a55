"""Predictions over gRPC without a task or a coroutine of their own, as small ones over REST."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import Message

from torchere.serving.batching.pending import Reply
from torchere.serving.errors import ServingError
from torchere.serving.frontend.call_scope import CANCELLED
from torchere.serving.frontend.dataplane import Prediction
from torchere.serving.frontend.grpc.call import Call, Method, OneRequest
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.types import InferResponse, StreamedResponse


class Direct(Protocol):
    """A method whose every call is one prediction."""

    def admit(self, request: Any, call: Call, reply: Reply) -> Prediction:
        """Have the data plane answer a message; sets the call's timeline.

        Raises:
            ServingError: it was not admitted.
        """

    def message(self, body: bytes) -> Message:
        """The message that answers with this body."""


class DirectCall(OneRequest):
    """One such call; a `Receiver`."""

    __slots__ = ("_direct", "_joining", "_prediction", "_tasks")

    def __init__(self, method: Method, stream: Stream, direct: Direct, tasks: set[Any]) -> None:
        super().__init__(method, stream)
        self._direct = direct
        self._tasks = tasks
        self._prediction: Prediction | None = None
        self._joining: asyncio.Task[None] | None = None

    def begin(self, request: Any) -> None:
        """Have it answered."""
        try:
            self._prediction = self._direct.admit(request, self, self.reply)
        except Exception as error:  # the top of a call
            self.badly(error)

    def reply(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Answer the client; `Reply` of the prediction."""
        try:
            if isinstance(outcome, InferResponse):
                self.well_with(self._direct.message(outcome.body))
            elif isinstance(outcome, StreamedResponse):
                self._joining = asyncio.get_running_loop().create_task(self._join(outcome))
                self._tasks.add(self._joining)
                self._joining.add_done_callback(self._tasks.discard)
            else:
                self.badly(outcome)
        except Exception as error:  # others are answered after this one
            self.badly(error)

    def gone(self) -> None:
        """The client gave it up."""
        if self.timeline is not None:
            self.timeline.finish(CANCELLED["grpc"])
        if self._prediction is not None:
            self._prediction.withdraw()
        if self._joining is not None:
            self._joining.cancel()

    async def _join(self, response: StreamedResponse) -> None:
        """The parts of a streamed answer, as one message."""
        try:
            self.well_with(self._direct.message(b"".join([chunk async for chunk in response.chunks])))
        except Exception as error:  # as above
            self.badly(error)


def direct_calls(method: Method, direct: Direct, tasks: set[Any]) -> Callable[[Stream], DirectCall]:
    """What opens calls of such a method."""

    def opened(stream: Stream) -> DirectCall:
        return DirectCall(method, stream, direct, tasks)

    return opened
