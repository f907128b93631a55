"""What a call leaves behind: nothing that only the garbage collector would find."""

import asyncio
import gc

import pytest

from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.http2.stream import Stream


@pytest.fixture
def uncollected():
    """The collector is off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive():
    return [type(one).__name__ for one in gc.get_objects() if issubclass(type(one), (Call, Stream))]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("method", ["Predictions", "StreamPredictions"])
def test_an_answered_call_is_freed_at_once(serving, method):
    request = PredictionsRequest(model_name="echo", input={"data": b"x"})

    async def main():
        async with serving("inference") as served:
            call = served.call(method, request, timeout=20)
            answers = [await call] if method == "Predictions" else [part async for part in call]
            for _ in range(50):  # its task ends a turn after the client has the answer
                if not alive():
                    break
                await asyncio.sleep(0.01)
            return [answer.prediction for answer in answers], alive()

    assert asyncio.run(main()) == ([b"x"], [])
