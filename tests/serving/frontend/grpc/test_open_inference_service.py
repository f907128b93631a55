"""The Open Inference Protocol's service over a data plane that echoes tensors."""

import asyncio
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from torchere.archiver.signature import Limit, Signature, TensorSpec
from torchere.handlers.tensors import DATATYPES, Output, parse_tensor_type
from torchere.handlers.tensors.answer import FRAME, IN_JSON, OPEN_INFERENCE, encode_outputs, read_wish
from torchere.handlers.tensors.codec import tensor_from_bytes
from torchere.serving.errors import DeadlineExceeded, HandlerFailed, QueueFull, VersionFailed
from torchere.serving.frontend import budgets as budget_module
from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.dataplane import Readiness
from torchere.serving.frontend.grpc import open_inference_messages
from torchere.serving.frontend.grpc.open_inference_descriptors import PUBLIC_NAME, SERVICE, TORCHSERVE_NAME
from torchere.serving.frontend.grpc.protos import open_inference_pb2 as pb
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import InferResponse, ModelKey, StreamedResponse


def facts(signature=None):
    return ModelFacts(
        key=ModelKey("echo", "1.0"),
        versions=("1.0",),
        handler="echo.py",
        manifest_model={"serializedFile": "model.pt"},
        signature=signature,
        max_batch_size=8,
        numbers=VersionNumbers("echo", "1.0"),
    )


async def echo(request):
    """What an executor makes of a handler that gives back its inputs."""
    wish = read_wish(dict(request.headers)[OPEN_INFERENCE])
    outputs = []
    for parameter in request.parameters:
        datatype, shape = parse_tensor_type(parameter.content_type)
        tensor = tensor_from_bytes(parameter.value, datatype, shape)
        outputs.append((Output(parameter.name, datatype, shape, tensor), True))
    identity = {"model_name": "echo", "model_version": "1.0"}
    return InferResponse(encode_outputs(identity, outputs, wish).body)


@pytest.fixture
def oip(planes, serving):
    """`oip.ask(method, request, **options)`: one call to a fresh server; `oip.streams`: many on a stream."""
    planes.data.behave = echo
    planes.data.known = facts()

    def known(model, version):
        planes.data.check_exists(model, version)
        return planes.data.known

    planes.data.facts = known

    def ask(method, request, *, name=PUBLIC_NAME, settings=None, **options):
        async def main():
            async with serving("inference", **(settings or {})) as served:
                return await stub(served.channel, method, name)(request, timeout=20, **options)

        return asyncio.run(main())

    def streams(requests, **settings):
        async def main():
            async with serving("inference", **settings) as served:
                call = stub(served.channel, "ModelStreamInfer")(iter(requests), timeout=20)
                return [answer async for answer in call]

        return asyncio.run(main())

    def refused(method, request, **options):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            ask(method, request, **options)
        return failed.value.code().name, failed.value.details()

    return SimpleNamespace(ask=ask, streams=streams, refused=refused)


def stub(channel, method, name=PUBLIC_NAME):
    described = SERVICE.methods_by_name[method]
    make = channel.stream_stream if described.server_streaming else channel.unary_unary
    return make(
        f"/{name}/{method}",
        getattr(pb, described.input_type.name).SerializeToString,
        getattr(pb, described.output_type.name).FromString,
    )


def request(datatype="FP32", shape=(2,), *, raw=None, model="echo", **fields):
    made = pb.ModelInferRequest(model_name=model, **fields)
    made.inputs.add(name="x", datatype=datatype, shape=shape)
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


def typed(datatype, field, values, shape=None):
    made = request(datatype, shape or (len(values),))
    getattr(made.inputs[0].contents, field).extend(values)
    return made


