"""KServe's own SDK, REST and gRPC."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from oip_suite import kserve_environment
from oip_suite.target import Target

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
