"""Calls of KServe's SDK to a softmax called `net`; run in the environment of the SDK, prints JSON."""

import asyncio
import json
import sys

import numpy
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


def tensor(binary: bool) -> InferInput:
    """Two ones."""
    made = InferInput("input", [1, 2], "FP32")
    made.set_data_from_numpy(numpy.ones((1, 2), numpy.float32), binary_data=binary)
    return made


async def calls(http: str, grpc: str) -> dict[str, object]:
    """The answers by protocol."""
    url = f"http://{http}"
    first = InferenceRESTClient(RESTConfig(protocol="v1"))
    second = InferenceRESTClient(RESTConfig(protocol="v2"))
    over_grpc = InferenceGRPCClient(grpc)
    found: dict[str, object] = {
        "v1": (await first.infer(url, {"instances": [[1.0, 1.0]]}, model_name="net"))["predictions"]
    }
    for name, binary in (("v2 JSON", False), ("v2 binary", True)):
        answer = await second.infer(url, InferRequest("net", [tensor(binary)]), model_name="net")
        found[name] = answer.outputs[0].as_numpy().tolist()
    answer = await over_grpc.infer(InferRequest("net", [tensor(True)]))
    found["grpc-v2"] = answer.outputs[0].as_numpy().tolist()
    return found


print(json.dumps(asyncio.run(calls(*sys.argv[1:]))))