RAW = struct.pack("<2f", 1.5, -2.0)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("is_raw", [True, False])
def test_long_typed_tensors_are_translated_in_a_thread_and_long_raw_ones_are_not(
    oip, monkeypatch, method, is_raw
):
    threads = []
    translate = open_inference_messages.tensor_request

    def watched(message):
        threads.append(threading.current_thread())
        return translate(message)

    monkeypatch.setattr(open_inference_messages, "tensor_request", watched)
    values = [1, -2] * 100_000
    made = typed("INT8", "int_contents", values)
    if is_raw:
        made = request("INT8", (len(values),), raw=np.array(values, "i1").tobytes())
    limit = {"max_request_bytes": 2 * 2**20}
    if method == "ModelInfer":
        answer = oip.ask(method, made, settings=limit)
    else:
        answer = oip.streams([made], **limit)[0].infer_response
    found = answer.raw_output_contents[0] if is_raw else answer.outputs[0].contents.int_contents
    assert len(found) == len(values)
    assert [thread is threading.main_thread() for thread in threads] == [is_raw]


def test_a_long_typed_tensor_counts_until_its_thread_is_done_though_the_client_cancels(
    serving, planes, monkeypatch
):
    go_on, came, budgets = threading.Event(), threading.Event(), Budgets()
    translate = open_inference_messages.tensor_request

    def slow(message):
        came.set()
        assert go_on.wait(10)
        return translate(message)

    monkeypatch.setattr(open_inference_messages, "tensor_request", slow)
    made = typed("INT8", "int_contents", [1] * 200_000)

    async def main():
        async with serving("inference", max_request_bytes=2**20, budgets=budgets) as served:
            call = stub(served.channel, "ModelInfer")(made, timeout=20)
            while not came.is_set():
                await asyncio.sleep(0.01)
            call.cancel()
            (connection,) = served.server._listener.connections
            while connection._streams:
                await asyncio.sleep(0.01)
            held = budgets.held_bytes
            go_on.set()
            while budgets.held_bytes:
                await asyncio.sleep(0.01)
            return held

    assert asyncio.run(asyncio.wait_for(main(), 20)) == made.ByteSize()
    assert planes.data.asked == []


def test_raw_tensors_come_back_raw_with_the_id(oip, planes):
    answer = oip.ask("ModelInfer", request(raw=RAW, id="mine"))
    assert (answer.id, answer.model_name, answer.model_version) == ("mine", "echo", "1.0")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("x", "FP32", [2])
    assert list(answer.raw_output_contents) == [RAW]


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [1.5, -2.0]),
        ("FP64", "fp64_contents", [1.5, 1e300]),
        ("BYTES", "bytes_contents", [b"\xff\0", b""]),
    ],
)
def test_typed_tensors_come_back_typed(oip, datatype, field, values):
    answer = oip.ask("ModelInfer", typed(datatype, field, values))
    assert list(getattr(answer.outputs[0].contents, field)) == values
    assert not answer.raw_output_contents


