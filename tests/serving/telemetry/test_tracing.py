"""Spans as the SDK's exporter in memory gets them."""

import gzip
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from torchere.serving.batching.request import Request
from torchere.serving.errors import HandlerFailed, ServingError
from torchere.serving.logs.trace_context import TraceContext
from torchere.serving.server import open_tracing
from torchere.serving.telemetry import tracing
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import Operation, VersionNumbers
from torchere.serving.telemetry.saturation import LoadSample
from torchere.serving.telemetry.stages import STAGES
from torchere.serving.telemetry.tracing import SpanMaker, exporting_provider

REST = "POST /predictions/{model}"
CALLER = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "vendor=1")


def begun(metrics, request_id, started_s, trace=None, protocol="rest"):
    """A prediction of the version `metrics.meter` that has come in."""
    request = (RestRequest if protocol == "rest" else GrpcRequest)(request_id, started_s)
    request.trace = trace
    metrics.prediction_begins(request)
    return request


def answered(request):
    """The same, answered after 0.8 s and sent after 0.9."""
    started_s = request.started_s
    request.read_s = started_s + 0.05
    request.enqueued_s, request.dequeued_s = started_s + 0.1, started_s + 0.4
    request.company_s, request.stages_s = 0.1, (0.05, 0.2, 0.05, 0.0)
    request.answered_s, request.sending_s = started_s + 0.8, started_s + 0.9
    return request


class RestRequest(Request):
    """One over REST."""

    def operation(self):
        """As the door names it."""
        return Operation(REST, {"http.request.method": "POST"})


class GrpcRequest(Request):
    """One over gRPC."""

    protocol = "grpc"

    def operation(self):
        """As the door names it."""
        return Operation("a.Service/Predict", {"rpc.system.name": "grpc"})


class Traced:
    """Metrics with spans that end in memory."""

    def __init__(self, sampler=None):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.maker = SpanMaker(self.provider)
        self.metrics = Metrics("vm")
        self.metrics.tracing = self.maker
        self.meter = self.metrics.meter("m", "1.0")
        self.metrics.show(self.meter)

    def predict(self, request_id, trace=None, code=200, is_answered=True, protocol="rest", **marks):
        started_s = time.monotonic() - 1.0
        request = begun(self.metrics, request_id, started_s, trace, protocol)
        request.meter = self.meter
        if is_answered:
            answered(request)
        for name, value in marks.items():
            setattr(
                request, name, started_s + value if name in ("read_s", "enqueued_s", "dequeued_s") else value
            )
        self.metrics.prediction_ends(request, code)
        return request

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}


def ran(traced, requests, meter=None):
    traced.maker.batch_finished(meter or traced.meter, 0.5, 0.4, requests, True)


@pytest.fixture
def traced():
    made = Traced()
    yield made
    made.provider.shutdown()


def test_a_prediction_is_a_span_with_its_stages_below(traced):
    traced.predict("r-1")
    spans = traced.spans()
    request = spans[REST]
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    assert dict(request.attributes) == {
        "request.id": "r-1",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "model.name": "m",
        "model.version": "1.0",
    }
    stages = [span for span in traced.exporter.get_finished_spans() if span.name in STAGES]
    assert [span.name for span in stages] == [stage for stage in STAGES if stage != "handler"]
    assert {span.parent.span_id for span in stages} == {request.context.span_id}
    whole_ns = request.end_time - request.start_time
    assert whole_ns == pytest.approx(1e9, rel=0.2)
    assert sum(span.end_time - span.start_time for span in stages) == pytest.approx(whole_ns, rel=0.01)
    assert abs(stages[0].start_time - request.start_time) < 1e7


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_clock_that_is_put_right_meanwhile_changes_no_duration(traced, monkeypatch, step_s):
    started_s = time.monotonic() - 1.0
    request = answered(begun(traced.metrics, "r-1", started_s))
    request.meter = traced.meter
    put_right_ns = time.time_ns() + step_s * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: put_right_ns)
    traced.metrics.prediction_ends(request, 200)
    request = traced.spans()[REST]
    assert request.end_time - request.start_time == pytest.approx(1e9, rel=0.2)
    stages = [span for span in traced.exporter.get_finished_spans() if span.name in STAGES]
    assert stages[0].start_time == request.start_time
    assert all(request.start_time <= span.start_time <= span.end_time <= request.end_time for span in stages)


def test_it_belongs_to_the_trace_of_its_caller(traced):
    request = traced.predict("r-1", CALLER)
    span = traced.spans()[REST]
    assert f"{span.context.trace_id:032x}" == CALLER.trace_id
    assert f"{span.parent.span_id:016x}" == CALLER.parent_id
    assert span.context.trace_state.to_header() == "vendor=1"
    assert request.trace.trace_id == CALLER.trace_id


