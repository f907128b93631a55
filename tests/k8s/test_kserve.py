"""KServe's objects fit its rules, and their command serves each layout of a folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from torchere.serving.commands.kserve import arguments_of, choose_envelope
from torchere.serving.commands.serve_options import LaunchRefused
from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import configure

Object = dict[str, Any]
HANDLER = """
def handle(data, context):
    return None if data is None else [2 * instance for instance in data]
"""
# As KServe's examples for TorchServe have it: the server's own addresses are for a wrapper in front of it.
PROPERTIES = """
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=0
grpc_management_port=0
enable_metrics_api=true
metrics_format=prometheus
enable_envvars_config=true
default_workers_per_model=1
load_models=all
"""


@pytest.fixture(scope="module")
def objects(root: Path) -> dict[str, Object]:
    found = [yaml.safe_load(path.read_text()) for path in sorted((root / "k8s/kserve").glob("*.yaml"))]
    return {each["kind"]: each for each in found}


def test_the_runtime_passes_the_restricted_standard(objects: dict[str, Object], policy: ModuleType) -> None:
    assert list(policy.pod_violations(objects["ClusterServingRuntime"]["spec"])) == []


def test_the_start_waits_for_the_models_and_liveness_does_not(objects: dict[str, Object]) -> None:
    (server,) = objects["ClusterServingRuntime"]["spec"]["containers"]
    paths = {kind: server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}

    assert paths == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}


def test_the_service_names_the_runtime_and_outlives_its_drain(objects: dict[str, Object]) -> None:
    runtime, predictor = objects["ClusterServingRuntime"], objects["InferenceService"]["spec"]["predictor"]
    delay = {each["name"]: each["value"] for each in runtime["spec"]["containers"][0]["env"]}[
        "TS_DRAIN_DELAY_S"
    ]

    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["terminationGracePeriodSeconds"] > float(delay) + 30  # drain_timeout_s of the server


def test_both_protocols_are_reached_from_outside_and_management_is_not(
    objects: dict[str, Object], tmp_path: Path
) -> None:
    (server,) = objects["ClusterServingRuntime"]["spec"]["containers"]
    (tmp_path / "config.properties").write_text(PROPERTIES)

    settings = configure(
        read_properties(tmp_path / "config.properties"),
        {each["name"]: each["value"] for each in server["env"]},
    ).settings

    assert settings.inference_address.host == "0.0.0.0"
    assert settings.grpc_inference_address and settings.grpc_inference_address.host == "0.0.0.0"
    assert (
        settings.grpc_inference_address.port == 8081
    )  # an InferenceService for KServe's TorchServe names it
    assert settings.management_address.host == "127.0.0.1"
    assert "ports" not in server  # a port that an InferenceService names would be one too many for Knative


@pytest.fixture
def serve(root: Path, objects: dict[str, Object], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a server of `models/` by the runtime's arguments, variables and others; returns its address."""
    container = objects["ClusterServingRuntime"]["spec"]["containers"][0]
    arguments = [each.replace("/mnt/models", str(tmp_path / "models")).replace("{{.Name}}", "net")
                 for each in container["args"]]  # fmt: skip
    variables = {
        each["name"]: re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", each["value"]) for each in container["env"]
    } | {"TS_GRPC_INFERENCE_ADDRESS": "127.0.0.1"}
    variables |= {"TS_MANAGEMENT_ADDRESS": "http://127.0.0.1:0", "TS_DRAIN_DELAY_S": "0",
                  "TS_GRPC_INFERENCE_PORT": "0", "TS_GRPC_MANAGEMENT_PORT": "0",
                  "TEMP": str(tmp_path), "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}  # fmt: skip
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    started: list[subprocess.Popen[bytes]] = []

    def serve(**others: str) -> str:
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [root / "deploy/entrypoint.sh", *arguments],
                stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path,
                env={**os.environ, **variables, **others, "PATH": path},
            )  # fmt: skip
        started.append(process)
        return _address(process, tmp_path / "log")

    yield serve
    for process in started:
        process.terminate()
        process.wait(60)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where inference is served, once the model is ready."""
    limit_s = time.monotonic() + 60
    while "net:1.0 is ready" not in (text := log.read_text()) or "Model server started." not in text:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        if process.returncode is not None or time.monotonic() > limit_s:
            pytest.fail(f"not ready (exit status {process.returncode}):\n{text}")
    found = re.search(r"Inference API: http://([\d.:]+)", text)
    assert found
    return found.group(1)


def lay_out_for_torchserve(folder: Path) -> None:
    """Write a store with one archive, and its configuration."""
    store = folder / "model-store"
    store.mkdir(parents=True)
    (folder / "config").mkdir()
    (folder / "config/config.properties").write_text(PROPERTIES)
    with zipfile.ZipFile(store / "net.mar", "w") as archive:
        archive.writestr("h.py", HANDLER)
        model = {"modelName": "net", "modelVersion": "1.0", "handler": "h.py"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))


def post(address: str, path: str, body: Object, content_type: str = "application/json") -> Any:
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"content-type": content_type}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_a_store_laid_out_for_torchserve_answers_kserves_first_protocol(
    serve: Callable[[], str], tmp_path: Path
) -> None:
    lay_out_for_torchserve(tmp_path / "models")
    served = serve()

    for content_type in ("application/json", "application/x-www-form-urlencoded"):  # curl -d says the latter
        assert post(served, "/v1/models/net:predict", {"instances": [21, 4]}, content_type) == {
            "predictions": [42, 8]
        }
    for path, told in {"": {"models": ["net"]}, "/net": {"name": "net", "ready": True}}.items():
        with urllib.request.urlopen(f"http://{served}/v1/models{path}", timeout=30) as answer:
            assert json.loads(answer.read()) == told
    with urllib.request.urlopen(f"http://{served}/readyz", timeout=30) as answer:
        assert answer.status == 200


def test_a_store_laid_out_for_torchserve_has_metrics_to_scrape(
    serve: Callable[[], str], objects: dict[str, Object], tmp_path: Path
) -> None:
    lay_out_for_torchserve(tmp_path / "models")
    serve()
    (metrics,) = re.findall(r"Metrics API: http://([\d.:]+)", (tmp_path / "log").read_text())
    path = objects["ClusterServingRuntime"]["spec"]["annotations"]["prometheus.kserve.io/path"]

    with urllib.request.urlopen(f"http://{metrics}{path}", timeout=30) as answer:
        assert b"torchere_saturation{" in answer.read()


def test_the_variable_that_the_page_has_for_the_grpc_port_of_torchserve_moves_the_server_there(
    serve: Callable[..., str], root: Path, tmp_path: Path
) -> None:
    page = (root / "docs/kserve.md").read_text()
    (said,) = re.findall(r"`containerPort: 7070`.*?`env: (.*?)`", page, re.DOTALL)
    ((variable, port),) = [(each["name"], each["value"]) for each in yaml.safe_load(said)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    lay_out_for_torchserve(tmp_path / "models")

    serve(**{variable: str(free)})

    assert port == "7070"
    socket.create_connection(("127.0.0.1", free), timeout=30).close()


def test_a_bare_exported_program_answers_both_protocols_under_the_services_name(
    serve: Callable[[], str], tmp_path: Path
) -> None:
    folder = tmp_path / "models/1"  # as Triton's layout has it, with a number for the version
    folder.mkdir(parents=True)
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(torch.nn.Softmax(1), (torch.ones(2, 2),), dynamic_shapes=({0: rows},))
    torch.export.save(program, folder / "model.pt2")
    served = serve()

    assert post(served, "/v1/models/net:predict", {"instances": [[1.0, 1.0]]}) == {
        "predictions": [[0.5, 0.5]]
    }
    with urllib.request.urlopen(f"http://{served}/v2/models/net", timeout=30) as answer:
        (described,) = json.loads(answer.read())["inputs"]
    tensor = {"name": described["name"], "shape": [1, 2], "datatype": "FP32", "data": [1.0, 1.0]}
    (output,) = post(served, "/v2/models/net/infer", {"inputs": [tensor]})["outputs"]
    assert output["data"] == [0.5, 0.5]
    assert list(tmp_path.glob("*.properties")) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["config/config.properties", "model-store/a.mar"],
         ["--old-defaults", "--model-store=M/model-store", "--ts-config=M/config/config.properties"]),
        (["model-store/a.mar"], ["--model-store=M/model-store", "--models=all"]),
        (["a.mar", "b.mar"], ["--model-store=M", "--models=all"]),
        (["model.pt"], ["M/model.pt", "--model-name=net", "--handler=base_handler"]),
        (["model.pt", "example.json"], ["M/model.pt", "--model-name=net", "--example=M/example.json"]),
        (["weights.pth", "model.py", "handler.py", "requirements.txt"],
         ["M/weights.pth", "--model-name=net", "--handler=M/handler.py", "--model-file=M/model.py",
          "--requirements-file=M/requirements.txt"]),
        (["net/1/model.onnx"], ["M/net/1/model.onnx", "--model-name=net"]),
        (["net/1/model.onnx", "lost+found/#1"], ["M/net/1/model.onnx", "--model-name=net"]),
        (["cifar10/config.pbtxt", "cifar10/labels.txt", "cifar10/1/model.pt2"],
         ["M/cifar10/1/model.pt2", "--model-name=net"]),
        (["config.pbtxt", "2/model.onnx", "9/model.onnx", "10/model.onnx"],
         ["M/10/model.onnx", "--model-name=net"]),
        (["model.pt2", "model.pt"], ["M/model.pt2", "--model-name=net"]),
        (["config.json", "model.safetensors", "tokenizer.json"], ["M", "--model-name=net"]),
        ([".cache", "model.safetensors", "model.py"],
         ["M/model.safetensors", "--model-name=net", "--model-file=M/model.py"]),
    ],
)  # fmt: skip
def test_each_layout_of_the_folder_is_served_by_arguments_of_its_own(
    files: list[str], expected: list[str], tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()

    assert [each.replace(str(tmp_path), "M") for each in arguments_of(tmp_path, "net")] == expected


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "holds no model"),
        (["a.onnx", "b.onnx"], r"several models \(a.onnx, b.onnx\)"),
        (["config.pbtxt"], "holds no model"),
        (["a/model.onnx", "b/model.onnx"], "holds no model"),
        (["1/model.onnx", "requirements.txt"], "holds no model"),  # which would be ignored there
    ],
)
def test_a_folder_without_one_model_is_refused(files: list[str], said: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(LaunchRefused, match=said):
        arguments_of(tmp_path, "net")
    with pytest.raises(LaunchRefused, match="not found"):
        arguments_of(tmp_path / "other", "net")


@pytest.mark.parametrize(
    ("environ", "envelope"),
    [
        ({}, "kserve"),
        ({"PROTOCOL_VERSION": "v2"}, "kservev2"),
        ({"PROTOCOL_VERSION": "grpc-v2", "TS_SERVICE_ENVELOPE": "<no value>"}, "kservev2"),
        ({"PROTOCOL_VERSION": "v2", "TS_SERVICE_ENVELOPE": " "}, " "),
    ],
)
def test_the_envelope_goes_by_the_protocol_unless_it_is_named(environ: dict[str, str], envelope: str) -> None:
    choose_envelope(environ)

    assert environ["TS_SERVICE_ENVELOPE"] == envelope
