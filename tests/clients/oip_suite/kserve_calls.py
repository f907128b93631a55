"""Calls of KServe's own SDK, made in its own environment: prints what came back as one JSON object.

    python kserve_calls.py HTTP_ADDRESS GRPC_ADDRESS

KServe pins versions that torchere's environment can't have (psutil and protobuf), so this file imports
nothing of the project.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

DATATYPES = json.loads(Path(__file__).with_name("kserve_samples.json").read_text())
NUMPY = {"FP16": "f2", "FP32": "f4", "FP64": "f8", "BOOL": "?"}


def array_of(datatype):
    return np.array(DATATYPES[datatype], NUMPY.get(datatype, datatype.lower()))


def request_of(model, name, array, datatype, binary):
    given = InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return InferRequest(
        model_name=model,
        infer_inputs=[given],
        request_id="mine",
        request_outputs=[RequestedOutput("y", parameters={"binary_data": binary})],
    )


def told(response):
    (output,) = response.outputs
    return {
        "id": response.id,
        "model": response.model_name,
        "datatype": output.datatype,
        "shape": list(output.shape),
        "values": output.as_numpy().tolist(),
    }


async def attempt(call):
    try:
        return await call
    except Exception as error:  # what the SDK raises is what is looked at
        return {"raised": type(error).__name__, "text": str(error)[:500]}


async def main(http, grpc):
    base = f"http://{http}"
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0, timeout=60))
    v1 = InferenceRESTClient(RESTConfig(protocol="v1", retries=0, timeout=60))
    found: dict[str, dict[str, object]] = {
        "rest_binary": {},
        "rest_json": {},
        "grpc_raw": {},
        "grpc_typed": {},
    }
    async with InferenceGRPCClient(grpc, retries=0) as stub:
        for datatype in DATATYPES:
            array = array_of(datatype)
            for binary, way in ((True, "rest_binary"), (False, "rest_json")):
                if binary or datatype != "FP16":  # the SDK sends FP16 as raw bytes only
                    request = request_of(f"identity_{datatype}", "x", array, datatype, binary)
                    answer = await attempt(rest.infer(base, request, model_name=f"identity_{datatype}"))
                    found[way][datatype] = answer if isinstance(answer, dict) else told(answer)
            for raw, way in ((True, "grpc_raw"), (False, "grpc_typed")):
                if raw or datatype != "FP16":
                    request = request_of(f"identity_{datatype}", "x", array, datatype, raw)
                    answer = await attempt(stub.infer(request))
                    found[way][datatype] = answer if isinstance(answer, dict) else told(answer)
        found["ready"] = {
            "rest server": await attempt(rest.is_server_ready(base)),
            "rest live": await attempt(rest.is_server_live(base)),
            "rest model": await attempt(rest.is_model_ready(base, "identity_FP32")),
            "grpc server": await attempt(stub.is_server_ready()),
            "grpc live": await attempt(stub.is_server_live()),
            "grpc model": await attempt(stub.is_model_ready("identity_FP32")),
        }
        missing = request_of("nobody", "x", array_of("FP32"), "FP32", True)
        found["missing"] = {
            "rest": await attempt(rest.infer(base, missing, model_name="nobody")),
            "grpc": await attempt(stub.infer(missing)),
        }
        found["v1"] = {
            "ready": await attempt(v1.is_model_ready(base, "identity_FP32")),
            "missing": await attempt(v1.is_model_ready(base, "nobody")),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