def test_nan_and_infinity_pass(oip):
    answer = oip.ask("ModelInfer", typed("FP32", "fp32_contents", [float("nan"), float("inf")]))
    assert np.array_equal(list(answer.outputs[0].contents.fp32_contents), [np.nan, np.inf], equal_nan=True)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize(
    ("datatype", "field", "bits"),
    [("FP32", "fp32_contents", 0x7F800001), ("FP64", "fp64_contents", 0x7FF0000000000001)],
)
def test_typed_floats_are_the_bytes_of_the_answer(oip, planes, *, method, datatype, field, bits):
    # A signalling NaN is changed where a float of Python is made of it, one element at a time.
    raw = np.array([bits, 0], "<u4" if datatype == "FP32" else "<u8").tobytes() * 5000

    async def behave(asked):
        tensor = tensor_from_bytes(raw, DATATYPES[datatype], (10_000,))
        output = Output("y", DATATYPES[datatype], (10_000,), tensor)
        wish = read_wish(dict(asked.headers)[OPEN_INFERENCE])
        identity = {"model_name": "echo", "model_version": "1.0"}
        return InferResponse(encode_outputs(identity, [(output, True)], wish).body)

    planes.data.behave = behave
    made = typed(datatype, field, [1.0])
    answer = oip.ask(method, made) if method == "ModelInfer" else oip.streams([made])[0].infer_response
    assert len(getattr(answer.outputs[0].contents, field)) == 10_000
    assert answer.outputs[0].contents.SerializeToString().endswith(raw)


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT8"])
def test_a_typed_tensor_without_elements_comes_back(oip, datatype):
    made = request(datatype, (0,))
    made.inputs[0].contents.SetInParent()
    (output,) = oip.ask("ModelInfer", made).outputs
    assert (list(output.shape), output.contents.ByteSize()) == ([0], 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request(raw=b"123"), "inputs[0]: found 3 bytes, expected 8 bytes for FP32 of shape [2]"),
        (request("FP8", raw=RAW), "inputs[0].datatype: found 'FP8'"),
        (request(shape=(-1,), raw=RAW), "inputs[0].shape[0]: found -1"),
        (request(shape=(2**62, 2**62), raw=RAW), "inputs[0].shape: found"),
        (request("FP16"), "inputs[0]: found FP16 without raw_input_contents"),
        (request("FP32"), "inputs[0].contents.fp32_contents: found 0 elements, expected 2"),
        (typed("FP32", "fp64_contents", [1.0]), "inputs[0].contents.fp32_contents: found 0 elements"),
        (
            typed("INT8", "int_contents", [1, 300]),
            "inputs[0].contents.int_contents[1]: found 300, expected INT8",
        ),
        (typed("UINT8", "uint_contents", [256]), "inputs[0].contents.uint_contents[0]: found 256"),
        (pb.ModelInferRequest(model_name="echo", raw_input_contents=[RAW]), "raw_input_contents: found 1"),
        (request(raw=RAW, model=""), "Parameter model_name is required."),
        (
            request(raw=RAW, parameters={"sequence_end": pb.InferParameter(bool_param=True)}),
            "parameters.sequence_id",
        ),
        (request(raw=RAW, parameters={"x": pb.InferParameter()}), "parameters['x']: found no value"),
        (
            request(raw=RAW, parameters={"x": pb.InferParameter(double_param=float("nan"))}),
            "parameters['x']: found nan, expected a finite number",
        ),
    ],
)
def test_what_is_wrong_is_named(oip, wrong, message):
    code, details = oip.refused("ModelInfer", wrong)
    assert code == "INVALID_ARGUMENT"
    assert message in details
    assert "\n" not in details


def test_contents_beside_raw_contents_are_refused(oip):
    both = typed("FP32", "fp32_contents", [1.0])
    both.raw_input_contents.append(b"1234")
    assert "found both" in oip.refused("ModelInfer", both)[1]


def test_an_error_of_a_stream_does_not_send_megabytes_of_names_back(oip):
    long = "m" * 900_000
    (answer,) = oip.streams([pb.ModelInferRequest(model_name=long, id=long)], max_request_bytes=2_000_000)
    assert "Model not found" in answer.error_message or "id" in answer.error_message
    assert answer.ByteSize() < 4096


def test_shared_memory_is_refused_in_words(oip):
    wanted = request(raw=RAW)
    wanted.inputs[0].parameters["shared_memory_region"].string_param = "region"
    wanted.inputs.add(name="y", datatype="FP32", shape=[1])  # the only one with a raw tensor
    refused = oip.refused("ModelInfer", wanted)[1]
    assert refused == "inputs[0]: found shared_memory_region, and there is no shared memory here"
    wanted = request(raw=RAW)
    wanted.outputs.add(name="x").parameters["shared_memory_region"].string_param = "region"
    assert "there is no shared memory here" in oip.refused("ModelInfer", wanted)[1]


def test_a_model_that_is_not_there_has_the_code_of_each_service(oip):
    missing = request(raw=RAW, model="nobody")
    assert oip.refused("ModelInfer", missing) == ("NOT_FOUND", "Model not found: nobody")
    code, details = oip.refused("ModelInfer", missing, name=TORCHSERVE_NAME)
    assert code == "INTERNAL"
    assert details.startswith("Model not found: nobody\norg.pytorch.serve")
    asked = pb.ModelReadyRequest(name="nobody")
    assert oip.refused("ModelReady", asked, name=TORCHSERVE_NAME)[0] == "NOT_FOUND"


