"""What a call leaves behind: nothing that only the garbage collector would find."""

import asyncio
import gc

import pytest

from torchere.handlers.tensors_answer import OPEN_INFERENCE, encode_outputs, read_wish
from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.open_inference_descriptors import PUBLIC_NAME
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.types import InferResponse


@pytest.fixture
def uncollected():
    """The collector is off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive():
    return [type(one).__name__ for one in gc.get_objects() if issubclass(type(one), (Call, Stream))]


async def settled():
    """What is left of calls and streams once the client has its answer: a task ends a turn later."""
    for _ in range(50):
        if not alive():
            break
        await asyncio.sleep(0.01)
    return alive()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("method", ["Predictions", "StreamPredictions"])
def test_an_answered_call_is_freed_at_once(serving, method):
    request = PredictionsRequest(model_name="echo", input={"data": b"x"})

    async def main():
        async with serving("inference") as served:
            call = served.call(method, request, timeout=20)
            answers = [await call] if method == "Predictions" else [part async for part in call]
            return [answer.prediction for answer in answers], await settled()

    assert asyncio.run(main()) == ([b"x"], [])


@pytest.mark.usefixtures("uncollected")
def test_an_answered_call_for_tensors_is_freed_at_once(planes, serving):
    async def nothing(asked):
        return InferResponse(encode_outputs({}, [], read_wish(dict(asked.headers)[OPEN_INFERENCE])).body)

    planes.data.behave = nothing
    request = ModelInferRequest(model_name="echo", inputs=[{"name": "x", "shape": [2], "datatype": "INT8"}])
    request.raw_input_contents.append(b"ab")

    async def main():
        async with serving("inference") as served:
            call = served.channel.unary_unary(
                f"/{PUBLIC_NAME}/ModelInfer",
                ModelInferRequest.SerializeToString,
                ModelInferResponse.FromString,
            )
            await call(request, timeout=20)
            return await settled()

    assert asyncio.run(main()) == []
