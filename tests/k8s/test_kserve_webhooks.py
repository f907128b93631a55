"""The rules of KServe beyond its CRDs: its webhooks let our objects in and deny broken ones; images' tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Object = dict[str, Any]
Changed = Callable[[Object, str, Any], Object]
RUNTIME, SERVICE, MACHINES = "clusterservingruntime", "inferenceservice", "servingruntime-multinode"
LARGE = "service of several machines"
FRAMEWORKS = {"huggingface", "lightgbm", "onnx", "paddle", "pmml", "pytorch", "sklearn", "tensorflow",
              "triton", "xgboost"}  # fmt: skip
AUTOSCALERS = {"hpa", "external", "keda", "none"}
BASIC = {"cpu", "memory", "storage", "ephemeral-storage"}
GPUS = {"nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu", "habana.ai/gaudi"}
SIZES = ("pipelineParallelSize", "tensorParallelSize")
SIZES_OF_KSERVE = {"PIPELINE_PARALLEL_SIZE", "TENSOR_PARALLEL_SIZE"}  # variables that it sets by itself

# What a stock installation of KServe has for the formats of this runtime (0.15 to 0.21).
STOCK: list[Object] = [
    {"metadata": {"name": "kserve-torchserve"}, "spec": {
        "protocolVersions": ["v1", "v2", "grpc-v2"],
        "supportedModelFormats": [{"name": "pytorch", "version": "1", "autoSelect": True, "priority": 2}]}},
    {"metadata": {"name": "kserve-tritonserver"}, "spec": {
        "protocolVersions": ["v2", "grpc-v2"],
        "supportedModelFormats": [{"name": "onnx", "version": "1", "autoSelect": True, "priority": 1},
                                  {"name": "pytorch", "version": "1"}]}},
    {"metadata": {"name": "kserve-huggingfaceserver"}, "spec": {
        "protocolVersions": ["v2", "v1"],
        "supportedModelFormats": [{"name": "huggingface", "version": "1", "autoSelect": True,
                                   "priority": 1}]}},
]  # fmt: skip


def priority_denials(runtime: Object, existing: list[Object]) -> Iterator[str]:
    """The rules of servingruntime_webhook.go on priorities."""
    chosen = [each for each in runtime["spec"]["supportedModelFormats"] if each.get("autoSelect")]
    by_name: dict[str, set[int]] = {}
    for each in chosen:
        by_name.setdefault(each["name"], set()).add(each["priority"])
    yield from (f"different priorities of {name}" for name, found in by_name.items() if len(found) > 1)
    for other in existing:
        if not set(other["spec"]["protocolVersions"]) & set(runtime["spec"]["protocolVersions"]):
            continue
        for mine in chosen:
            for theirs in other["spec"]["supportedModelFormats"]:
                same = (mine["name"].lower(), mine["version"]) == (theirs["name"].lower(), theirs["version"])
                if same and theirs.get("autoSelect") and theirs.get("priority") == mine["priority"]:
                    yield f"priority of {mine['name']} is that of {other['metadata']['name']}"


def machine_denials(workers: Object, head: Object, *containers: Object) -> Iterator[str]:
    """The rules of both webhooks on `workerSpec`; `containers` are those of the head and of the workers."""
    if len(workers.get("containers", [])) > 1:
        yield "several containers of a worker"
    for each in head.get("env", []):
        if each["name"] in SIZES_OF_KSERVE:
            yield f"{each['name']} is set"
    for container in containers:
        for kind in container.get("resources", {}).values():
            yield from (f"{name} is no known GPU" for name in kind.keys() - BASIC - GPUS)
    yield from (f"{size} is less than 1" for size in SIZES if workers.get(size, 1) < 1)


def runtime_denials(runtime: Object, existing: list[Object]) -> list[str]:
    """Why the webhook of runtimes denies one beside others."""
    found = [*priority_denials(runtime, existing)]
    if (workers := runtime["spec"].get("workerSpec")) is not None:
        (head,) = [each for each in runtime["spec"]["containers"] if each["name"] == "kserve-container"]
        found += machine_denials(workers, head, head, *workers["containers"])
    return found


def service_denials(service: Object) -> Iterator[str]:
    """Why the webhook of services denies one: inference_service_validation.go, without scaling by metrics."""
    predictor, annotations = service["spec"]["predictor"], service["metadata"].get("annotations", {})
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"]):
        yield "name"
    used = predictor.keys() & (FRAMEWORKS | {"model"})
    if len(used) != 1:
        yield f"{len(used)} implementations"
        return
    model = predictor[used.pop()]
    if "name" in model:
        yield "a name of a standard predictor"
    if "storageUri" in model and "storageUris" in predictor:
        yield "storageUri and storageUris"
    if annotations.get("serving.kserve.io/autoscalerClass", "none") not in AUTOSCALERS:
        yield "class of autoscaler"
    least, most = predictor.get("minReplicas", 1), predictor.get("maxReplicas", 0)
    if least < 0 or most < 0 or 0 < most < least:
        yield "replicas"
    if (workers := predictor.get("workerSpec")) is not None:
        yield from machine_denials(workers, model, model, *workers.get("containers", []))
        if not re.match("(pvc|oci)://", model.get("storageUri", "")):
            yield "storage of several machines"
        if annotations.get("serving.kserve.io/autoscalerClass") != "none":
            yield "several machines and an autoscaler"


def test_the_webhooks_let_our_objects_in(kserve_objects: dict[str, Object]) -> None:
    assert {name: runtime_denials(kserve_objects[name], STOCK) for name in (RUNTIME, MACHINES)} == {
        RUNTIME: [],
        MACHINES: [],
    }
    assert {name: [*service_denials(kserve_objects[name])] for name in (SERVICE, LARGE)} == {
        SERVICE: [],
        LARGE: [],
    }


FORMATS = "spec.supportedModelFormats"
DENIED: list[tuple[str, str, Any, str]] = [
    (RUNTIME, f"{FORMATS}.0.priority", 4, "different priorities of pytorch"),
    (RUNTIME, FORMATS, [{"name": "PyTorch", "version": "1", "autoSelect": True, "priority": 2}],
     "priority of PyTorch is that of kserve-torchserve"),
    (RUNTIME, FORMATS, [{"name": "onnx", "version": "1", "autoSelect": True, "priority": 1}],
     "priority of onnx is that of kserve-tritonserver"),
    (MACHINES, "spec.workerSpec.containers", [{"name": "worker-container"}, {"name": "another"}],
     "several containers of a worker"),
    (MACHINES, "spec.containers.0.env", [{"name": "PIPELINE_PARALLEL_SIZE", "value": "2"}],
     "PIPELINE_PARALLEL_SIZE is set"),
    (MACHINES, "spec.containers.0.resources", {"limits": {"example.com/gpu": 1}},
     "example.com/gpu is no known GPU"),
    (MACHINES, "spec.workerSpec.containers.0.resources", {"requests": {"example.com/gpu": 1}},
     "example.com/gpu is no known GPU"),
    (MACHINES, "spec.workerSpec.pipelineParallelSize", 0, "pipelineParallelSize is less than 1"),
    (MACHINES, "spec.workerSpec.tensorParallelSize", 0, "tensorParallelSize is less than 1"),
    (SERVICE, "metadata.name", "1net", "name"),
    (SERVICE, "spec.predictor.pytorch", {}, "2 implementations"),
    (SERVICE, "spec.predictor.model", ..., "0 implementations"),
    (SERVICE, "spec.predictor.model.name", "net", "a name of a standard predictor"),
    (SERVICE, "spec.predictor.storageUris", [{"uri": "pvc://models/a"}], "storageUri and storageUris"),
    (SERVICE, "metadata.annotations", {"serving.kserve.io/autoscalerClass": "vpa"}, "class of autoscaler"),
    (SERVICE, "spec.predictor.minReplicas", 5, "replicas"),
    (SERVICE, "spec.predictor.minReplicas", -1, "replicas"),
    (LARGE, "spec.predictor.model.storageUri", "s3://models/large", "storage of several machines"),
    (LARGE, "metadata.annotations", {}, "several machines and an autoscaler"),
    (LARGE, "spec.predictor.workerSpec.pipelineParallelSize", 0, "pipelineParallelSize is less than 1"),
    (LARGE, "spec.predictor.model.env", [{"name": "TENSOR_PARALLEL_SIZE", "value": "1"}],
     "TENSOR_PARALLEL_SIZE is set"),
]  # fmt: skip


@pytest.mark.parametrize("row", DENIED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_webhooks_deny(
    row: tuple[str, str, Any, str], kserve_objects: dict[str, Object], changed: Changed
) -> None:
    name, path, value, said = row
    broken = changed(kserve_objects[name], path, value)
    found = runtime_denials(broken, STOCK) if name in (RUNTIME, MACHINES) else [*service_denials(broken)]

    assert found == [said]


@pytest.mark.parametrize(("service", "runtime"), [(SERVICE, RUNTIME), (LARGE, MACHINES)])
def test_the_service_fits_the_runtime_that_it_names(
    service: str, runtime: str, kserve_objects: dict[str, Object]
) -> None:
    model = kserve_objects[service]["spec"]["predictor"]["model"]
    served = kserve_objects[runtime]

    assert model["runtime"] == served["metadata"]["name"]
    assert model["modelFormat"]["name"] in {each["name"] for each in served["spec"]["supportedModelFormats"]}
    assert model.get("protocolVersion", "v1") in served["spec"]["protocolVersions"]
    assert re.match(r"(gs|s3|pvc|file|https?|hdfs|webhdfs|oci|hf)://", model["storageUri"])
    assert ("workerSpec" in kserve_objects[service]["spec"]["predictor"]) == ("workerSpec" in served["spec"])


def test_a_service_that_names_no_runtime_gets_this_one(kserve_objects: dict[str, Object]) -> None:
    first, theirs = (each["spec"]["supportedModelFormats"][0] for each in (kserve_objects[RUNTIME], STOCK[0]))
    assert first["priority"] > theirs["priority"]  # the highest priority of its format is chosen
    assert not any(
        each.get("autoSelect") for each in kserve_objects[MACHINES]["spec"]["supportedModelFormats"]
    )


SERVER_TYPES = {"kserve-torchserve": "torchserve", "kserve-tensorflow-serving": "tensorflow",
                "kserve-huggingfaceserver": "huggingfaceserver"}  # fmt: skip


def asked_for(runtime: Object, *, version: str | None = None, gpu: bool = False) -> str:
    """The image of a pod by UpdateImageTag of KServe's utils.go; `version` is `runtimeVersion`."""
    (server,) = [each for each in runtime["spec"]["containers"] if each["name"] == "kserve-container"]
    image: str = server["image"]
    if "@sha256:" in image:
        return image
    untagged = re.sub(r":[\w.\-]*$", "", image)
    if version is not None:
        return f"{untagged}:{version}"
    metadata = runtime["metadata"]
    named = metadata.get("annotations", {}).get("serving.kserve.io/server-type")
    is_torchserve = (named or SERVER_TYPES.get(metadata["name"])) == "torchserve"
    appends = gpu and is_torchserve and image != untagged and not image.endswith("-gpu")
    return f"{image}-gpu" if appends else image


def test_the_image_that_kserve_asks_for_on_a_gpu_is_one_that_the_page_builds(
    kserve_objects: dict[str, Object], changed: Changed, root: Path
) -> None:
    runtime, page = kserve_objects[RUNTIME], (root / "docs/kserve.md").read_text()
    head = (root / "k8s/kserve/clusterservingruntime.yaml").read_text().partition("\napiVersion")[0]
    built = re.findall(r"^docker build .*VARIANT=cuda -t (\S+) \.$", page, re.MULTILINE)
    by_digest = changed(runtime, "spec.containers.0.image", "torchere@sha256:" + "0" * 64)

    assert built == [asked_for(runtime, gpu=True)]
    assert built[0] in head
    assert asked_for(runtime) == runtime["spec"]["containers"][0]["image"]
    assert asked_for(runtime, version="0.8.2") == "torchere:0.8.2"  # so both say to remove it
    assert "`runtimeVersion`" in page and "runtimeVersion" in head
    assert asked_for(by_digest, version="0.8.2", gpu=True) == by_digest["spec"]["containers"][0]["image"]
    machines = kserve_objects[MACHINES]
    assert asked_for(machines, gpu=True) == machines["spec"]["containers"][0]["image"]
