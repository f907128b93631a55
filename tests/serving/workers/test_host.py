"""What a handler is given, and what becomes of what it raises; the executors have tests of their own."""

import asyncio
import dataclasses
import json
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torchere.handlers.loading.weights import SharedModels
from torchere.handlers.tensors import BYTES, DATATYPES, Datatype, tensor_type
from torchere.handlers.tensors.answer import Wish, wish_header
from torchere.handlers.tensors.enveloped import BytesAs, NoTensors
from torchere.serving.errors import HandlerFailed, InvalidRequest, LoadFailed, NoRoom, OutOfResources
from torchere.serving.logs.worker_lines import WorkerFormatter
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers import host as host_module
from torchere.serving.workers import lanes
from torchere.serving.workers.executor import BatchReport, LoadSpec, Unfinished
from torchere.serving.workers.frames import FrameReader
from torchere.serving.workers.host import HandlerHost
from torchere.serving.workers.messages import Done, Run, data_from_worker, encode_frame, report_from_done
from torchere.serving.workers.process import Lane, WorkerMain
from torchere.serving.workers.rank import drop_part

HEADERS_SEEN = """
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            return [context.get_all_request_header(index) for index in range(len(data))]
"""
REFUSING = """
    from ts.utils.util import PredictionException
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            raise PredictionException("no room", 413)
"""
LONGEST = """
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            context.set_response_header(0, "batch", str(len(data)))
            return [max(row["text"].tolist()) for row in data]
"""
ANSWERING = """
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            return ["fine"] * len(data)
"""
ENVELOPED = """
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            said = data[0]["data"]
            return [said, ":open-inference" in context.get_all_request_header(0)]
"""


@pytest.fixture
def outcome(make_spec: Callable[..., LoadSpec]) -> Callable[[str, InferRequest], Any]:
    """Runs one request through a handler, given by its source."""

    def run(source: str, request: InferRequest) -> Any:
        host = HandlerHost(make_spec(source), None, SharedModels())
        host.load()
        return host.run([request], drop_part).outcomes[0]

    return run


def test_a_handler_finds_the_type_of_each_value_under_its_name(
    outcome: Callable[[str, InferRequest], Any],
) -> None:
    values = (Parameter("picture", b"x", "image/png"), Parameter("text", b"y"))

    answer = outcome(HEADERS_SEEN, InferRequest("id", values, (("X-Own", "1"), ("explain", "False"))))

    assert isinstance(answer, InferResponse)
    assert json.loads(answer.body) == {
        "picture": {"content-type": "image/png"},
        "text": {"content-type": ""},
        "X-Own": "1",
        "explain": "False",
    }


def test_a_header_wins_over_a_value_of_its_name(outcome: Callable[[str, InferRequest], Any]) -> None:
    answer = outcome(HEADERS_SEEN, InferRequest("id", (Parameter("explain", b"x"),), (("explain", "True"),)))

    assert json.loads(answer.body) == {"explain": "True"}


def test_a_value_cannot_pose_as_the_servers_header(outcome: Callable[[str, InferRequest], Any]) -> None:
    answer = outcome(ANSWERING, InferRequest("id", (Parameter(":open-inference", b"x"),)))

    assert answer.body == b"fine"


@pytest.mark.parametrize("beside", [False, True])
def test_behind_an_envelope_tensors_are_json_and_the_answers_are_tensors(
    make_spec: Callable[..., LoadSpec], beside: bool
) -> None:
    spec = dataclasses.replace(make_spec(ENVELOPED), envelope="kservev2")
    host = HandlerHost(spec, None, SharedModels())
    host.load()

    def answer(raw: bytes, datatype: Datatype, bytes_as: BytesAs = "text") -> Any:
        headers = (wish_header(Wish("7", json_bytes_as=bytes_as)),)
        request = InferRequest("id", (Parameter("x", raw, tensor_type(datatype, [1])),), headers)
        if beside:
            report = asyncio.run(host.run_beside(request, lambda index, part: None, lambda: False))
        else:
            report = host.run([request], drop_part)
        return report.outcomes[0]

    said = json.loads(answer(b"\0\0\x80?", DATATYPES["FP32"]).body)
    assert (said["id"], said["model_name"]) == ("7", spec.model_name)
    assert [output["data"] for output in said["outputs"]] == [[1.0], [False]]
    assert json.loads(answer(b"\1\0\0\0\xff", BYTES, "base64").body)["outputs"][0]["data"] == ['"/w=="']
    refused = answer(b"\1\0\0\0\xff", BYTES)
    assert isinstance(refused, InvalidRequest)
    assert refused.message.startswith("inputs[0]: found bytes that are no UTF-8")