@pytest.mark.parametrize(
    "state", ["no member", ",".join(f"k{n}=v" for n in range(33))], ids=["malformed", "too many"]
)
def test_a_tracestate_that_is_dropped_writes_nothing_to_the_log(traced, caplog, state):
    traced.predict("r-1", CALLER._replace(state=state))
    span = traced.spans()[REST]
    assert f"{span.parent.span_id:016x}" == CALLER.parent_id
    assert span.context.trace_state.to_header() == ""
    assert caplog.text == ""


def test_without_a_caller_log_lines_and_exemplars_have_the_trace_that_was_begun(traced):
    request = traced.predict("r-1")
    trace_id = f"{traced.spans()[REST].context.trace_id:032x}"
    assert request.trace.trace_id == trace_id
    assert f'# {{trace_id="{trace_id}"}}' in traced.metrics.expose().text(openmetrics=True)


@pytest.mark.parametrize(
    ("code", "protocol", "status"),
    [
        (503, "rest", StatusCode.ERROR),
        (404, "rest", StatusCode.UNSET),
        ("UNAVAILABLE", "grpc", StatusCode.ERROR),
        ("CANCELLED", "grpc", StatusCode.UNSET),
        ("OK", "grpc", StatusCode.UNSET),
    ],
)
def test_what_fails_is_an_error(traced, code, protocol, status):
    traced.predict("r-1", code=code, is_answered=False, protocol=protocol)
    span = traced.spans()[REST if protocol == "rest" else "a.Service/Predict"]
    assert span.status.status_code is status
    key = "http.response.status_code" if protocol == "rest" else "rpc.response.status_code"
    assert span.attributes[key] == code
    assert span.attributes.get("error.type") == (str(code) if status is StatusCode.ERROR else None)


@pytest.mark.parametrize(("code", "is_failure"), [(500, True), (400, False)])
def test_a_span_says_which_error_its_client_was_told_and_why(traced, code, is_failure):
    error = HandlerFailed("Prediction failed", 500, "ValueError: too long")
    request = traced.predict("r-1", code=code, is_answered=False, error=error)
    span = traced.spans()[REST]
    assert span.attributes["error.type"] == "handler_failed"
    (event,) = span.events
    assert event.name == "exception"
    assert dict(event.attributes) == {
        "exception.type": "torchere.serving.errors.HandlerFailed",
        "exception.message": "Prediction failed ValueError: too long",
    }
    assert span.status.description == ("Prediction failed" if is_failure else None)
    assert request.error is None  # its traceback would hold frames


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, {"decode"}),
        ({"read_s": 0.25, "enqueued_s": 0.5}, {"receive", "decode", "queue"}),
        (
            {"read_s": 0.25, "enqueued_s": 0.5, "dequeued_s": 0.75},
            {"receive", "decode", "queue", "handler"},
        ),
        (
            {"enqueued_s": 0.25, "dequeued_s": 0.5, "stages_s": (0.125, 0.25, 0.0, 0.0)},
            {"decode", "queue", "transfer", "preprocess", "inference"},
        ),
    ],
)
def test_a_request_that_fails_has_the_stages_that_it_reached(traced, marks, expected):
    traced.predict("r-1", code=500, is_answered=False, **marks)
    whole = traced.spans()[REST]
    stages = [span for span in traced.exporter.get_finished_spans() if span.name in STAGES]
    assert {span.name for span in stages} == expected
    whole_ns = whole.end_time - whole.start_time
    assert sum(span.end_time - span.start_time for span in stages) == pytest.approx(whole_ns, rel=0.01)


def test_a_batch_that_fails_is_a_span_with_an_error_and_its_links(traced, batch):
    request = traced.predict("r-1", code=500, is_answered=False, enqueued_s=0.1, dequeued_s=0.2)
    batch(traced.meter, succeeded=0, failed=1, requests=[request])
    span = traced.spans()["batch"]
    assert span.status.status_code is StatusCode.ERROR
    assert len(span.links) == 1


def test_a_batch_is_linked_to_its_requests(traced):
    predicted = [traced.predict(f"r-{number}", CALLER) for number in range(3)]
    requests = traced.exporter.get_finished_spans()
    traced.meter.load = lambda: LoadSample(queued=5)
    ran(traced, [*predicted, Request("other", 0.0)])
    batch = traced.spans()["batch"]
    expected = {span.context.span_id for span in requests if span.name == REST}
    assert len(predicted) == len(expected) == 3
    assert {link.context.span_id for link in batch.links} == expected
    assert batch.attributes["batch.size"] == 4
    assert batch.attributes["queue.depth"] == 5
    assert batch.end_time - batch.start_time == pytest.approx(5e8)


