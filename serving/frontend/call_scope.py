"""The scope of one client call: reports start, trace, timestamps and end of predictions to telemetry.

The data plane finds the scope by a context variable, so that no layer in between has to pass it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar

from torchere.serving.batching.request import Protocol, Request
from torchere.serving.errors import ServingError
from torchere.serving.logs.trace_context import trace_of_headers
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import Operation

CLIENT_GONE = 499  # a non-standard but common HTTP status; only telemetry sees it, it is never sent
CANCELLED: dict[Protocol, str | int] = {"rest": CLIENT_GONE, "grpc": "CANCELLED"}

_current: ContextVar[CallScope | None] = ContextVar("call", default=None)


class CallScope:
    """One client call. Creating it makes it the current call of the running task. Event loop only.

    Args:
        protocol: the protocol of the call.
        started_s: arrival time, in monotonic seconds.
        headers: returns the headers or metadata of the call; called when a prediction begins.
        code_of: maps an error to the status of its response: HTTP status, or name of the gRPC code.
        caller: names the client; see `Request`.
        many: the call is a stream that may carry many predictions; each ends when it is answered.
    """

    __slots__ = (
        *("_code_of", "_headers", "_metrics", "_started_s", "caller", "change", "has_changed", "managed"),
        *("many", "operation", "protocol", "read_s", "request"),
    )

    def __init__(
        self,
        protocol: Protocol,
        started_s: float,
        headers: Callable[[], Iterable[tuple[str | bytes, str | bytes]]],
        code_of: Callable[[ServingError], str | int],
        *,
        caller: str = "",
        many: bool = False,
    ) -> None:
        self.protocol: Protocol = protocol
        self._started_s = started_s
        self._headers = headers
        self._code_of = code_of
        self.many = many
        self.caller = caller
        self._metrics: Metrics | None = None  # set by the first prediction
        self.operation: Operation | None = None  # of the call, for spans; None: unknown
        self.managed = ("", "")  # the model and the version that the call changes
        self.change = ""  # the value that the call sets, as NAME=VALUE
        self.has_changed = False  # its change is in effect, even if the answer is an error
        self.read_s = 0.0  # monotonic seconds when the body was complete; 0: on arrival
        self.request: Request | None = None  # the prediction, unless the call may carry many
        _current.set(self)

    def begin(self, metrics: Metrics, request: Request) -> None:
        """Record the start of a prediction, just before it is admitted by the data plane."""
        self._metrics = metrics
        request.started_s = time.monotonic() if self.many else self._started_s
        request.trace = trace_of_headers(self._headers())
        request.caller = self.caller
        metrics.prediction_begins(request)
        if not self.many:
            request.read_s = self.read_s
            self.request = request

    def answered(self, request: Request) -> None:
        """Record that a prediction has its response, or the start of a streamed one."""
        if self.many:
            self._end(request, "OK" if self.protocol == "grpc" else 200)

    def failed(self, request: Request, error: ServingError) -> None:
        """Record that a prediction failed with `error`."""
        request.error = error
        self._end(request, self._code_of(error))

    def cancelled(self, request: Request) -> None:
        """Record that the client cancelled a prediction or disconnected."""
        self._end(request, CANCELLED[self.protocol])

    def finish(self, code: str | int) -> None:
        """Record the end of the call with `code`. No effect on a prediction that has already ended."""
        if self.request is not None:
            self._end(self.request, code)

    def _end(self, request: Request, code: str | int) -> None:
        if self._metrics is not None:
            self._metrics.prediction_ends(request, code)


def current_call() -> CallScope | None:
    """Return the call that the current task answers, or None."""
    return _current.get()


def manages(model: str, version: str | None = None) -> None:
    """Record the model, or the workflow, that the current call changes, for the audit log."""
    call = _current.get()
    if call is not None:
        call.managed = (model, version or "")


def sets(name: str, value: str) -> None:
    """Record the value that the current call sets, for the audit log."""
    call = _current.get()
    if call is not None:
        call.change = f"{name}={value}"


def changed(in_effect: bool = True) -> None:
    """Record that the change of the current call is in effect, or is undone, for the audit log."""
    call = _current.get()
    if call is not None:
        call.has_changed = in_effect
