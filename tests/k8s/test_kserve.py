"""KServe's objects fit its schemas, and its command serves a store laid out for the TorchServe runtime."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
import yaml

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
enable_envvars_config=true
default_workers_per_model=1
load_models=all
"""


@pytest.fixture(scope="module")
def objects(root: Path) -> dict[str, Object]:
    found = [yaml.safe_load(path.read_text()) for path in sorted((root / "k8s/kserve").glob("*.yaml"))]
    return {each["kind"]: each for each in found}


def test_objects_are_valid(
    objects: dict[str, Object], assert_valid: Callable[..., None], tmp_path: Path
) -> None:
    assert set(objects) == {"ClusterServingRuntime", "InferenceService"}
    assert_valid({"kserve": list(objects.values())}, tmp_path)


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
    assert settings.management_address.host == "127.0.0.1"
    assert "ports" not in server  # a port that an InferenceService names would be one too many for Knative


@pytest.fixture
def served(root: Path, objects: dict[str, Object], tmp_path: Path) -> Iterator[str]:
    """The address of a server that runs by the runtime's arguments and variables, on free ports."""
    store = tmp_path / "models/model-store"
    store.mkdir(parents=True)
    (tmp_path / "models/config").mkdir()
    (tmp_path / "models/config/config.properties").write_text(PROPERTIES)
    with zipfile.ZipFile(store / "net.mar", "w") as archive:
        archive.writestr("h.py", HANDLER)
        model = {"modelName": "net", "modelVersion": "1.0", "handler": "h.py"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    container = objects["ClusterServingRuntime"]["spec"]["containers"][0]
    arguments = [each.replace("/mnt/models", str(tmp_path / "models")) for each in container["args"]]
    variables = {
        each["name"]: re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", each["value"]) for each in container["env"]
    } | {"TS_GRPC_INFERENCE_ADDRESS": "127.0.0.1"}
    variables |= {"TS_MANAGEMENT_ADDRESS": "http://127.0.0.1:0", "TS_DRAIN_DELAY_S": "0",
                  "TEMP": str(tmp_path), "TMPDIR": str(tmp_path)}  # fmt: skip
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [root / "deploy/entrypoint.sh", *arguments],
            stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path, env={**os.environ, **variables, "PATH": path},
        )  # fmt: skip
    try:
        yield _address(process, tmp_path / "log")
    finally:
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


def test_the_runtimes_command_answers_kserves_first_protocol(served: str) -> None:
    for content_type in ("application/json", "application/x-www-form-urlencoded"):  # curl -d says the latter
        request = urllib.request.Request(
            f"http://{served}/v1/models/net:predict",
            b'{"instances": [21, 4]}',
            {"content-type": content_type},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.loads(answer.read()) == {"predictions": [42, 8]}
    for path, told in {"": {"models": ["net"]}, "/net": {"name": "net", "ready": True}}.items():
        with urllib.request.urlopen(f"http://{served}/v1/models{path}", timeout=30) as answer:
            assert json.loads(answer.read()) == told
    with urllib.request.urlopen(f"http://{served}/readyz", timeout=30) as answer:
        assert answer.status == 200
