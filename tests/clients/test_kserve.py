"""KServe's own SDK, REST and gRPC."""

import json
import subprocess
import sys
from collections.abc import Callable
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


def test_the_facts_of_kserves_crds_name_the_fields_of_its_generated_types(
    root: Path, tool: Callable[[str], str]
) -> None:
    facts = yaml.safe_load((root / "tests/k8s/kserve.yaml").read_text())
    checker = Path(tool("kubernetes-validate")).parent / "python"
    request = {"facts": facts, "objects": []}
    ours = answer_of([str(checker), str(root / "tests/k8s/kserve_schema.py")], request)["fields"]
    sdk = [str(kserve_environment.python()), "-W", "ignore", str(CALLS.with_name("kserve_types.py"))]
    theirs = answer_of(sdk, list(ours))
    # The build of the CRD deletes this one of a predictor, to make the CRD smaller.
    theirs["PredictorSpec"].remove("ephemeralContainers")

    known = {name: fields for name, fields in theirs.items() if fields is not None}
    assert {name: ours[name] for name in known} == known
    # A runtime's workers, and the probes of Kubernetes without their required ports, are no types of the SDK.
    assert theirs.keys() - known.keys() == {"RuntimeWorkerSpec", "Probe", "HTTPGetAction", "TCPSocketAction"}


def answer_of(command: list[str], request: Any) -> Any:
    """What a program answers in JSON."""
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