@pytest.mark.parametrize("beside", [False, True])
def test_a_request_without_memory_for_its_values_fails_alone(
    make_spec: Callable[..., LoadSpec], monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    def decode(value: bytes, *_: Any) -> Any:
        if value == b"large":
            raise MemoryError
        return value

    monkeypatch.setattr(host_module, "decode_input", decode)
    host = HandlerHost(make_spec(ANSWERING), None, SharedModels())
    host.load()
    requests = [InferRequest(text, (Parameter("body", text.encode()),)) for text in ("small", "large")]
    if beside:
        reports = [host.run_beside(each, lambda index, part: None, lambda: False) for each in requests]
        outcomes = [asyncio.run(report).outcomes[0] for report in reports]
    else:
        outcomes = list(host.run(requests, drop_part).outcomes)
    assert isinstance(outcomes[0], InferResponse)
    assert isinstance(outcomes[1], NoRoom)  # it did not run
    assert not host.end_cause


JUNK = """
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context): return ["junk"]
"""


def test_behind_an_envelope_an_answer_that_is_no_json_of_the_protocol_is_500(
    make_spec: Callable[..., LoadSpec],
) -> None:
    host = HandlerHost(dataclasses.replace(make_spec(JUNK), envelope="body"), None, SharedModels())
    host.load()
    headers = (wish_header(Wish(framed=True, json_bytes_as="base64")),)
    failed = host.run([InferRequest("id", (), headers)], drop_part).outcomes[0]
    assert isinstance(failed, HandlerFailed)
    assert (failed.status, failed.message) == (500, NoTensors.message)


def test_behind_an_envelope_plain_requests_stay_as_they_are(
    make_spec: Callable[..., LoadSpec],
) -> None:
    host = HandlerHost(dataclasses.replace(make_spec(ENVELOPED), envelope="kservev2"), None, SharedModels())
    host.load()
    body = b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": [2], "data": [1, 2]}]}'
    values = (Parameter("body", body, "application/json"),)
    answered = host.run([InferRequest("id", values)], drop_part).outcomes[0]
    assert json.loads(answered.body)["outputs"][0]["data"] == [1, 2]  # type: ignore[union-attr]


def test_the_status_a_handler_chose_for_its_failure_is_kept(
    outcome: Callable[[str, InferRequest], Any],
) -> None:
    failed = outcome(REFUSING, InferRequest("id", (Parameter("body", b"x"),)))

    assert isinstance(failed, HandlerFailed)
    assert (failed.message, failed.status) == ("no room", 413)


SETTING = """
    import numpy as np
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            {}
            return [b"x"]
"""


def test_a_request_whose_tensor_lies_about_its_elements_is_refused_and_its_batch_mates_are_run(
    make_spec: Callable[..., LoadSpec],
) -> None:
    good, wrong = b"\2\0\0\0hi", b"\7\0\0\0hi"
    text = tensor_type(BYTES, [1])
    requests = [InferRequest(str(raw), (Parameter("text", raw, text),)) for raw in (good, wrong, good)]
    host = HandlerHost(make_spec(LONGEST), None, SharedModels())
    host.load()

    first, refused, last = host.run(requests, drop_part).outcomes

    assert (first, last) == (InferResponse(b"hi", (("batch", "2"),)), InferResponse(b"hi"))
    assert isinstance(refused, InvalidRequest)
    assert refused.message == (
        "Input 'text' is wrong: tensor[0]: found a length of 7 with 2 bytes left, "
        "expected a length within the data"
    )


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (
            "context.set_response_status(np.int64(418), ValueError('tea'))",
            InferResponse(b"x", (), 418, "tea"),
        ),
        ("context.set_response_header(0, 'n', 'a\\ud800')", InferResponse(b"x", (("n", "a?"),))),
    ],
)
def test_what_a_handler_sets_becomes_plain_numbers_and_texts(
    outcome: Callable[[str, InferRequest], Any], line: str, answer: InferResponse
) -> None:
    given = outcome(SETTING.format(line), InferRequest("id", ()))

    assert given == answer
    assert (type(given.status), type(given.reason)) == (int, str)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("context.set_response_status('404')", "TypeError: 'str' object"),
        ("context.set_response_status(10**30)", "the handler set the status 1000"),
        ("context.get_response_headers(0)['n'] = 5", "the handler set the response header 'n' to 5"),
        (
            "context.get_response_headers(0).update({str(n): '' for n in range(1001)})",
            "set 1001 response headers",
        ),
        ("context.set_response_header(0, 'n', 'x' * 65_536)", "response headers of 65537 characters"),
        ("raise ValueError('\\ud800')", "ValueError: ?"),
    ],
)
def test_a_handler_that_sets_or_raises_what_cannot_be_sent_has_failed(
    outcome: Callable[[str, InferRequest], Any], line: str, detail: str
) -> None:
    failed = outcome(SETTING.format(line), InferRequest("id", ()))

    assert isinstance(failed, HandlerFailed)
    assert detail in failed.detail


