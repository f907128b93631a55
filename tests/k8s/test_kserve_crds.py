"""KServe's CRDs take our objects, and refuse them once they are broken."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Object = dict[str, Any]
Check = Callable[[list[Object]], list[list[str]]]
HERE = Path(__file__).parent
RUNTIME, SERVICE, MACHINES = "clusterservingruntime", "inferenceservice", "servingruntime-multinode"
MISSING = ...  # in place of a value: the field is taken away


@pytest.fixture(scope="module")
def problems(tool: Callable[[str], str]) -> Check:
    """Returns what KServe's CRDs say is wrong with each object, by the facts of kserve.yaml."""
    python = Path(tool("kubernetes-validate")).parent / "python"
    facts = yaml.safe_load((HERE / "kserve.yaml").read_text())

    def problems(objects: list[Object]) -> list[list[str]]:
        done = subprocess.run(
            [python, HERE / "kserve_schema.py"],
            input=json.dumps({"facts": facts, "objects": objects}),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[list[str]] = json.loads(done.stdout)["problems"]
        return found

    return problems


def test_our_objects_fit_the_crds(kserve_objects: dict[str, Object], problems: Check) -> None:
    found = problems(list(kserve_objects.values()))

    assert dict(zip(kserve_objects, found, strict=True)) == {name: [] for name in kserve_objects}


PORT = {"containerPort": 8081}
# What our documents tell users to add, and what differs from a pod's own rules.
TAKEN: list[tuple[str, str, Any]] = [
    (SERVICE, "spec.predictor.model.ports", [{"containerPort": 8081, "name": "h2c", "protocol": "TCP"}]),
    (SERVICE, "spec.predictor.model.env", [{"name": "TS_SERVICE_ENVELOPE", "value": "kservev2"}]),
    (
        SERVICE,
        "spec.predictor.model.readinessProbe",
        {"httpGet": {"path": "/readyz"}},
    ),  # Knative has the port
    (SERVICE, "spec.predictor.model.ports", [PORT, PORT | {"protocol": "UDP"}]),
    (SERVICE, "spec.predictor.model.resources.limits", {"cpu": 2, "memory": "1.5Gi", "nvidia.com/gpu": "1"}),
    (SERVICE, "spec.predictor.storageUris", [{"uri": "pvc://models/a", "mountPath": "/mnt/models"}]),
    (SERVICE, "metadata.annotations", {"serving.kserve.io/deploymentMode": "Standard"}),
    (RUNTIME, "spec.disabled", True),
    (RUNTIME, "spec.multiModel", False),
    (RUNTIME, "spec.tolerations", [{"key": "nvidia.com/gpu", "operator": "Exists"}]),
    (RUNTIME, "spec.containers.0.resources.limits", {"nvidia.com/gpu": 1}),
]


def test_the_crds_take_what_may_be_added(
    kserve_objects: dict[str, Object], changed: Callable[..., Object], problems: Check
) -> None:
    found = problems([changed(kserve_objects[name], path, value) for name, path, value in TAKEN])

    assert dict(enumerate(found)) == {number: [] for number in range(len(TAKEN))}


ENV, MOUNT = {"name": "TEMP", "value": "/tmp"}, {"name": "scratch", "mountPath": "/tmp"}
REFUSED: list[tuple[str, str, Any, str]] = [
    # Fields that a CRD does not have: an API server drops them in silence, unless asked to be strict.
    (SERVICE, "spec.predictor.model.modelFormats", [], "'modelFormats' was unexpected"),
    (SERVICE, "spec.predictors", {}, "'predictors' was unexpected"),
    (SERVICE, "spec.predictor.ephemeralContainers", [], "'ephemeralContainers' was unexpected"),
    (SERVICE, "spec.predictor.workloadRef", {}, "'workloadRef' was unexpected"),
    (SERVICE, "metadata.label", {}, "'label' was unexpected"),
    (SERVICE, "data", {}, "'data' was unexpected"),
    (RUNTIME, "spec.terminationGracePeriodSeconds", 55, "'terminationGracePeriodSeconds' was unexpected"),
    (RUNTIME, "spec.securityContext", {}, "'securityContext' was unexpected"),
    (RUNTIME, "spec.initContainers", [], "'initContainers' was unexpected"),
    (RUNTIME, "spec.supportedModelFormats.0.autoselect", True, "'autoselect' was unexpected"),
    (RUNTIME, "spec.containers.0.readinessProbe.httpGet.paths", "/", "'paths' was unexpected"),
    (RUNTIME, "spec.volumes.0.emptyDir.size", "1Gi", "'size' was unexpected"),
    (MACHINES, "spec.workerSpec.replicas", 2, "'replicas' was unexpected"),
    (MACHINES, "spec.workerSpec.containers.0.env.0.valuesFrom", {}, "'valuesFrom' was unexpected"),
    # Types.
    (SERVICE, "apiVersion", "serving.kserve.io/v1alpha1", "'serving.kserve.io/v1beta1' was expected"),
    (RUNTIME, "apiVersion", "serving.kserve.io/v1beta1", "'serving.kserve.io/v1alpha1' was expected"),
    (SERVICE, "spec.predictor.minReplicas", "one", "'one' is not of type 'integer'"),
    (SERVICE, "spec.predictor.maxReplicas", 4.5, "4.5 is not of type 'integer'"),
    (SERVICE, "spec.predictor.maxReplicas", 2**31, "greater than the maximum"),
    (SERVICE, "spec.predictor.model.modelFormat", "pytorch", "'pytorch' is not of type 'object'"),
    (SERVICE, "spec.predictor.model.modelFormat.version", 2, "2 is not of type 'string'"),
    (SERVICE, "spec.predictor.model.resources.limits.memory", "4 Gi", "is not valid under any"),
    (SERVICE, "spec.predictor.model.resources.limits.cpu", 0.5, "is not valid under any"),
    (SERVICE, "spec.predictor.terminationGracePeriodSeconds", None, "terminationGracePeriodSeconds: null"),
    (RUNTIME, "spec.containers.0.workingDir", None, "$.spec.containers.0.workingDir: null"),
    (RUNTIME, "spec.supportedModelFormats.0.version", 1, "1 is not of type 'string'"),
    (RUNTIME, "spec.protocolVersions", "v1", "'v1' is not of type 'array'"),
    (RUNTIME, "spec.annotations.prometheus", 8082, "8082 is not of type 'string'"),
    (RUNTIME, "spec.containers.0.env.0.value", 1, "1 is not of type 'string'"),
    (RUNTIME, "spec.volumes.0.emptyDir", [], "[] is not of type 'object'"),
    (MACHINES, "spec.workerSpec.pipelineParallelSize", "2", "'2' is not of type 'integer'"),
    # Required fields.
    (SERVICE, "spec.predictor", MISSING, "'predictor' is a required property"),
    (SERVICE, "spec.predictor.model.modelFormat.name", MISSING, "'name' is a required property"),
    (SERVICE, "spec.predictor.storageUris", [{"mountPath": "/mnt/models"}], "'uri' is a required property"),
    (RUNTIME, "metadata", MISSING, "'metadata' is a required property"),
    (RUNTIME, "spec.containers", MISSING, "'containers' is a required property"),
    (RUNTIME, "spec.containers.0.name", MISSING, "'name' is a required property"),
    (RUNTIME, "spec.containers.0.startupProbe.httpGet.port", MISSING, "'port' is a required property"),
    (RUNTIME, "spec.containers.0.volumeMounts.0.mountPath", MISSING, "'mountPath' is a required property"),
    (RUNTIME, "spec.supportedModelFormats.0.name", MISSING, "'name' is a required property"),
    (MACHINES, "spec.workerSpec.containers", MISSING, "'containers' is a required property"),
    # Enumerations, patterns, bounds.
    (SERVICE, "spec.predictor.scaleMetric", "qps", "'qps' is not one of"),
    (SERVICE, "spec.predictor.scaleMetricType", "Average", "'Average' is not one of"),
    (SERVICE, "spec.predictor.logger", {"mode": "both"}, "'both' is not one of"),
    (SERVICE, "spec.predictor.autoScaling", {"metrics": [{"type": "Pods"}]}, "'Pods' is not one of"),
    (SERVICE, "spec.predictor.name", "Net", "does not match"),
    (SERVICE, "spec.predictor.storageUris", [], "[] should be non-empty"),
    (SERVICE, "spec.predictor.storageUris", [{"uri": "s3://a", "mountPath": "models"}], "does not match"),
    (SERVICE, "spec.predictor.storageUris", [{"uri": "s3://a", "mountPath": "/" * 256}], "is too long"),
    (RUNTIME, "spec.supportedModelFormats.0.priority", 0, "less than the minimum"),
    # Lists that are maps.
    (SERVICE, "spec.predictor.model.ports", [PORT, PORT | {"protocol": "TCP"}], "comes twice"),
    (SERVICE, "spec.predictor.model.env", [ENV, ENV], "{'name': 'TEMP'} comes twice"),
    (RUNTIME, "spec.containers.0.env", [ENV, ENV], "{'name': 'TEMP'} comes twice"),
    (RUNTIME, "spec.containers.0.volumeMounts", [MOUNT, MOUNT], "{'mountPath': '/tmp'} comes twice"),
    (MACHINES, "spec.workerSpec.resourceClaims", [{"name": "a"}, {"name": "a"}], "comes twice"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refusals(
    kserve_objects: dict[str, Object], changed: Callable[..., Object], problems: Check
) -> list[list[str]]:
    """The problems of each row of REFUSED, by one call."""
    return problems([changed(kserve_objects[name], path, value) for name, path, value, _ in REFUSED])


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=lambda row: f"{row}-{REFUSED[row][1]}")
def test_the_crds_refuse(row: int, refusals: list[list[str]]) -> None:
    (problem,) = refusals[row]

    assert REFUSED[row][3] in problem
