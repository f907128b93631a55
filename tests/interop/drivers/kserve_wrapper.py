"""A KServe model server in front of TorchServe, with the requests of the wrapper in TorchServe's images.

That wrapper is no package. It reads the configuration of TorchServe (`CONFIG_PATH`), waits until the models
of `model_snapshot` have a worker that is READY, and passes predictions and explanations on: KServe's protocol
v1 to `/predictions/M`, and that of gRPC to `Predictions` with the request as JSON. Runs in KServe's
environment. Argument: the port for its clients.
"""

import json
import os
import sys
import time
from pathlib import Path

import grpc
import kserve
import requests
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

LOAD_S = 60.0


def read_properties(path: str) -> dict[str, str]:
    texts = Path(path).read_text().splitlines()
    lines = (line.partition("=") for line in texts if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in lines}


class Wrapped(kserve.Model):
    """One model of TorchServe, as a model of KServe."""

    ready: bool

    def __init__(self, name: str, properties: dict[str, str]) -> None:
        super().__init__(name)
        self.inference = properties["inference_address"]
        self.management = properties["management_address"]
        self.grpc = f"127.0.0.1:{properties['grpc_inference_port']}"

    def load(self) -> bool:
        deadline_s = time.monotonic() + LOAD_S
        while not self.ready and time.monotonic() < deadline_s:
            version = requests.get(
                f"{self.management}/models/{self.name}?customized=false", timeout=5
            ).json()[0]
            self.ready = any(worker["status"] == "READY" for worker in version["workers"])
            time.sleep(0.2)
        return self.ready

    async def predict(self, payload, headers=None, response_headers=None):
        if isinstance(payload, kserve.InferRequest):
            return self._over_grpc(payload)
        return self._forward("predictions", payload)

    async def explain(self, payload, headers=None):
        return self._forward("explanations", payload)

    def _forward(self, verb: str, payload: dict) -> dict:
        answer = requests.post(f"{self.inference}/{verb}/{self.name}", json=payload, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def _over_grpc(self, request: kserve.InferRequest) -> kserve.InferResponse:
        inputs = [
            {"name": one.name, "shape": list(one.shape), "datatype": one.datatype, "data": one.data}
            for one in request.inputs
        ]
        body = json.dumps({"id": request.id, "inputs": inputs}).encode()
        ask, answer_of = messages()
        with grpc.insecure_channel(self.grpc) as channel:
            method = channel.unary_unary(
                "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
                request_serializer=ask.SerializeToString,
                response_deserializer=answer_of.FromString,
            )
            found = json.loads(method(ask(model_name=self.name, input={"data": body}), timeout=60).prediction)
        outputs = [
            kserve.InferOutput(one["name"], list(one["shape"]), one["datatype"], one["data"])
            for one in found["outputs"]
        ]
        return kserve.InferResponse(found["id"], found["model_name"], outputs)


def messages():
    """The messages of TorchServe's `Predictions`, by their field numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    ask = file.message_type.add(name="Ask")
    text, many = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, 3
    ask.field.add(name="model_name", number=1, type=text, label=1)
    entry = ask.nested_type.add(name="InputEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=text, label=1)
    entry.field.add(name="value", number=2, type=12, label=1)
    ask.field.add(name="input", number=3, type=11, type_name=".p.Ask.InputEntry", label=many)
    answer = file.message_type.add(name="Answer")
    answer.field.add(name="prediction", number=1, type=12, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName("p.proto")
    return [message_factory.GetMessageClass(found.message_types_by_name[name]) for name in ("Ask", "Answer")]


if __name__ == "__main__":
    settings = read_properties(os.environ["CONFIG_PATH"])
    models = [Wrapped(name, settings) for name in json.loads(settings["model_snapshot"])["models"]]
    for model in models:
        model.load()
    kserve.ModelServer(http_port=int(sys.argv[1]), enable_grpc=False).start(models)