def test_a_model_that_is_not_there_yet_is_unavailable_and_refusals_are_counted(oip, planes):
    missing = request(raw=RAW, model="nobody")
    assert oip.refused("ModelInfer", missing)[0] == "NOT_FOUND"
    planes.data.has_started = False
    assert oip.refused("ModelInfer", missing)[0] == "UNAVAILABLE"
    assert len(planes.data.unknown) == 2


def test_torchserves_service_answers_the_same_messages(oip):
    answer = oip.ask("ModelInfer", typed("FP32", "fp32_contents", [1.0]), name=TORCHSERVE_NAME)
    assert list(answer.outputs[0].contents.fp32_contents) == [1.0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full"), "UNAVAILABLE"),
        (DeadlineExceeded("late"), "DEADLINE_EXCEEDED"),
        (HandlerFailed("Prediction failed"), "INTERNAL"),
        (HandlerFailed("bad picture", 400), "INVALID_ARGUMENT"),
    ],
)
def test_what_becomes_of_a_request_has_its_code(oip, planes, error, code):
    async def fail(asked):
        raise error

    planes.data.behave = fail
    assert oip.refused("ModelInfer", request(raw=RAW)) == (code, error.message)


def test_that_a_version_has_failed_is_told_to_clients_that_do_not_know_torchserves_text(oip, planes):
    error = VersionFailed('Model "echo" has no worker', "why", "echo", "1.0")

    async def fail(asked):
        raise error

    planes.data.behave = fail
    assert oip.refused("ModelInfer", request(raw=RAW)) == ("UNAVAILABLE", error.plain)
    told = oip.refused("ModelInfer", request(raw=RAW), name=TORCHSERVE_NAME)
    assert told == ("INTERNAL", 'Model "echo" has no worker\nInternalServerException.()')


def test_torchserves_service_keeps_the_code_of_a_handler_that_fails(oip, planes):
    async def fail(asked):
        raise HandlerFailed("Prediction failed")

    planes.data.behave = fail
    refused = oip.refused("ModelInfer", request(raw=RAW), name=TORCHSERVE_NAME)
    assert refused == ("UNAVAILABLE", "Prediction failed\norg.pytorch.serve.http.InternalServerException")


def test_a_503_of_the_handlers_is_its_own(oip, planes):
    async def refuse(asked):
        return InferResponse(b"Prediction failed", (), 503)

    planes.data.behave = refuse
    assert oip.refused("ModelInfer", request(raw=RAW)) == ("UNAVAILABLE", "Prediction failed")


def test_what_a_handler_refuses_with_is_told_even_where_it_is_no_text(oip, planes):
    async def refuse(asked):
        return InferResponse(b'{"error": "caf\xe9"}', (), 400)

    planes.data.behave = refuse
    refused = oip.refused("ModelInfer", request(raw=RAW))
    assert refused == ("INVALID_ARGUMENT", '{"error": "caf\ufffd"}')


def test_what_is_wrong_with_tensors_is_told_before_the_model_is_looked_for(oip):
    assert oip.refused("ModelInfer", request(raw=b"", model="nobody"))[0] == "INVALID_ARGUMENT"


def test_the_deadline_of_the_call_is_the_requests(oip, planes):
    oip.ask("ModelInfer", request(raw=RAW))
    (_, _, asked) = planes.data.asked[0]
    assert asked.deadline_s < float("inf")


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_trace_and_priority_of_the_metadata_count_for_the_request(planes, oip, serving, method):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    metadata = (("traceparent", trace), ("x-torchere-priority", "3"), ("other", "x"))

    async def main():
        async with serving("inference") as served:
            if method == "ModelInfer":
                await stub(served.channel, method)(request(raw=bytes(8)), timeout=20, metadata=metadata)
            else:
                wanted = iter([request(raw=bytes(8))])
                call = stub(served.channel, method)(wanted, timeout=20, metadata=metadata)
                assert [answer.error_message async for answer in call] == [""]

    asyncio.run(main())
    [(_, _, asked)] = planes.data.asked
    assert asked.priority == 3
    assert ("traceparent", trace) in asked.headers
    assert "other" not in dict(asked.headers)