def test_a_batch_is_linked_to_requests_that_still_send_their_answers(traced):
    sending, unfinished = (begun(traced.metrics, f"r-{number}", time.monotonic()) for number in range(2))
    for request in (sending, unfinished):
        answered(request).meter = traced.meter
    sending.answered = True
    ran(traced, [sending, unfinished])
    for request in (sending, unfinished):
        traced.metrics.prediction_ends(request, 200)
    ran(traced, [unfinished])
    finished = traced.exporter.get_finished_spans()
    spans = {span.attributes["request.id"]: span.context.span_id for span in finished if span.name == REST}
    linked = [[link.context.span_id for link in span.links] for span in finished if span.name == "batch"]
    assert linked == [[spans["r-0"]], [spans["r-1"]]]  # the batch that completes it
    assert not traced.maker._ended


def test_the_steps_of_a_workflow_have_a_span_each_though_they_share_an_id(traced):
    meters = [traced.metrics.meter(f"flow__{name}", "1.0") for name in ("left", "right")]
    steps = [begun(traced.metrics, "r-1", time.monotonic() - 1.0, CALLER) for _ in meters]
    for step, meter in zip(steps, meters, strict=True):
        answered(step).meter = meter
        traced.metrics.prediction_ends(step, 200)
    for step, meter in zip(steps, meters, strict=True):
        ran(traced, [step], meter)
    finished = traced.exporter.get_finished_spans()
    of_steps = {span.attributes["model.name"]: span for span in finished if span.name == REST}
    batches = {span.attributes["model.name"]: span for span in finished if span.name == "batch"}
    assert set(of_steps) == set(batches) == {"flow__left", "flow__right"}
    for model, batch in batches.items():
        assert [link.context.span_id for link in batch.links] == [of_steps[model].context.span_id]


def test_a_load_is_a_span(traced):
    traced.metrics.executor_loaded(traced.meter, 9000, 1.5)
    load = traced.spans()["load"]
    assert load.end_time - load.start_time == pytest.approx(1.5e9)
    assert load.attributes["executor.id"] == 9000


def test_what_is_not_sampled_makes_no_span_and_no_exemplar():
    traced = Traced(ParentBased(ALWAYS_OFF))
    request = traced.predict("r-1")
    ran(traced, [request])
    assert traced.exporter.get_finished_spans() == ()
    assert not request.trace.sampled
    assert "trace_id=" not in traced.metrics.expose().text(openmetrics=True)
    traced.predict("r-2", CALLER)
    assert REST in traced.spans()  # the caller wants it
    traced.provider.shutdown()


def test_requests_whose_batch_is_never_reported_are_not_kept_for_ever(traced, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_REMEMBERED", 5)
    requests = [traced.predict(f"r-{number}") for number in range(20)]
    ran(traced, requests)
    assert len(traced.spans()["batch"].links) == 5


def test_the_service_is_called_as_the_environment_says(monkeypatch):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    for wanted in ("torchere", "mine"):
        provider = exporting_provider("1.2.3")
        assert provider.resource.attributes["service.name"] == wanted
        assert provider.resource.attributes["service.version"] == "1.2.3"
        provider.shutdown()
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")


def test_spans_reach_a_collector_before_the_server_ends(monkeypatch):
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        spans = open_tracing()
        spans.load(VersionNumbers("m", "1.0"), 9000, 0.5)
        spans.close()
        server.shutdown()
    ((path, request),) = got
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (path, span.name) == ("/v1/traces", "load")


def test_a_collector_that_does_not_answer_holds_the_end_up_for_a_bounded_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
        monkeypatch.setattr(tracing, "CLOSE_S", 0.0)
        spans = open_tracing()
        spans.load(VersionNumbers("m", "1.0"), 9000, 0.5)
        spans.close()
        asked, _ = silent.accept()
        (export,) = [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]
        still_asking = export.is_alive()
        asked.close()
        export.join(20)
    assert still_asking


def test_tracing_without_its_packages_is_refused_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchere.serving.telemetry.tracing", None)
    with pytest.raises(ServingError, match="OpenTelemetry is not installed") as caught:
        open_tracing()
    assert "torchere[otel]" in caught.value.detail


def test_while_tracing_is_off_nothing_of_it_is_imported():

    script = (
        "import sys, torchere.serving.server; print([m for m in sys.modules if 'opentelemetry.sdk' in m])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
