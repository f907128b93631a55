"""Predictions over gRPC without a task or a coroutine of their own, as plain ones over REST."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torchere.serving.errors import ServingError
from torchere.serving.frontend.call_scope import CANCELLED
from torchere.serving.frontend.dataplane import DataPlane, Prediction
from torchere.serving.frontend.grpc.call import Method, OneRequest
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.trace_context import trace_of_headers
from torchere.serving.types import InferRequest, InferResponse, StreamedResponse


class Shared(NamedTuple):
    """What the direct calls of a port share."""

    dataplane: DataPlane
    metrics: Metrics


class Asked(NamedTuple):
    """What a call asks of the data plane."""

    model: str
    version: str | None
    request: InferRequest


class DirectCall(OneRequest, ABC):
    """One call that is one prediction; a `Receiver`."""

    __slots__ = ("_joining", "_prediction", "_shared", "_tasks")

    def __init__(self, shared: Shared, method: Method, stream: Stream, tasks: set[Any]) -> None:
        super().__init__(method, stream)
        self._shared = shared
        self._tasks = tasks
        self._prediction: Prediction | None = None
        self._joining: asyncio.Task[None] | None = None

    @abstractmethod
    def _asked(self, request: Any) -> Asked:
        """What the client's message asks.

        Raises:
            ServingError: nothing that can be asked.
        """

    @abstractmethod
    def _message_of(self, response: InferResponse) -> Any:
        """The message that answers with it; may raise what the call ends with instead."""

    def begin(self, request: Any) -> None:
        """Have it answered."""
        shared = self._shared
        try:
            model, version, asked = self._asked(request)
            trace = trace_of_headers(self.metadata)
            timeline = shared.metrics.timeline("grpc", asked.request_id, self.started_s, trace)
            timeline.read_s = self.read_s
            self.timeline = timeline
            self._prediction = shared.dataplane.admit(model, version, asked, self.reply, timeline=timeline)
        except Exception as error:  # the top of a call
            self.badly(error)

    def reply(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Answer the client; `Reply` of the prediction."""
        try:
            if isinstance(outcome, InferResponse):
                self.well_with(self._message_of(outcome))
            elif isinstance(outcome, StreamedResponse):
                self._take_parts(outcome)
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

    def _take_parts(self, response: StreamedResponse) -> None:
        """Answer with all parts in one message."""
        self._joining = asyncio.get_running_loop().create_task(self._join(response))
        self._tasks.add(self._joining)
        self._joining.add_done_callback(self._tasks.discard)

    async def _join(self, response: StreamedResponse) -> None:
        try:
            chunks, size = [], 0
            async for chunk in response.chunks:
                chunks.append(chunk)
                size += len(chunk)
                self.stream.check(size)  # or all of what can't be sent would be held first
            self.well_with(self._message_of(InferResponse(b"".join(chunks))))
        except Exception as error:  # as above
            self.badly(error)


class Direct(NamedTuple):
    """A method whose every call is one prediction; `call` opens one, and keeps its tasks in the set."""

    call: Callable[[Method, Stream, set[Any]], DirectCall]