def test_a_call_that_is_cancelled_withdraws_its_request(oip, planes, serving):
    async def main():
        entered = asyncio.Event()

        async def wait(asked):
            entered.set()
            await asyncio.Event().wait()

        planes.data.behave = wait
        async with serving("inference") as served:
            for method in ("ModelInfer", "ModelStreamInfer"):
                entered.clear()
                given = request(raw=RAW) if method == "ModelInfer" else iter([request(raw=RAW)])
                call = stub(served.channel, method)(given)
                reading = asyncio.ensure_future(call.read() if method == "ModelStreamInfer" else _value(call))
                await asyncio.wait_for(entered.wait(), 20)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
        return planes.data.withdrawn

    assert asyncio.run(main()) == 2


async def _value(call):
    return await call


def test_a_sequence_travels_as_the_contracts_headers(oip, planes):
    said = {
        "sequence_id": pb.InferParameter(int64_param=7),
        "sequence_start": pb.InferParameter(bool_param=True),
    }
    oip.ask("ModelInfer", request(raw=RAW, parameters=said))
    headers = dict(planes.data.asked[0][2].headers)
    assert headers["ts_request_sequence_id"] == "7"
    assert headers["ts_request_sequence_start"] == "true"


def test_a_stream_tells_errors_in_their_place(oip):
    answers = oip.streams([request(raw=RAW, id="1"), request(raw=b"", id="2"), request(raw=RAW, id="3")])
    assert [answer.infer_response.id for answer in answers] == ["1", "2", "3"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, False]
    assert answers[0].infer_response.parameters["triton_final_response"].bool_param


def test_an_answer_that_is_too_long_is_told_in_its_place_and_the_stream_goes_on(oip):
    asked = [request(raw=RAW, id="1"), request(shape=(5000,), raw=bytes(20_000), id="2")]
    asked.append(request(raw=RAW, id="3"))
    answers = oip.streams(asked, max_request_bytes=2**20, max_response_bytes=1000)
    assert [answer.infer_response.id for answer in answers] == ["1", "2", "3"]
    texts = [answer.error_message for answer in answers]
    assert texts[::2] == ["", ""]
    assert "Sent message larger than max" in texts[1]


def test_answers_that_wait_on_a_stream_count_as_answers_that_clients_leave(oip, planes, serving, monkeypatch):
    monkeypatch.setattr(budget_module, "MIN_MESSAGES", 0)
    budgets = Budgets()
    budgets.limit_bytes = 350_000
    given = [request(shape=(25_000,), raw=bytes(100_000), id=f"{number}") for number in range(6)]

    async def main():
        answered, may_end = asyncio.Event(), asyncio.Event()

        async def first_last(asked):
            if len(planes.data.asked) == len(given):
                answered.set()
            if asked is planes.data.asked[0][2]:
                await may_end.wait()
            return await echo(asked)

        planes.data.behave = first_last
        async with serving("inference", budgets=budgets, max_request_bytes=2**20) as served:
            call = stub(served.channel, "ModelStreamInfer")(iter(given), timeout=20)
            await asyncio.wait_for(answered.wait(), 20)
            while budgets.unsent_bytes < 400_000:
                await asyncio.sleep(0.001)
            may_end.set()
            return [(answer.infer_response.id, answer.error_message) async for answer in call]

    answers = asyncio.run(asyncio.wait_for(main(), 30))
    assert [name for name, _ in answers] == ["0", "1", "2", "3", "4", "5"]
    # The fifth of those that wait is one too many. The one that they wait for comes last, and is sent.
    assert [name for name, text in answers if "have not taken" in text] == ["5"]
    assert budgets.unsent_bytes == 0


