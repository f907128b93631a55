import asyncio
import time
from unittest.mock import Mock

import grpc
import pytest
from google.protobuf import empty_pb2
from google.rpc import error_details_pb2
from hpack import Decoder

from torchere.serving.errors import ExecutorDied, HandlerFailed, OutOfResources, Unavailable
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.grpc.service import MAX_LOGGED_PATH
from torchere.serving.types import NO_DEADLINE, InferResponse, Parameter, StreamedResponse

INTERNAL_SERVER = "org.pytorch.serve.http.InternalServerException"


def request(model="echo", version="", sequence_id="", **values):
    wanted = PredictionsRequest(model_name=model, model_version=version, input=values)
    if sequence_id:
        wanted.sequence_id = sequence_id
    return wanted


def raising(error):
    async def behave(asked):
        raise error

    return behave


def streaming(*parts, then=None):
    async def chunks():
        for part in parts:
            yield part
        if then is not None:
            raise then

    async def behave(asked):
        return StreamedResponse(InferResponse(b""), chunks())

    return behave


def messages(serving, method, wanted):
    async def main():
        async with serving("inference") as served:
            return [message async for message in served.call(method, wanted, timeout=20)]

    return asyncio.run(main())


def test_ping_answers_the_json_of_rest_and_is_ok_even_when_unhealthy(ask_grpc, planes):
    assert ask_grpc("inference", "Ping", empty_pb2.Empty()).health == '{\n  "status": "Healthy"\n}'
    planes.data.is_healthy = False
    assert ask_grpc("inference", "Ping", empty_pb2.Empty()).health == '{\n  "status": "Unhealthy"\n}'


def test_a_prediction_passes_its_input_as_bytes_without_types(ask_grpc, planes):
    answer = ask_grpc("inference", "Predictions", request(data=b"hello", version="1.0"))
    assert answer.prediction == b"hello"
    model, version, asked = planes.data.asked[0]
    assert (model, version) == ("echo", "1.0")
    assert asked.parameters == (Parameter("data", b"hello", ""),)
    assert asked.headers == ()


def test_no_version_means_the_default_one_and_no_input_no_parameters(ask_grpc, planes):
    ask_grpc("inference", "Predictions", request())
    assert planes.data.asked[0][1] is None
    assert planes.data.asked[0][2].parameters == ()


def test_receiving_ends_when_the_message_is_there(ask_grpc, planes, monkeypatch):
    told = []

    def told_to(admit):
        def admitted(request, model, version):
            told.append((request.started_s, request.read_s))
            return admit(request, model, version)

        return admitted

    monkeypatch.setattr(planes.data, "admit", told_to(planes.data.admit))
    before_s = time.monotonic()
    ask_grpc("inference", "Predictions", request(data=b"x"))
    ((started_s, read_s),) = told
    assert before_s <= started_s < read_s <= time.monotonic()


def test_the_deadline_of_the_call_is_that_of_the_request(serving, planes):
    async def main():
        async with serving("inference") as served:
            await served.call("Predictions", request(data=b"x"), timeout=20)
            await served.call("Predictions", request(data=b"x"))

    asyncio.run(main())
    assert [asked.deadline_s < NO_DEADLINE for _, _, asked in planes.data.asked] == [True, False]


@pytest.mark.parametrize(
    ("wanted", "code", "details"),
    [
        (request(model=""), "INTERNAL", "Parameter model_name is required.\nBadRequestException.()"),
        (
            request(model="nope"),
            "INTERNAL",
            "Model not found: nope\norg.pytorch.serve.archive.model.ModelNotFoundException",
        ),
        (
            request(version="9.0"),
            "INTERNAL",
            "Model version: 9.0 does not exist for model: echo\n"
            "org.pytorch.serve.archive.model.ModelVersionNotFoundException",
        ),
    ],
)
def test_what_is_not_there_is_told_with_code_and_class(refusal, wanted, code, details):
    assert refusal("inference", "Predictions", wanted) == (code, details)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (HandlerFailed(), "UNAVAILABLE", INTERNAL_SERVER),
        (HandlerFailed("no such thing", 513), "INTERNAL", INTERNAL_SERVER),
        (HandlerFailed("x", 404), "NOT_FOUND", INTERNAL_SERVER),
        (HandlerFailed("x", 418), "FAILED_PRECONDITION", INTERNAL_SERVER),
        (OutOfResources("Out of resources"), "INTERNAL", INTERNAL_SERVER),
        (ExecutorDied("exit code 7"), "INTERNAL", INTERNAL_SERVER),
        (Unavailable("no worker"), "INTERNAL", "InternalServerException.()"),
    ],
)
def test_what_became_of_a_prediction_is_told(refusal, planes, error, code, reason):
    planes.data.behave = raising(error)
    assert refusal("inference", "Predictions", request()) == (code, f"{error.message}\n{reason}")


def answering(status, body):
    async def behave(asked):
        return InferResponse(body, status=status, reason="teapot")

    return behave


REFUSED = b'{"code": 400, "type": "BadRequestException", "message": "x: found [1, 3]"}'


