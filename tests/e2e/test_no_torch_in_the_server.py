"""A server that can't import torch answers everything: torch belongs to worker processes alone."""

import io
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from no_torch import NoTorch

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse

ISOLATIONS = ("process", "thread", "shared")

ECHO = """
import torch  # of the worker

class Echo:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [dict(row) for row in data]
"""
EXPLAINER = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class Explainer(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([(row.get("data") or row.get("body"))["x"] for row in data])

    def get_insights(self, tensor_data, raw_data, target=0):
        return [{"importances": tensor_data.flatten().tolist()}]
"""
LINEAR = Signature((TensorSpec("input", "FP32", (-1, 4)),), (TensorSpec("output", "FP32", (-1, 3)),))
PROPERTIES = """
load_models=linear.mar,echo.mar,explainer.mar
disable_token_authorization=true
enable_model_api=true
"""
TOO_LONG_S = 30.0  # on a busy machine, too


def scripted() -> bytes:
    torch.manual_seed(0)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(4, 3).eval()), file)
    return file.getvalue()


def exported(folder: Path) -> bytes:
    """A program that torch interprets with the GIL held: whether it does is for the server to find out."""
    path = folder / "program.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 3).eval(), (torch.ones(1, 4),)), path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> NoTorch:
    return NoTorch(tmp_path_factory.mktemp("forbidden"))


@pytest.fixture(scope="module", params=ISOLATIONS)
def server(
    request: pytest.FixtureRequest,
    pack: Any,
    start_server: Callable[..., Any],
    no_torch: NoTorch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    config = f"isolation: {request.param}\n"
    of_tensors = {"serializedFile": "m.pt", "handler": "tensor", "configFile": "c.yaml"}
    files = {"m.pt": scripted(), "signature.json": LINEAR.to_json(), "c.yaml": config}
    pack("linear", files, **of_tensors)
    pack("echo", {"echo.py": ECHO, "c.yaml": config}, handler="echo.py", configFile="c.yaml")
    of_explainer = {"serializedFile": "m.pt", "handler": "explainer.py", "configFile": "c.yaml"}
    pack("explainer", {"explainer.py": EXPLAINER, "m.pt": scripted(), "c.yaml": config}, **of_explainer)
    program = {"m.pt2": exported(tmp_path_factory.mktemp("program")), "signature.json": LINEAR.to_json()}
    pack("program", program, serializedFile="m.pt2", handler="tensor")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in no_torch.environment.items():
            patch.setenv(name, value)
        running = start_server(properties=PROPERTIES)
    for model in ("linear", "echo", "explainer"):
        running.follow(f"{model}:1.0 is ready")
    yield running
    assert running.stop() == 0
    assert not no_torch.attempts, no_torch.attempts


def infer(server: Any, model: str, inputs: list[Any], **members: Any) -> Any:
    body = json.dumps({"inputs": inputs, **members}).encode()
    reply = server.call("POST", f"/v2/models/{model}/versions/1.0/infer", body)
    assert reply.status == 200, reply.body
    return reply.json()["outputs"]


def test_a_server_process_can_not_import_torch(tmp_path: Path) -> None:
    """Else the tests below would say nothing."""
    forbidding = NoTorch(tmp_path)
    command = [sys.executable, "-c", "import torch", "torchere.serving", "serve"]
    environment = {**os.environ, **forbidding.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "the server process imported torch" in done.stderr
    assert "<module>" in forbidding.attempts


def test_predictions_explanations_and_refusals(server: Any) -> None:
    rows = [[1.0, 2.0, 3.0, 4.0]]
    body = json.dumps(rows).encode()
    assert server.call("POST", "/predictions/linear", body, content_type="application/json").status == 200
    bad = server.call("POST", "/predictions/linear", b'[["x"]]', content_type="application/json")
    assert bad.status == 400
    assert server.call("POST", "/predictions/nothing", b"x").status == 404
    row = json.dumps({"x": [1.0, 2.0, 3.0, 4.0]}).encode()
    told = server.call("POST", "/explanations/explainer", row, content_type="application/json")
    assert told.json() == {"importances": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("datatype", ["BF16", "FP16", "FP32", "FP64", "INT8", "UINT64", "BOOL"])
def test_every_datatype_comes_and_goes_as_json_and_as_bytes(server: Any, datatype: str) -> None:
    numbers = [True, False] if datatype == "BOOL" else [1, 2]
    item = {"name": "x", "shape": [2], "datatype": datatype, "data": numbers}
    (in_json,) = infer(server, "echo", [item])
    assert (in_json["datatype"], in_json["data"]) == (datatype, numbers)
    chosen = [{"name": "x", "parameters": {"classification": 1}}]
    (best,) = infer(server, "echo", [item], outputs=chosen)
    assert best["data"][0].endswith(":0" if datatype == "BOOL" else ":1")


def test_bf16_in_binary_form_is_answered_as_json(server: Any) -> None:
    head = {"name": "x", "shape": [2], "datatype": "BF16", "parameters": {"binary_data_size": 4}}
    text = json.dumps({"inputs": [head]}).encode()
    reply = server.call(
        "POST",
        "/v2/models/echo/infer",
        text + b"\xc0\x3f\x00\xc0",
        headers={"Inference-Header-Content-Length": str(len(text))},
    )
    assert reply.json()["outputs"][0]["data"] == [1.5, -2.0]


def test_a_model_of_tensors_and_its_generate_form(server: Any) -> None:
    inputs = [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
    (output,) = infer(server, "linear", inputs)
    assert output["shape"] == [1, 3]
    reply = server.call("POST", "/v2/models/linear/generate", b'{"input": [1, 2, 3, 4]}')
    assert np.allclose(reply.json()["output"], output["data"])


def test_grpc_answers_both_protocols(server: Any) -> None:
    with grpc.insecure_channel(server.grpc["inference"]) as channel:
        of_tensors = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            ModelInferRequest.SerializeToString,
            ModelInferResponse.FromString,
        )
        for datatype, raw in (
            ("BF16", b"\xc0\x3f\x00\xc0"),
            ("FP16", np.array([1.5, -2], np.float16).tobytes()),
        ):
            request = ModelInferRequest(model_name="echo", raw_input_contents=[raw])
            request.inputs.add(name="x", datatype=datatype, shape=[2])
            answer = of_tensors(request, timeout=60)
            assert (answer.outputs[0].datatype, answer.raw_output_contents[0]) == (datatype, raw)
        contents = ModelInferRequest(model_name="linear")
        contents.inputs.add(name="input", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend(
            [1] * 4
        )
        assert of_tensors(contents, timeout=60).outputs[0].shape == [1, 3]
        plain = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
            PredictionsRequest.SerializeToString,
            PredictionResponse.FromString,
        )
        asked = PredictionsRequest(model_name="linear", input={"data": b"[[1, 2, 3, 4]]"})
        assert len(json.loads(plain(asked, timeout=60).prediction)[0]) == 3


def test_what_operators_ask_for(server: Any) -> None:
    assert server.call("GET", "/ping").json() == {"status": "Healthy"}
    for path in (
        "/livez",
        "/readyz",
        "/startupz",
        "/readyz/linear",
        "/v2/models/linear",
        "/v2/models/linear/stats",
    ):
        assert server.call("GET", path).status == 200, path
    assert server.call("OPTIONS", "/").status == 200
    assert server.call("GET", "/models/linear/all?customized=true", api="management").status == 200
    assert server.call("GET", "/metrics", api="metrics").status == 200


def test_versions_come_scale_and_go(server: Any) -> None:
    reply = server.register("program.mar", initial_workers=1, synchronous="true")
    assert reply.status == 200, reply.body
    (told,) = server.call("GET", "/models/program", api="management").json()
    assert told["torchere"]["isolation"] == "process"  # for it keeps the GIL, which the server found out
    row = json.dumps([[1.0, 2.0, 3.0, 4.0]]).encode()
    assert server.call("POST", "/predictions/program", row, content_type="application/json").status == 200
    scaled = server.call("PUT", "/models/program?min_worker=2&synchronous=true", api="management")
    assert scaled.status == 200, scaled.body
    assert server.call("DELETE", "/models/program", api="management").status == 200


def test_probes_answer_soon_after_the_start(
    start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    other = start_server(properties="disable_token_authorization=true\n")
    with urllib.request.urlopen(f"http://{other.rest['inference']}/livez", timeout=60) as answer:
        assert answer.status == 200
    took_s = time.monotonic() - began_s
    with capsys.disabled():
        print(f" [/livez {took_s:.2f} s after the start of the process]", end="")
    assert took_s < TOO_LONG_S
