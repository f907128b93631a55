"""OpenTelemetry spans: one for each request, with its stages, one for each batch and each executor start.

The extra `otel` installs the packages that this module imports. If tracing is disabled, the module is not
imported, and the code that would create a span only checks for None. The stages of a request are always
measured; their spans are created when the request has ended, so they cost nothing before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import NonRecordingSpan, TraceState

from torchere.serving.logs.trace_context import TraceContext
from torchere.serving.telemetry.numbers import Listener, Predicted, VersionNumbers
from torchere.serving.telemetry.stages import STAGES, stages_of

SERVICE = "torchere"  # the service name of spans, unless OTEL_SERVICE_NAME is set
MAX_REMEMBERED = 10_000  # span contexts of requests whose batch has not been reported
# Limit on `close` if the collector does not respond: the SDK retries each batch of spans, one by one.
CLOSE_S = 10.0

# Otherwise each malformed `tracestate` would write up to 4 kB of the client's text to the log.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)


class SpanMaker(Listener):
    """Creates the spans of one server, which `provider` receives. Call it on the event loop only."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("torchere")
        # Not by request id, because steps of a workflow share one and may run at the same time.
        # Values: the span, its start in ns since the epoch, and whether the last batch has been reported.
        self._open: dict[Predicted, tuple[Span, int, bool]] = {}
        # By request id, model and version, for the links of batches.
        self._ended: OrderedDict[tuple[str, str, str], SpanContext] = OrderedDict()

    def begin(self, prediction: Predicted) -> None:
        """Start the span of a prediction that arrived, as a child of the span that its client named."""
        start_ns = time.time_ns() - _ns(time.monotonic() - prediction.started_s)
        operation = prediction.operation()
        span = self._tracer.start_span(
            operation.name,
            _parent(prediction.trace),
            SpanKind.SERVER,
            {"request.id": prediction.request_id, **operation.attributes},
            start_time=start_ns,
        )
        self._open[prediction] = span, start_ns, False
        context = span.get_span_context()
        prediction.trace = TraceContext(
            api.format_trace_id(context.trace_id), api.format_span_id(context.span_id), span.is_recording()
        )

    def end(self, prediction: Predicted, code: str | int, now_s: float) -> None:
        """End the span of a prediction, and add the spans of its stages, one after the other.

        All times are relative to the start of the span, because the clock may have been adjusted since then.
        """
        opened = self._open.pop(prediction, None)
        if opened is None:
            return
        span, start_ns, is_reported = opened
        if span.is_recording():
            _describe(span, prediction, code)
            self._add_stages(span, start_ns, stages_of(prediction, now_s))
            meter = prediction.meter
            if prediction.dequeued_s and meter is not None and not is_reported:
                key = (prediction.request_id, *meter.key)
                self._ended[key] = span.get_span_context()
                if len(self._ended) > MAX_REMEMBERED:
                    self._ended.popitem(last=False)
        span.end(start_ns + _ns(now_s - prediction.started_s))

    def batch_finished(
        self,
        version: VersionNumbers,
        executor_s: float,
        handler_s: float,
        requests: Sequence[Predicted],
        succeeded: bool,
    ) -> None:
        """Create the span of a batch."""
        contexts = [self._context_in_batch(request, version) for request in requests]
        links = [Link(context) for context in contexts if context is not None]
        if not links:
            return  # none of its requests is sampled
        labels: dict[str, str | int] = {"model.name": version.model, "model.version": version.version}
        labels |= {"batch.size": len(requests), "queue.depth": version.load().queued}
        self._finished_span("batch", executor_s, labels, links, failed=not succeeded)

    def _context_in_batch(self, request: Predicted, version: VersionNumbers) -> SpanContext | None:
        """Return the span context of a request that the batch completed; None: unsampled or incomplete."""
        opened = self._open.get(request)
        if opened is None:
            return self._ended.pop((request.request_id, *version.key), None)
        if request.open:  # a later batch completes it; else each step of continuous batching would be a span
            return None
        span, start_ns, _ = opened
        self._open[request] = span, start_ns, True
        return span.get_span_context() if span.is_recording() else None

    def load(self, version: VersionNumbers, executor_id: int, load_s: float) -> None:
        """Create the span of the start of an executor, which took `load_s`."""
        labels: dict[str, str | int] = {"model.name": version.model, "model.version": version.version}
        labels["executor.id"] = executor_id
        self._finished_span("load", load_s, labels)

    def close(self) -> None:
        """Send the remaining spans, for at most `CLOSE_S`. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _finished_span(
        self,
        name: str,
        duration_s: float,
        labels: dict[str, str | int],
        links: Sequence[Link] = (),
        *,
        failed: bool = False,
    ) -> None:
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            name, Context(), attributes=labels, links=links, start_time=end_ns - _ns(duration_s)
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def _add_stages(self, span: Span, start_ns: int, stages_s: Sequence[float]) -> None:
        parent = api.set_span_in_context(span, Context())
        for stage, duration_s in zip(STAGES, stages_s, strict=True):
            if duration_s > 0:
                child = self._tracer.start_span(stage, parent, start_time=start_ns)
                start_ns += _ns(duration_s)
                child.end(start_ns)


def exporting_provider(version: str) -> TracerProvider:
    """Return a provider that sends spans by OTLP over HTTP, in batches, from a separate thread.

    The SDK reads the endpoint, the sampling and the service name from OpenTelemetry's environment variables
    (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, ...).
    """
    resource = Resource.create({SERVICE_VERSION: version})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `SpanMaker.close` shuts it down
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _describe(span: Span, prediction: Predicted, code: str | int) -> None:
    failed = code not in ("OK", "CANCELLED") if isinstance(code, str) else code >= 500
    key = "rpc.response.status_code" if isinstance(code, str) else "http.response.status_code"
    span.set_attribute(key, code)
    error = prediction.error
    if error is not None:
        span.set_attribute("error.type", error.code)
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        span.add_event("exception", {"exception.type": kind, "exception.message": error.full_text})
    elif failed:
        span.set_attribute("error.type", str(code))
    if failed:
        span.set_status(Status(StatusCode.ERROR, None if error is None else error.message))
    if prediction.meter is not None:
        span.set_attribute("model.name", prediction.meter.model)
        span.set_attribute("model.version", prediction.meter.version)


def _parent(trace: TraceContext | None) -> Context:
    """Return the parent context of a span: the client's span, or an empty context."""
    if trace is None:
        return Context()
    context = SpanContext(
        int(trace.trace_id, 16),
        int(trace.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([trace.state]),
    )
    return api.set_span_in_context(NonRecordingSpan(context), Context())


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
