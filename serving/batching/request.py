"""One prediction from its arrival to its answer: inputs, state, and the times of its stages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from torchere.serving.batching.unread_parts import UnreadParts
from torchere.serving.errors import ServingError
from torchere.serving.telemetry.numbers import Operation
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, Parameter, StreamedResponse

if TYPE_CHECKING:
    from torchere.serving.access.client_limits import Account
    from torchere.serving.logs.trace_context import TraceContext
    from torchere.serving.telemetry.numbers import VersionNumbers
    from torchere.serving.workers.run import Run

Answer: TypeAlias = InferResponse | StreamedResponse | ServingError
Protocol = Literal["rest", "grpc"]
UNTOLD = (0.0, 0.0, 0.0, 0.0)


def alone(request_id: str) -> str:
    """Return the group of a request that runs in a batch by itself, and so waits for no other."""
    return f"alone {request_id}"


class Ledger:
    """Counts admitted predictions and finished ones. Lives on the event loop."""

    __slots__ = ("accepted", "answered")

    def __init__(self) -> None:
        self.accepted = 0
        self.answered = 0  # by an answer, an error, or the client's disconnect


class Request:
    """A prediction; each protocol has a subclass that replies to its client. Lives on the event loop.

    It is answered exactly once, by the first of: the report of its run, its deadline, or its client's
    disconnect. Later outcomes are dropped. Times are monotonic seconds, 0.0 for a stage not reached.
    """

    __slots__ = (
        *("account", "answered", "answered_s", "caller", "company_s", "counted", "deadline_s"),
        *("dequeued_s", "enqueued_s", "error"),
        *("group", "headers", "ledger", "meter", "named", "parameters", "parts", "priority", "read_s"),
        *("request_id", "running", "sending_s", "stages_s", "started_s", "streamed", "suspect", "trace"),
    )
    protocol: Protocol = "rest"

    def __init__(self, request_id: str, started_s: float) -> None:
        self.request_id = request_id  # a UUID; the client and the handler see the same
        self.started_s = started_s  # when its first byte arrived
        self.caller = ""  # name of the client's identity, else its address; "": the server itself
        self.parameters: Sequence[Parameter] = ()  # the named values, encoded
        self.headers: Sequence[tuple[str, str]] = ()  # in the client's spelling; the last duplicate wins
        self.deadline_s = NO_DEADLINE  # when it expires
        self.priority = 0  # among the waiting requests of its version; see `fair_queue.py`
        # Of the caller; None: clients are not told apart, or the server makes the request.
        self.account: Account | None = None
        self.group = ""  # requests share a batch only with others of equal group
        self.meter: VersionNumbers | None = None  # the counters of its version; None: not found yet
        self.ledger: Ledger | None = None  # None: not admitted
        self.named = False  # whether the client named a version
        self.trace: TraceContext | None = None  # the trace context that the client sent
        self.read_s = 0.0  # when its body was complete; 0: together with its head
        self.enqueued_s = 0.0  # when it was admitted
        self.dequeued_s = 0.0  # when a lane began with it
        self.company_s = 0.0  # seconds that it waited for the batch to fill while a lane was free
        self.answered_s = 0.0  # when its answer (or the first part) was ready; 0: no handler answered it
        self.sending_s = 0.0  # when sending of the answer began
        self.stages_s = UNTOLD  # preprocess, inference, postprocess, and other handler time, of its last run
        self.error: ServingError | None = None  # the error that its client got; telemetry reads it at the end
        self.suspect = False  # it may have crashed a worker, and runs alone in its process
        self.streamed = False  # the handler sent its answer in parts
        self.answered = False  # its client has the answer, or the first part of it
        self.counted = False  # whether telemetry has counted its end
        self.parts: UnreadParts | None = None  # unread parts, while the answer is streamed
        self.running: Run | None = None  # the run it is in

    def fill(self, asked: InferRequest) -> None:
        """Copy the fields of a parsed request."""
        self.request_id = asked.request_id
        self.parameters, self.headers = asked.parameters, asked.headers
        self.deadline_s, self.priority = asked.deadline_s, asked.priority

    def operation(self) -> Operation:
        """Return the name and attributes of the request's span, in the terms of its protocol."""
        return Operation("prediction", {})

    def reply(self, outcome: Answer) -> None:
        """Send the client its answer, whole or streamed; called once, and must not raise."""
        raise NotImplementedError

    @property
    def open(self) -> bool:
        """Whether the client still waits for (the rest of) the answer."""
        return self.parts is not None or not self.answered

    def add_part(self, part: InferResponse, place: Callable[[Request], UnreadParts]) -> UnreadParts | None:
        """Pass on one part of a streamed answer; the first part starts the reply to the client.

        Args:
            part: the part that the handler sent.
            place: makes the queue in which the parts wait for the client.

        Returns:
            The queue, if the lane must wait for the client before it sends more, else None.
        """
        stream = self.parts
        if stream is None:
            if self.answered:
                return None
            self.streamed = True
            stream = self.parts = place(self)
            self._answer(StreamedResponse(part, _Chunks(stream)))  # the client may abandon it at once
        stream.add(bytes(part.body))
        return stream if stream.held else None

    def finish(self, outcome: InferResponse | ServingError) -> None:
        """Complete the answer; without effect if it is complete."""
        stream = self.parts
        if stream is not None:
            self.parts = None
            self._count_end(outcome)
            if isinstance(outcome, ServingError):
                stream.end(outcome)
            else:
                stream.add(bytes(outcome.body))
                stream.end()
        elif not self.answered:
            self._count_end(outcome)  # before the answer: the client's next request may be here already
            self._answer(outcome)

    def _count_end(self, outcome: InferResponse | ServingError) -> None:
        """Count the end of the request, whose answer is complete or has failed."""
        if self.account is not None:
            self.account.running -= 1
        if self.ledger is not None:
            self.ledger.answered += 1
        meter = self.meter
        if meter is not None:
            meter.in_flight -= 1
        if isinstance(outcome, ServingError):
            self.error = outcome
            if meter is not None:
                meter.failed(outcome, self)

    def _answer(self, outcome: Answer) -> None:
        self.answered = True
        if not (self.answered_s or isinstance(outcome, ServingError)):
            self.answered_s = time.monotonic()
        if self.running is None:  # a running request keeps them: the quarantine may need them
            self.parameters = ()
        self.reply(outcome)

    def cancel_run(self) -> None:
        """Cancel the request in its run: the lane skips it, or stops once all requests are cancelled."""
        if self.running is not None:
            self.running.cancel(next(at for at, one in enumerate(self.running.requests) if one is self))


class _Chunks:
    """An async iterator over the parts; drops them if it is destroyed before the end."""

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
