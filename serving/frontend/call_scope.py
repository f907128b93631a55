"""What one call of a client tells telemetry about the predictions in it: start, trace, marks, and end.

The data plane finds it by a context variable, so that no room in between has to hand it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar

from torchere.serving.batching.request import Protocol, Request
from torchere.serving.errors import ServingError
from torchere.serving.logs.trace_context import trace_of_headers
from torchere.serving.telemetry.metrics import Metrics

CLIENT_GONE = 499  # as an HTTP status: no standard, but known; nobody is told
CANCELLED: dict[Protocol, str | int] = {"rest": CLIENT_GONE, "grpc": "CANCELLED"}

_current: ContextVar[CallScope | None] = ContextVar("call", default=None)


class CallScope:
    """One call, and the current one of the task that makes it. Lives on the event loop.

    Args:
        protocol: how it came.
        started_s: monotonic seconds when it came in.
        headers: its headers or metadata, asked for when a prediction begins.
        code_of: what an error is answered with: HTTP status, or name of the gRPC code.
        many: it is a stream that may bring many predictions; each is over when it is answered.
    """

    __slots__ = ("_code_of", "_headers", "_many", "_metrics", "_started_s", "protocol", "read_s", "request")

    def __init__(
        self,
        protocol: Protocol,
        started_s: float,
        headers: Callable[[], Iterable[tuple[str | bytes, str | bytes]]],
        code_of: Callable[[ServingError], str | int],
        *,
        many: bool = False,
    ) -> None:
        self.protocol: Protocol = protocol
        self._started_s = started_s
        self._headers = headers
        self._code_of = code_of
        self._many = many
        self._metrics: Metrics | None = None  # once there was a prediction
        self.read_s = 0.0  # when its body was there; 0: at once
        self.request: Request | None = None  # its prediction, unless there may be many
        _current.set(self)

    def begin(self, metrics: Metrics, request: Request) -> None:
        """Take a prediction of this call, which goes to the data plane now."""
        self._metrics = metrics
        request.started_s = time.monotonic() if self._many else self._started_s
        request.trace = trace_of_headers(self._headers())
        metrics.prediction_begins(request)
        if not self._many:
            request.read_s = self.read_s
            self.request = request

    def answered(self, request: Request) -> None:
        """The prediction has its answer, or the beginning of one."""
        if self._many:
            self._end(request, "OK" if self.protocol == "grpc" else 200)

    def failed(self, request: Request, error: ServingError) -> None:
        """The prediction got an error for an answer."""
        self._end(request, self._code_of(error))

    def cancelled(self, request: Request) -> None:
        """The client left."""
        self._end(request, CANCELLED[self.protocol])

    def sending(self) -> None:
        """The answer goes out from now on."""
        if self.request is not None:
            self.request.sending_s = time.monotonic()

    def finish(self, code: str | int) -> None:
        """The call is over; without effect for a prediction that is over already."""
        if self.request is not None:
            self._end(self.request, code)

    def _end(self, request: Request, code: str | int) -> None:
        if self._metrics is not None:
            self._metrics.prediction_ends(request, code)


def current_call() -> CallScope | None:
    """The call that the current task answers."""
    return _current.get()
