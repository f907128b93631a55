"""What one call of a client tells telemetry about the predictions in it: start, trace, marks, and end.

The data plane finds it by a context variable, so that no room in between has to hand it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar

from torchere.serving.errors import ServingError
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.timeline import Timeline, Transport
from torchere.serving.telemetry.trace_context import trace_of_headers

CLIENT_GONE = 499  # as an HTTP status: no standard, but known; nobody is told
CANCELLED: dict[Transport, str | int] = {"rest": CLIENT_GONE, "grpc": "CANCELLED"}

_current: ContextVar[CallScope | None] = ContextVar("call", default=None)


class CallScope:
    """One call, and the current one of the task that makes it. Lives on the event loop.

    Args:
        transport: how it came.
        started_s: monotonic seconds when it came in.
        headers: its headers or metadata, asked for when a prediction begins.
        code_of: what an error is answered with: HTTP status, or name of the gRPC code.
        many: it is a stream that may bring many predictions; each is over when it is answered.
    """

    __slots__ = ("_code_of", "_headers", "_many", "_started_s", "_transport", "read_s", "timeline")

    def __init__(
        self,
        transport: Transport,
        started_s: float,
        headers: Callable[[], Iterable[tuple[str | bytes, str | bytes]]],
        code_of: Callable[[ServingError], str | int],
        *,
        many: bool = False,
    ) -> None:
        self._transport: Transport = transport
        self._started_s = started_s
        self._headers = headers
        self._code_of = code_of
        self._many = many
        self.read_s = 0.0  # when its body was there; 0: at once
        self.timeline: Timeline | None = None  # of its prediction, unless there may be many
        _current.set(self)

    def begin(self, metrics: Metrics, request_id: str) -> Timeline:
        """A prediction of this call goes to the data plane now."""
        started_s = time.monotonic() if self._many else self._started_s
        trace = trace_of_headers(self._headers())
        timeline = metrics.timeline(self._transport, request_id, started_s, trace)
        if not self._many:
            timeline.read_s = self.read_s
            self.timeline = timeline
        return timeline

    def answered(self, timeline: Timeline) -> None:
        """The prediction has its answer, or the beginning of one."""
        if self._many:
            timeline.finish("OK" if self._transport == "grpc" else 200)

    def failed(self, timeline: Timeline, error: ServingError) -> None:
        """The prediction got an error for an answer."""
        timeline.finish(self._code_of(error))

    def cancelled(self, timeline: Timeline) -> None:
        """The client went away, and waits for the prediction no more."""
        timeline.finish(CANCELLED[self._transport])

    def sending(self) -> None:
        """The answer goes out from now on."""
        if self.timeline is not None:
            self.timeline.sending_s = time.monotonic()

    def finish(self, code: str | int) -> None:
        """The call is over; without effect for a prediction that is over already."""
        if self.timeline is not None:
            self.timeline.finish(code)


def current_call() -> CallScope | None:
    """The call that the current task answers."""
    return _current.get()