def test_a_refusal_of_a_built_in_handler_is_no_success(refusal, planes):
    planes.data.behave = answering(400, REFUSED)
    expected = ("INVALID_ARGUMENT", f"x: found [1, 3]\n{INTERNAL_SERVER}")
    assert refusal("inference", "Predictions", request()) == expected


def test_a_refusal_ends_a_streamed_call(serving, planes):
    planes.data.behave = answering(400, REFUSED)
    with pytest.raises(grpc.RpcError) as refused:
        messages(serving, "StreamPredictions", request())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("status", "body"), [(418, b"short"), (200, REFUSED), (404, REFUSED), (400, b'{"code": 400}'), (400, b"")]
)
def test_other_answers_with_a_status_are_answers_as_with_torchserve(ask_grpc, planes, status, body):
    planes.data.behave = answering(status, body)
    assert ask_grpc("inference", "Predictions", request()).prediction == body


def test_a_bug_is_logged_and_answered_without_its_text(refusal, planes, caplog):
    planes.data.admit = Mock(side_effect=RuntimeError("secret"))
    code, details = refusal("inference", "Predictions", request())
    assert (code, "secret" in details, "secret" in caplog.text) == ("INTERNAL", False, True)


def test_a_stream_is_one_message_a_part(serving, planes):
    planes.data.behave = streaming(b"a", b"b", b"end")
    found = messages(serving, "StreamPredictions", request())
    assert [message.prediction for message in found] == [b"a", b"b", b"end"]


def test_a_stream_of_a_plain_handler_is_one_message(serving):
    found = messages(serving, "StreamPredictions", request(data=b"x"))
    assert [message.prediction for message in found] == [b"x"]


@pytest.mark.parametrize("method", ["StreamPredictions", "StreamPredictions2"])
def test_a_large_answer_to_a_streamed_call_is_one_message(serving, planes, method):
    planes.data.behave = answering(200, memoryview(b"x" * 40_000))  # a worker's are views from 32 KiB on
    asked = request(sequence_id="s")
    found = messages(serving, method, iter([asked]) if method[-1] == "2" else asked)
    assert [message.prediction for message in found] == [b"x" * 40_000]


def test_a_streamed_answer_to_a_plain_call_is_joined(ask_grpc, planes):
    planes.data.behave = streaming(b"a", b"b", b"end")
    assert ask_grpc("inference", "Predictions", request()).prediction == b"abend"


def test_what_is_joined_is_held_no_further_than_it_can_be_sent(refusal, planes):
    taken = []

    async def endless():
        while True:
            taken.append(2**20)
            yield bytes(taken[-1])

    async def behave(asked):
        return StreamedResponse(InferResponse(b""), endless())

    planes.data.behave = behave
    code, details = refusal("inference", "Predictions", request())
    assert code == "RESOURCE_EXHAUSTED"
    assert details.startswith(f"SERVER: Sent message larger than max ({sum(taken)} vs. ")
    assert len(taken) == 7  # of 6,553,500 bytes


def test_a_stream_that_fails_ends_with_the_error(serving, planes):
    planes.data.behave = streaming(b"a", then=HandlerFailed())

    async def main():
        seen = []
        async with serving("inference") as served:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for message in served.call("StreamPredictions", request(), timeout=20):
                    seen.append(message.prediction)
        return seen, failed.value.code()

    assert asyncio.run(main()) == ([b"a"], grpc.StatusCode.UNAVAILABLE)


def test_requests_of_sequences_are_answered_in_order_with_their_ids(serving, planes):
    found = messages(
        serving,
        "StreamPredictions2",
        iter([request(sequence_id="s", data=b"1"), request(sequence_id="t", data=b"2")]),
    )
    assert [(m.prediction, m.sequence_id, m.HasField("status")) for m in found] == [
        (b"1", "s", False),
        (b"2", "t", False),
    ]
    assert planes.data.asked[0][2].headers == (("ts_request_sequence_id", "s"),)


def test_what_goes_wrong_in_a_sequence_is_told_in_band_and_the_stream_goes_on(serving):
    found = messages(
        serving,
        "StreamPredictions2",
        iter(
            [request(data=b"1"), request(model="nope", sequence_id="s"), request(sequence_id="s", data=b"3")]
        ),
    )
    assert [m.status.message for m in found[:2]] == [
        "Parameter sequenceId is required.",
        "Model not found: nope",
    ]
    assert found[0].status.code == grpc.StatusCode.INTERNAL.value[0]
    reason = error_details_pb2.ErrorInfo()
    assert found[0].status.details[0].Unpack(reason)
    assert reason.reason == "BadRequestException.()"
    assert found[2].prediction == b"3"


