"""tritonclient's asyncio clients, and tensors in both of KServe's forms by hand."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from oip_suite.models import SAMPLES
from oip_suite.target import Target


@pytest.mark.parametrize("api", ["http", "grpc"])
def test_many_calls_at_once(target: Target, api: str) -> None:
    async def main() -> list[float]:
        module = tritonclient.http.aio if api == "http" else tritonclient.grpc.aio
        async with module.InferenceServerClient(getattr(target, api)) as client:
            arrays = [np.full((1, 4), number, "f4") for number in range(32)]
            calls = [client.infer("identity_FP32", [_input(api, one)]) for one in arrays]
            results = await asyncio.gather(*calls)
            assert await client.is_server_ready()
            assert await client.is_model_ready("identity_FP32")
            return [float(result.as_numpy("y")[0, 0]) for result in results]

    assert asyncio.run(main()) == list(range(32))


def test_a_stream(target: Target) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(10):
            yield {"model_name": "identity_FP32", "inputs": [_input("grpc", np.full((1, 4), number, "f4"))]}

    async def main() -> list[float]:
        async with tritonclient.grpc.aio.InferenceServerClient(target.grpc) as client:
            found = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found.append(float(result.as_numpy("y")[0, 0]))
            return found

    assert asyncio.run(main()) == list(range(10))


@pytest.mark.parametrize("datatype", [name for name in SAMPLES if name not in ("FP16", "BF16", "BYTES")])
def test_typed_contents_are_read(grpc: Any, datatype: str) -> None:
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    sent = SAMPLES[datatype]
    field = {"BOOL": "bool_contents", "FP32": "fp32_contents", "FP64": "fp64_contents"}.get(datatype)
    if field is None:
        sign = "u" if datatype.startswith("U") else ""
        field = f"{sign}int64_contents" if datatype.endswith("64") else f"{sign}int_contents"
    request = service_pb2.ModelInferRequest(model_name=f"identity_{datatype}")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=sent.shape)
    getattr(tensor.contents, field).extend(sent.ravel().tolist())
    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc._channel)
    response = stub.ModelInfer(request, timeout=30)
    (output,) = response.outputs
    if response.raw_output_contents:
        found = np.frombuffer(response.raw_output_contents[0], sent.dtype)
    else:
        found = np.array(getattr(output.contents, field), sent.dtype)
    assert np.array_equal(found.reshape(output.shape), sent)


def _input(api: str, array: Any) -> Any:
    module = tritonclient.http.aio if api == "http" else tritonclient.grpc.aio
    made = module.InferInput("x", list(array.shape), "FP32")
    made.set_data_from_numpy(array)
    return made