def test_answers_that_wait_on_a_stream_are_given_back_when_its_client_leaves(oip, planes, serving):
    budgets = Budgets()

    async def main():
        async with serving("inference", budgets=budgets) as served:
            entered = asyncio.Event()

            async def first_never(asked):
                if asked is planes.data.asked[0][2]:
                    await asyncio.Event().wait()
                entered.set()
                return await echo(asked)

            planes.data.behave = first_never
            call = stub(served.channel, "ModelStreamInfer")(iter([request(raw=RAW), request(raw=RAW)]))
            reading = asyncio.ensure_future(call.read())
            await asyncio.wait_for(entered.wait(), 20)
            while not budgets.unsent_bytes:
                await asyncio.sleep(0.001)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            while budgets.unsent_bytes:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_streamed_answer_comes_in_parts_and_an_end_on_request(oip, planes):
    async def count(asked):
        async def chunks():
            for _ in range(2):
                yield (await echo(asked)).body

        return StreamedResponse(InferResponse(b""), chunks())

    planes.data.behave = count
    wants_end = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}
    plain, ended = (oip.streams([request(raw=RAW, id="1", parameters=said)]) for said in ({}, wants_end))
    finals = [one.infer_response.parameters["triton_final_response"].bool_param for one in ended]
    assert (len(plain), finals) == (2, [False, False, True])
    assert (ended[2].infer_response.model_version, len(ended[2].infer_response.outputs)) == ("1.0", 0)
    assert oip.refused("ModelInfer", request(raw=RAW))[0] == "INVALID_ARGUMENT"


def test_metadata_configuration_and_statistics_are_told(oip, planes):
    spec = TensorSpec("x", "FP32", (-1, 4))
    planes.data.known = facts(Signature((replace(spec, limits=(Limit(0, 1, 64),)),), (spec,)))
    told = oip.ask("ModelMetadata", pb.ModelMetadataRequest(name="echo"))
    assert (told.name, list(told.versions), told.inputs[0].datatype) == ("echo", ["1.0"], "FP32")
    assert list(told.outputs[0].shape) == [-1, 4]
    config = oip.ask("ModelConfig", pb.ModelConfigRequest(name="echo")).config
    assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (
        8,
        pb.TYPE_FP32,
        [4],
    )
    for name in ("echo", ""):
        (told,) = oip.ask("ModelStatistics", pb.ModelStatisticsRequest(name=name)).model_stats
        assert (told.name, told.version, told.inference_stats.success.count) == ("echo", "1.0", 0)
    server = oip.ask("ServerMetadata", pb.ServerMetadataRequest())
    assert "binary_tensor_data" in server.extensions
    assert oip.refused("ModelMetadata", pb.ModelMetadataRequest()) == (
        "INVALID_ARGUMENT",
        "Parameter name is required.",
    )


def test_health_is_told(oip):
    assert oip.ask("ServerLive", pb.ServerLiveRequest()).live
    assert oip.ask("ServerReady", pb.ServerReadyRequest()).ready
    assert oip.ask("ModelReady", pb.ModelReadyRequest(name="echo")).ready


def test_no_model_is_ready_while_the_server_drains(oip, planes):
    planes.data.is_ready = Readiness(False, ("the server is shutting down",))
    assert not oip.ask("ModelReady", pb.ModelReadyRequest(name="echo")).ready


def test_the_server_tells_its_health_without_a_key(oip, planes):
    keys = {"keys": planes.keys}
    for name in (PUBLIC_NAME, TORCHSERVE_NAME):
        assert oip.ask("ServerLive", pb.ServerLiveRequest(), name=name, settings=keys).live
        assert oip.ask("ServerReady", pb.ServerReadyRequest(), name=name, settings=keys).ready
        asked = pb.ServerMetadataRequest()
        assert oip.refused("ServerMetadata", asked, name=name, settings=keys)[0] == "PERMISSION_DENIED"


def test_the_repository_needs_the_management_key(oip, planes):
    keys = {"keys": planes.keys}
    index = pb.RepositoryIndexRequest()
    for name in (PUBLIC_NAME, TORCHSERVE_NAME):
        wrong = (("authorization", "Bearer inference"),)
        assert (
            oip.refused("RepositoryIndex", index, name=name, settings=keys, metadata=wrong)[0]
            == "PERMISSION_DENIED"
        )
        right = (("authorization", "Bearer management"),)
        (entry,) = oip.ask("RepositoryIndex", index, name=name, settings=keys, metadata=right).models
        assert (entry.name, entry.version, entry.state, entry.reason) == ("echo", "1.0", "READY", "")
    assert oip.refused("ModelInfer", request(raw=RAW), settings=keys)[0] == "PERMISSION_DENIED"