@pytest.mark.parametrize("streams", [False, True])
def test_a_part_that_is_too_long_ends_its_request_alone(serving, planes, streams):
    async def long_second(asked):
        body = bytes(20_000 if len(planes.data.asked) == 2 else 10)
        return StreamedResponse(InferResponse(b""), parts_of(body)) if streams else InferResponse(body)

    async def parts_of(body):
        for part in (b"a", body, b"c"):
            yield part

    planes.data.behave = long_second

    async def main():
        async with serving("inference", max_response_bytes=1000) as served:
            asked = iter([request(sequence_id=name, data=b"1") for name in "stu"])
            call = served.call("StreamPredictions2", asked, timeout=20)
            return [(m.sequence_id, m.status.code, m.status.message) async for m in call]

    answers = asyncio.run(main())
    refused = [(name, code) for name, code, _ in answers if code]
    assert refused == [("t", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])]
    assert [text for *_, text in answers if text] == ["SERVER: Sent message larger than max (20007 vs. 5096)"]
    assert [name for name, *_ in answers] == [*"ssstt", *"uuu"] if streams else [*"stu"]


def test_the_id_of_a_sequence_has_a_limit_and_comes_back_cut(serving, planes):
    (found,) = messages(serving, "StreamPredictions2", iter([request(sequence_id="s" * 3000, data=b"1")]))
    assert "sequence_id: found a text of 3000 characters" in found.status.message
    assert found.sequence_id == "s" * 1024
    assert planes.data.asked == []


def test_a_client_that_cancels_withdraws_its_request_which_counts_as_cancelled(serving, planes, caplog):
    meter = planes.metrics.meter("echo", "1.0")
    planes.metrics.show(meter)
    admit = planes.data.admit

    def metered(request, model, version):
        request.meter = meter
        return admit(request, model, version)

    planes.data.admit = metered

    async def main():
        waiting, withdrawn = asyncio.Event(), asyncio.Event()

        async def behave(asked):
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                withdrawn.set()

        planes.data.behave = behave
        async with serving("inference") as served:
            call = served.call("Predictions", request())
            await asyncio.wait_for(waiting.wait(), 20)
            call.cancel()
            await asyncio.wait_for(withdrawn.wait(), 20)

    with caplog.at_level("INFO", "ACCESS_LOG"):
        asyncio.run(main())
    assert planes.data.withdrawn == 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert 'InferenceAPIsService/Predictions HTTP/2.0" 1 ' in line
    assert 'protocol="grpc",code="CANCELLED",} 1.0' in planes.metrics.exposition({"torchere_requests_total"})
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_message_that_is_too_large_is_refused_and_counted(refusal, serving, planes):
    wanted = request(data=b"a" * 6000)
    code, _ = refusal("inference", "Predictions", wanted)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        messages(serving, "StreamPredictions", wanted)
    assert (code, failed.value.code().name) == ("RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED")
    counted = planes.metrics.exposition({"torchere_requests_rejected_total"})
    assert 'rejected_total{model="",version="",reason="too_large",} 2.0' in counted


def test_a_message_of_very_many_inputs_is_refused(refusal):
    wanted = PredictionsRequest(model_name="echo", input={str(number): b"" for number in range(20_000)})
    refused = refusal("inference", "Predictions", wanted, {"max_request_bytes": 10**6})
    assert refused == ("RESOURCE_EXHAUSTED", "SERVER: Received message with more than 20000 fields")


def test_each_call_has_a_line_in_the_access_log(ask_grpc, refusal, caplog):
    with caplog.at_level("INFO", "ACCESS_LOG"):
        ask_grpc("inference", "Ping", empty_pb2.Empty())
        refusal("inference", "Predictions", request(model="nope"))
    lines = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    service = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
    assert lines[0].startswith("/127.0.0.1:")
    assert f'"gRPC {service}/Ping HTTP/2.0" 0 ' in lines[0]
    assert f'"gRPC {service}/Predictions HTTP/2.0" 13 ' in lines[1]


@pytest.mark.parametrize(
    ("path", "key", "code"),
    [("nothing", "inference", 12), ("p" * 5000, "inference", 12), ("some.Service/Predict", "wrong", 7)],
    ids=["no method", "long path", "wrong key"],
)
def test_a_call_that_is_refused_has_a_line_in_the_access_log(serving, planes, caplog, *, path, key, code):
    async def main():
        async with serving("inference", keys=planes.keys) as served:
            metadata = [("authorization", f"Bearer {key}")]
            return await served.channel.unary_unary("/" + path)(b"", metadata=metadata, timeout=20).code()

    with caplog.at_level("INFO", "ACCESS_LOG"):
        assert asyncio.run(main()).value[0] == code
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert line.startswith("/127.0.0.1:")
    assert f'"gRPC {path[: MAX_LOGGED_PATH - 1]} HTTP/2.0" {code} ' in line


def test_calls_with_different_deadlines_are_read_once_and_keep_their_own(serving, planes, monkeypatch):
    decoded, decode = [], Decoder.decode

    def counted(*args, **options):
        decoded.append(1)
        return decode(*args, **options)

    monkeypatch.setattr(Decoder, "decode", counted)
    timeouts = [10.0 + 7 * number for number in range(60)]

    async def main():
        async with serving("inference") as served:
            began_s = time.monotonic()
            for timeout in timeouts:
                await served.call("Predictions", request(data=b"x"), timeout=timeout)
            return began_s

    began_s = asyncio.run(main())
    left = [asked.deadline_s - began_s for _, _, asked in planes.data.asked]
    assert left == [pytest.approx(timeout, rel=0.1, abs=5) for timeout in timeouts]
    assert len(decoded) < 10
