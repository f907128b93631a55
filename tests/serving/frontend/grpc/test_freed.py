"""What a call leaves behind: nothing that only the garbage collector would find."""

import asyncio
import gc
import tracemalloc
import zlib

import grpc
import pytest

from torchere.handlers.tensors.answer import OPEN_INFERENCE, encode_outputs, read_wish
from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.open_inference_descriptors import PUBLIC_NAME
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.frontend.http2.messages import Compressed, MessageFailed
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.types import InferResponse


def found(*kinds):
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


@pytest.fixture
def uncollected():
    """The collector is off, and what tests before left in memory is not among its objects."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def alive():
    return [type(one).__name__ for one in found(Call, Stream)]


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
        return InferResponse(
            encode_outputs(
                {"model_name": "m", "model_version": "1"}, [], read_wish(dict(asked.headers)[OPEN_INFERENCE])
            ).body
        )

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


TOO_LONG = 6_500_000  # the greatest message of the server, and more
BOMBS = {
    "longer than the limit": zlib.compress(bytes(2 * TOO_LONG)),
    "cut off": zlib.compress(bytes(TOO_LONG))[:-100],
    "spoilt at its end": zlib.compress(bytes(TOO_LONG))[:-4] + b"none",
    "short, in the loop": zlib.compress(bytes(900_000))[:-4] + b"none",
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("method", ["Predictions", "StreamPredictions2"])
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_message_that_can_not_be_inflated_is_freed_at_once(serving, planes, monkeypatch, method, bomb):
    plain = PredictionsRequest(model_name="echo", input={"data": bytes(2000)})
    made = Compressed.__init__

    def spoilt(self, message, encoding, limit_bytes):
        made(self, bomb, "deflate", limit_bytes)

    async def main():
        async with serving("inference", max_request_bytes=TOO_LONG) as served:

            async def fail():
                sent = plain if method == "Predictions" else iter([plain])
                call = served.call(method, sent, timeout=20, compression=grpc.Compression.Deflate)
                with pytest.raises(grpc.aio.AioRpcError):
                    await call if method == "Predictions" else [part async for part in call]
                return await settled()

            await fail()  # imports, caches
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                calls = [await fail() for _ in range(5)]
                kept = tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()
            return calls, kept

    monkeypatch.setattr(Compressed, "__init__", spoilt)
    calls, kept = asyncio.run(main())
    assert calls == [[]] * 5
    assert kept < 500_000
    assert found(MessageFailed) == []