@pytest.mark.parametrize("code", ["None", "'many'", "10**30"])
def test_a_refusal_without_a_status_is_a_500(outcome: Callable[[str, InferRequest], Any], code: str) -> None:
    failed = outcome(REFUSING.replace("413", code), InferRequest("id", ()))

    assert (failed.message, failed.status) == ("no room", 500)


METHODS = ["initialize(self, context)", "warmup_data(self)", "handle(self, data, context)"]


@pytest.mark.parametrize("where", METHODS)
def test_a_handler_that_exits_while_it_loads_or_warms_up_has_failed_to_load(
    make_spec: Callable[..., LoadSpec], where: str
) -> None:
    bodies = [f"def {head}: {'raise SystemExit(3)' if head == where else 'return [{}]'}" for head in METHODS]
    host = HandlerHost(make_spec("class Handler:\n    " + "\n    ".join(bodies)), None, SharedModels())

    with pytest.raises(LoadFailed) as failed:
        host.load()
        host.warm_up()

    assert "SystemExit: 3" in failed.value.detail


MEASURED = """
    class Handler:
        def initialize(self, context):
            self.metrics = context.metrics
            self.metrics.add_counter("loaded", 1)
        def warmup_data(self): return [{}]
        def handle(self, data, context):
            self.metrics.add_counter("asked", 1)
            return ["" for _ in data]
"""


def test_what_a_handler_measures_while_it_loads_comes_with_its_first_batch(
    make_spec: Callable[..., LoadSpec],
) -> None:
    host = HandlerHost(make_spec(MEASURED), None, SharedModels())
    host.load()
    host.warm_up()

    batches = [host.run([InferRequest("id", ())], drop_part).metrics for _ in range(2)]

    assert [[sample.name for sample in samples] for samples in batches] == [["loaded", "asked"], ["asked"]]


BORROWING = """
    class Handler:
        borrows_tensors = True
        def initialize(self, context): pass
        def handle(self, data, context):
            for row in data:
                if row["x"].flags.writeable:
                    row["x"] += 1
            return [str(row["x"].flags.writeable) for row in data]
"""


@pytest.mark.parametrize(
    ("source", "count", "may_change", "changed"),
    [
        pytest.param(BORROWING, 1, "True", True, id="alone it may change what the client sent"),
        pytest.param(BORROWING, 2, "False", False, id="what may be run again it may only read"),
        pytest.param(BORROWING.replace("True", "False"), 1, "True", False, id="others get a copy"),
    ],
)
def test_a_handler_that_says_so_gets_tensors_in_the_memory_of_the_request(
    make_spec: Callable[..., LoadSpec], source: str, count: int, may_change: str, changed: bool
) -> None:
    host = HandlerHost(make_spec(source), None, SharedModels())
    host.load()
    sent = np.zeros(4, np.float32)
    value: Any = sent.view(np.uint8).data
    request = InferRequest("id", (Parameter("x", value, tensor_type(DATATYPES["FP32"], (4,))),))

    report = host.run([request] * count, drop_part)

    assert [o.body.decode() for o in report.outcomes if isinstance(o, InferResponse)] == [may_change] * count
    assert sent.any() == changed


FAILING = """
    import weakref
    from ts.utils.util import PredictionException
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            tensors = set()
            self.batch = weakref.ref(tensors)
            raise {}
"""


class Lost:
    """A host whose GPU is lost with the first batch."""

    end_cause = ""

    def run(self, requests: list[InferRequest], *of_the_run: object) -> BatchReport:
        self.end_cause = "it lost its GPU"
        return BatchReport([OutOfResources("Out of resources")] * len(requests))


