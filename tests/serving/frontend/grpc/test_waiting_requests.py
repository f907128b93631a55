"""Requests that wait for their model count for the memory budget, however their calls end."""

import asyncio

import grpc
import pytest

from torchere.serving.errors import ExecutorDied
from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.grpc import open_inference
from torchere.serving.frontend.grpc.open_inference_descriptors import PUBLIC_NAME
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import (
    ModelInferRequest,
    ModelStreamInferResponse,
)
from torchere.serving.frontend.http2.frames import DATA, ErrorCode, frame, reset_stream
from torchere.serving.types import InferResponse

SIZE = 100_000


def prediction(size=SIZE):
    return PredictionsRequest(model_name="echo", sequence_id="s", input={"data": bytes(size)})


def tensors():
    inputs = [{"name": "x", "shape": [SIZE], "datatype": "INT8"}]
    return ModelInferRequest(model_name="echo", inputs=inputs, raw_input_contents=[bytes(SIZE)])


@pytest.fixture
def model(planes):
    """A model that answers once `model.go` is set, and then with `model.error`, if that is set."""

    class Model:
        def __init__(self):
            self.go = asyncio.Event()
            self.error = None
            self.asked = 0

    model = Model()

    async def behave(request):
        model.asked += 1
        await model.go.wait()
        if model.error is not None:
            raise model.error
        return InferResponse(b"done")

    planes.data.behave = behave
    return model


async def until(condition):
    async def wait():
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 20)


def begin(served, method, timeout=20, requests=None):
    """Begin a call with one request; it is not half-closed if its method takes many."""
    if method == "ModelStreamInfer":
        path = f"/{PUBLIC_NAME}/{method}"
        infer = served.channel.stream_stream(
            path, ModelInferRequest.SerializeToString, ModelStreamInferResponse.FromString
        )
        return infer(requests or iter([tensors()] * 3), timeout=timeout)
    if method == "StreamPredictions2":
        return served.call(method, iter([prediction()]), timeout=timeout)
    return served.call(method, prediction(), timeout=timeout)


async def one_and_no_end():
    yield ModelInferRequest(model_name="echo")
    await asyncio.Event().wait()


async def ended(call, method):
    try:
        if method == "Predictions":
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        assert call.cancelled()


METHODS = {"Predictions": 1, "StreamPredictions": 1, "StreamPredictions2": 1, "ModelStreamInfer": 3}


@pytest.mark.parametrize("ends", ["answer", "loss of the worker", "cancel", "deadline", "connection"])
@pytest.mark.parametrize("method", METHODS)
def test_requests_count_until_their_call_has_ended(serving, model, method, ends):
    budgets = Budgets(2**30)

    async def main():
        async with serving("inference", budgets=budgets, max_request_bytes=SIZE) as served:
            call = begin(served, method, timeout=0.5 if ends == "deadline" else 20)
            await until(lambda: model.asked == METHODS[method])
            held = budgets.held_bytes
            if ends == "cancel":
                call.cancel()
            elif ends == "connection":
                (connection,) = served.server._listener.connections
                connection._transport.abort()
            elif ends != "deadline":
                model.error = ExecutorDied() if ends.startswith("loss") else None
                model.go.set()
            await ended(call, method)
            await until(lambda: budgets.held_bytes == 0)
            return held

    assert asyncio.run(main()) >= METHODS[method] * SIZE


def test_requests_that_arrive_with_the_cancellation_of_their_call_do_not_count(serving, model):
    async def main():
        budgets = Budgets(2**30)
        async with serving("inference", budgets=budgets, max_request_bytes=SIZE) as served:
            call = begin(served, "ModelStreamInfer", requests=one_and_no_end())
            await until(lambda: model.asked == 1)
            (connection,) = served.server._listener.connections
            ((number, _),) = connection._streams.items()
            message = tensors().SerializeToString()
            data = frame(DATA, 0, number, b"\0" + len(message).to_bytes(4, "big") + message)
            connection._receive(data + data + reset_stream(number, ErrorCode.CANCEL))  # in one read
            call.cancel()
            await ended(call, "ModelStreamInfer")
            for _ in range(100):
                await asyncio.sleep(0)
            return budgets.held_bytes

    assert asyncio.run(main()) == 0


def test_a_request_beyond_the_budget_is_refused_until_others_are_answered(serving, model):
    async def main():
        budgets = Budgets(8 * SIZE)  # a quarter for one connection
        async with serving("inference", budgets=budgets, max_request_bytes=SIZE // 2) as served:
            first = served.call("Predictions", prediction(SIZE // 2), timeout=20)
            others = [served.call("Predictions", prediction(SIZE // 2), timeout=20) for _ in range(2)]
            await until(lambda: model.asked == 3)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await served.call("Predictions", prediction(SIZE // 2), timeout=20)
            model.go.set()
            for call in (first, *others):
                await call
            await served.call("Predictions", prediction(SIZE // 2), timeout=20)
            return refused.value.code(), refused.value.details(), budgets.refused["connection"]

    code, details, refused = asyncio.run(main())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details.startswith("SERVER: Unfinished calls of this connection have more than ")
    assert refused == 1


def test_a_stream_of_long_requests_is_read_no_further_than_its_share(serving, model, monkeypatch):
    monkeypatch.setattr(open_inference, "IN_FLIGHT_BYTES", 2 * SIZE)

    async def main():
        budgets = Budgets(2**30)
        async with serving("inference", budgets=budgets, max_request_bytes=SIZE) as served:
            call = begin(served, "ModelStreamInfer")
            await until(lambda: model.asked == 2)
            for _ in range(100):
                await asyncio.sleep(0)
            asked = model.asked
            model.go.set()
            answers = [answer async for answer in call]
            await until(lambda: budgets.held_bytes == 0)
            return asked, len(answers)

    assert asyncio.run(main()) == (2, 3)


def test_a_stream_beyond_the_budget_ends(serving, model):
    async def main():
        budgets = Budgets(2**30)
        async with serving("inference", budgets=budgets, max_request_bytes=SIZE) as served:
            budgets.connection_limit_bytes = 2 * SIZE + SIZE // 2
            call = begin(served, "ModelStreamInfer")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            await until(lambda: budgets.held_bytes == 0)
            return refused.value.code()

    assert asyncio.run(main()) is grpc.StatusCode.RESOURCE_EXHAUSTED