def test_models_are_loaded_and_unloaded(oip, planes):
    parameters = {"url": pb.ModelRepositoryParameter(string_param="other.mar")}
    oip.ask("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="new", parameters=parameters))
    oip.ask("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="echo"))
    (wish,) = [call[1] for call in planes.control.calls if call[0] == "register"]
    assert (wish.url, wish.name) == ("other.mar", "new")
    assert ("unregister", "echo", "1.0") in planes.control.calls


def test_models_are_loaded_and_unloaded_for_kserves_stubs(oip, planes):
    load = pb.RepositoryModelLoadRequest.FromString(b"\x0a\x03new")
    unload = pb.RepositoryModelUnloadRequest.FromString(b"\x0a\x04echo")
    loaded, unloaded = oip.ask("RepositoryModelLoad", load), oip.ask("RepositoryModelUnload", unload)
    assert loaded.SerializeToString() == b"\x0a\x03new\x10\1"
    assert unloaded.SerializeToString() == b"\x0a\x04echo\x10\1"
    (wish,) = [call[1] for call in planes.control.calls if call[0] == "register"]
    assert (wish.url, wish.name) == ("new.mar", "new")
    assert ("unregister", "echo", "1.0") in planes.control.calls


@pytest.mark.parametrize("verb", ["Load", "Unload"])
def test_a_model_to_load_or_unload_has_a_name(oip, verb):
    asked = getattr(pb, f"RepositoryModel{verb}Request")()
    wanted = ("INVALID_ARGUMENT", "Parameter model_name is required.")
    assert oip.refused(f"RepositoryModel{verb}", asked) == wanted


def test_behind_an_envelope_the_worker_translates_for_each_service(oip, planes):
    head = b'{"id":"7","model_name":"echo","outputs":[]}'
    planes.data.behave = lambda asked: asyncio.sleep(0, InferResponse(FRAME.pack(len(head)) + head))
    keys = {"service_envelope": "kservev2"}
    wishes = []
    for name in (PUBLIC_NAME, TORCHSERVE_NAME):
        assert oip.ask("ModelInfer", request(raw=RAW, id="7"), name=name, settings=keys).id == "7"
        asked = planes.data.asked[-1][2]
        assert [bytes(parameter.value) for parameter in asked.parameters] == [RAW]
        wishes.append(read_wish(dict(asked.headers)[IN_JSON]))
    assert [(wish.id, wish.framed) for wish in wishes] == [("7", True)] * 2
    assert [wish.json_bytes_as for wish in wishes] == ["text", "base64"]
    (answer,) = oip.streams([request(raw=RAW)], service_envelope="kservev2")
    assert answer.infer_response.id == "7"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_tells_the_messages_of_both_names(serving, version):
    reflection = f"grpc.reflection.{version}.ServerReflection"

    async def main():
        async with serving("inference") as served:
            call = served.channel.stream_stream(
                f"/{reflection}/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            wanted = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                *(
                    reflection_pb2.ServerReflectionRequest(file_containing_symbol=n)
                    for n in (PUBLIC_NAME, TORCHSERVE_NAME, reflection)
                ),
            ]
            return [answer async for answer in call(iter(wanted), timeout=20)]

    listed, *files = asyncio.run(main())
    assert {PUBLIC_NAME, TORCHSERVE_NAME, reflection} <= {
        one.name for one in listed.list_services_response.service
    }
    assert all(answer.file_descriptor_response.file_descriptor_proto for answer in files)


def test_the_services_can_be_switched_off(oip):
    off = {"open_inference_protocol": False}
    for name in (PUBLIC_NAME, TORCHSERVE_NAME):
        assert (
            oip.refused("ServerLive", pb.ServerLiveRequest(), name=name, settings=off)[0] == "UNIMPLEMENTED"
        )


def test_every_datatype_but_two_has_a_typed_field():
    from torchere.serving.frontend.grpc.open_inference_messages import _FIELDS

    assert set(DATATYPES) - set(_FIELDS) == {"FP16", "BF16"}