@pytest.mark.parametrize("shares_weights", [True, False])
def test_a_worker_without_its_gpu_answers_and_ends(
    make_spec: Callable[..., LoadSpec], *, shares_weights: bool
) -> None:
    data, lane_sockets, control = socket.socketpair(), socket.socketpair(), socket.socketpair()
    descriptor = lanes.create(1)
    with data[0], data[1], control[0], control[1], lane_sockets[0], lane_sockets[1]:
        worker = WorkerMain(lane_sockets[1], control[1], descriptor, WorkerFormatter())
        worker.page = lanes.LanePage(descriptor, 1)
        os.close(descriptor)
        worker.spec = make_spec(shares_weights=shares_weights)
        lane = Lane(0, data[1], Lost(), worker)  # type: ignore[arg-type]
        worker._lanes.append(lane)
        data[0].sendall(encode_frame(Run(1, 0, (InferRequest("a", ()),))) * 2)
        if shares_weights:
            worker.serve_lane(lane)
            assert control[1].recv(1) == b""  # which ends the main thread
        else:
            worker._serve_alone()
        frame = FrameReader(data[0]).next()
        assert frame is not None
        done = data_from_worker.decode(frame)
        data[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            data[0].recv(1)

    assert isinstance(done, Done)
    assert done.end_cause == "it lost its GPU"
    assert isinstance(report_from_done(done, 1).outcomes[0], OutOfResources)


@pytest.mark.parametrize(
    ("error", "outcome", "frees"),
    [
        pytest.param("RuntimeError('CUDA out of memory. Tried')", OutOfResources, True, id="memory"),
        pytest.param("RuntimeError('cuDNN error: CUDNN_STATUS')", HandlerFailed, False, id="another library"),
        pytest.param("PredictionException('CUDA error: assert', 500)", HandlerFailed, False, id="a refusal"),
    ],
)
@pytest.mark.parametrize("usable", [True, False])
def test_after_any_failure_the_gpu_of_the_executor_is_asked_when_the_exception_has_let_go_of_it(
    make_spec: Callable[..., LoadSpec],
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: str,
    outcome: type,
    frees: bool,
    usable: bool,
) -> None:
    asked = []

    def gpu_is_usable(gpu_id: int | None, free_memory: bool) -> bool:
        asked.append((gpu_id, free_memory, handler.batch()))
        return usable

    monkeypatch.setattr(host_module, "own_stream", lambda _: None)
    monkeypatch.setattr(host_module, "gpu_is_usable", gpu_is_usable)
    host = HandlerHost(make_spec(FAILING.format(error)), 5, SharedModels())
    host.load()
    handler: Any = host._entry_point.instance

    report = host.run([InferRequest("id", ())], drop_part)

    assert isinstance(report.outcomes[0], outcome)
    assert asked == [(5, frees, None)]
    assert host.end_cause == ("" if usable else "it lost its GPU")


@pytest.mark.parametrize(("level", "lines"), [(logging.ERROR, 1), (logging.CRITICAL, 0)])
def test_a_failure_is_logged_unless_the_level_says_otherwise(
    outcome: Callable[[str, InferRequest], Any], caplog: pytest.LogCaptureFixture, level: int, lines: int
) -> None:
    with caplog.at_level(level, host_module.__name__):
        outcome(FAILING.format("ValueError('wrong')"), InferRequest("id", ()))
    assert len([record for record in caplog.records if "failed on" in record.message]) == lines


def test_a_batch_that_was_answered_does_not_ask_whether_the_gpu_is_usable(
    make_spec: Callable[..., LoadSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "gpu_is_usable", lambda *_: False)
    host = HandlerHost(make_spec(HEADERS_SEEN), None, SharedModels())
    host.load()
    host.run([InferRequest("id", ())], drop_part)
    assert not host.end_cause


def test_an_answer_that_cannot_be_sent_fails_its_request_alone(make_spec: Any) -> None:
    source = """
        class Handler:
            def initialize(self, context): pass
            def handle(self, data, context):
                context.stopping_criteria = [lambda answer: False] * 3
                return ["one ", "half of a pair: \\ud83d", "two "]
    """
    host = HandlerHost(make_spec(source), None, SharedModels())
    host.load()
    requests = [InferRequest(str(number), (Parameter("body", b"x"),)) for number in range(3)]
    first, failed, last = host.run(requests, drop_part).outcomes
    assert (first, last) == tuple(Unfinished(InferResponse(body)) for body in (b"one ", b"two "))
    assert isinstance(failed, HandlerFailed)
    assert failed.message == "Unsupported model output data type."


CRITERIA_SET_ONCE = """
    class Handler:
        def initialize(self, context):
            context.stopping_criteria = [lambda answer: answer == "last"] * 2
        def handle(self, data, context):
            return [row["body"].decode() for row in data]
"""


def test_criteria_of_initialize_are_for_each_batch_by_the_index_of_its_requests(
    make_spec: Callable[..., LoadSpec], caplog: pytest.LogCaptureFixture
) -> None:
    host = HandlerHost(
        dataclasses.replace(make_spec(CRITERIA_SET_ONCE), model_name="once"), None, SharedModels()
    )
    host.load()

    def kinds(*bodies: bytes) -> list[type]:
        requests = [InferRequest("id", (Parameter("body", body),)) for body in bodies]
        return [type(outcome) for outcome in host.run(requests, drop_part).outcomes]

    assert kinds(b"first", b"last") == [Unfinished, InferResponse]
    assert kinds(b"first") == [Unfinished]
    assert not caplog.records
    for _ in range(2):
        assert kinds(b"last", b"first", b"first") == [InferResponse, Unfinished, InferResponse]
    (warning,) = caplog.records
    assert "model once: context.stopping_criteria has fewer criteria" in warning.message
