"""KServe's own SDK, REST and gRPC."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from oip_suite import kserve_environment
from oip_suite.target import Target, free_ports, running

CALLS = Path(__file__).parent / "oip_suite" / "kserve_calls.py"
SAMPLES = json.loads(CALLS.with_name("kserve_samples.json").read_text())
WAYS = ("rest_binary", "rest_json", "grpc_raw", "grpc_typed")

pytestmark = pytest.mark.timeout(700)  # the first run installs the SDK


@pytest.fixture(scope="module")
def found(target: Target) -> Any:
    command = [str(kserve_environment.python()), "-W", "ignore", str(CALLS), target.http, target.grpc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
def test_tensors_come_back(found: Any, way: str) -> None:
    # The SDK sends FP16 as raw bytes only.
    sent = {
        name: values
        for name, values in SAMPLES.items()
        if name != "FP16" or way in ("rest_binary", "grpc_raw")
    }
    assert set(found[way]) == set(sent)
    for datatype, values in sent.items():
        assert found[way][datatype] == {
            "id": "mine",
            "model": f"identity_{datatype}",
            "datatype": datatype,
            "shape": [1, 4],
            "values": values,
        }


def test_server_and_models_are_ready(found: Any) -> None:
    assert set(found["ready"].values()) == {True}


def test_a_model_that_is_not_there_is_an_error(found: Any) -> None:
    assert found["missing"]["rest"]["raised"] == "HTTPStatusError"
    assert "404" in found["missing"]["rest"]["text"]
    assert found["missing"]["grpc"]["raised"] == "AioRpcError"
    assert "NOT_FOUND" in found["missing"]["grpc"]["text"]


def test_v1_asks_whether_a_model_is_ready(found: Any, target: Target) -> None:
    if target.name == "triton":
        pytest.skip("Triton has no v1")
    assert found["v1"]["ready"] is True
    assert found["v1"]["missing"]["raised"] == "HTTPStatusError"
    assert "404" in found["v1"]["missing"]["text"]


def test_a_bare_model_of_the_storage_folder_answers_every_protocol(target: Target, tmp_path: Path) -> None:
    if target.name == "triton":
        pytest.skip("Triton takes no bare model")
    (tmp_path / "models").mkdir()
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(torch.nn.Softmax(1), (torch.ones(2, 2),), dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "models/model.pt2")
    http, grpc, management, metrics = (f"127.0.0.1:{port}" for port in free_ports(4))
    environment = {
        "TS_INFERENCE_ADDRESS": f"http://{http}",
        "TS_MANAGEMENT_ADDRESS": f"http://{management}",
        "TS_METRICS_ADDRESS": f"http://{metrics}",
        "TS_GRPC_INFERENCE_ADDRESS": "127.0.0.1",
        "TS_GRPC_INFERENCE_PORT": grpc.partition(":")[2],
        "TS_GRPC_MANAGEMENT_PORT": "0",
        "TS_DISABLE_TOKEN_AUTHORIZATION": "true",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "torchere.serving", "kserve", "--model-name=net"]
    command += [f"--model-dir={tmp_path / 'models'}"]

    with running(command, tmp_path, said="net:1.0 is ready", http=http, environment=environment):
        calls = [
            str(kserve_environment.python()),
            "-W",
            "ignore",
            str(CALLS.with_name("kserve_bare_calls.py")),
        ]
        done = subprocess.run([*calls, http, grpc], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {protocol: [[0.5, 0.5]] for protocol in ("v1", "v2 JSON", "v2 binary", "grpc-v2")}


def problems(*objects: Any) -> list[list[str]]:
    """What the SDK's types say is wrong with each object."""
    command = [str(kserve_environment.python()), "-W", "ignore", str(CALLS.with_name("kserve_types.py"))]
    done = subprocess.run(
        command, input=json.dumps(objects), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def spoilt(each: Any, path: str, value: Any = None) -> Any:
    """A copy of an object with another value at a path, or without one."""
    copied = json.loads(json.dumps(each))
    *parents, last = (int(step) if step.isdigit() else step for step in path.split("."))
    at = copied
    for step in parents:
        at = at[step]
    at[last] = value
    if value is None:
        del at[last]
    return copied


def test_kserves_manifests_fit_its_generated_types_and_what_does_not_is_refused(root: Path) -> None:
    runtime, service = (
        yaml.safe_load((root / f"k8s/kserve/{name}.yaml").read_text())
        for name in ("clusterservingruntime", "inferenceservice")
    )
    wrong = {
        "spec.predictor.model.modelFormats is unknown": spoilt(
            service, "spec.predictor.model.modelFormats", {"name": "pytorch"}
        ),
        "spec.predictor.minReplicas is 'one', expected int": spoilt(
            service, "spec.predictor.minReplicas", "one"
        ),
        "Invalid value for `predictor`": spoilt(service, "spec.predictor"),
        "spec.multiModels is unknown": spoilt(runtime, "spec.multiModels", False),
        "supportedModelFormats[0].priority is '3', expected int": spoilt(
            runtime, "spec.supportedModelFormats.0.priority", "3"
        ),
        "Invalid value for `containers`": spoilt(runtime, "spec.containers"),
        "containers[0].readinessProbe.httpGet.paths is unknown": spoilt(
            runtime, "spec.containers.0.readinessProbe.httpGet.paths", "/"
        ),
        "volumes[0].emptyDir is [], expected an object": spoilt(runtime, "spec.volumes.0.emptyDir", []),
    }

    found = problems(runtime, service, *wrong.values())

    assert found[:2] == [[], []]
    for said, told in zip(wrong, found[2:], strict=True):
        assert any(said in text for text in told), told
