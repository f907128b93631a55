"""Every rule of the policy is seen broken, so that none of them holds by accident. Needs no tool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Object = dict[str, Any]

LABELS = {"app": "torchere"}
POD: Object = {
    "automountServiceAccountToken": False,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "volumes": [{"name": "scratch", "emptyDir": {}}],
    "containers": [
        {
            "name": "server",
            "image": "registry.example:5000/torchere:0.1.0",
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            "ports": [{"name": "http", "containerPort": 8080}],
            "startupProbe": {},
            "livenessProbe": {},
            "readinessProbe": {},
        }
    ],
}
OBJECTS: list[Object] = [
    {
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"template": {"metadata": {"labels": LABELS}, "spec": POD}},
    },
    {
        "kind": "NetworkPolicy",
        "metadata": {"name": "n"},
        "spec": {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress", "Egress"]},
    },
    {
        "kind": "Service",
        "metadata": {"name": "s"},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80, "targetPort": "http"}]},
    },
]


@pytest.fixture
def objects() -> list[Object]:
    return copy.deepcopy(OBJECTS)


def test_what_keeps_to_the_rules_has_no_violations(policy: ModuleType, objects: list[Object]) -> None:
    assert policy.violations(objects) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pod, c: pod.update(hostNetwork=True), "hostNetwork shares the host's"),
        (lambda pod, c: pod.update(hostPID=True), "hostPID shares the host's"),
        (lambda pod, c: pod["volumes"].append({"name": "h", "hostPath": {}}), "volume h is a hostPath"),
        (lambda pod, c: pod["securityContext"].pop("runAsNonRoot"), "runAsNonRoot is None, expected True"),
        (lambda pod, c: pod["securityContext"].update(runAsUser=0), "runAsUser is 0"),
        (lambda pod, c: pod["securityContext"].pop("seccompProfile"), "seccompProfile is None"),
        (lambda pod, c: c["securityContext"].pop("allowPrivilegeEscalation"), "allowPrivilegeEscalation is"),
        (lambda pod, c: c["securityContext"].update(readOnlyRootFilesystem=False), "readOnlyRootFilesystem"),
        (lambda pod, c: c["securityContext"].update(capabilities={}), "capabilities is {}"),
        (lambda pod, c: c["securityContext"].update(privileged=True), "it is privileged"),
        (lambda pod, c: c.update(image="torchere:latest"), "image torchere:latest has no tag that stays"),
        (lambda pod, c: c.update(image="registry.example:5000/torchere"), "has no tag that stays"),
        (lambda pod, c: c["resources"].pop("limits"), "resources.limits.memory is not set"),
        (lambda pod, c: c["resources"]["requests"].pop("cpu"), "resources.requests.cpu is not set"),
        (lambda pod, c: c["ports"][0].update(hostPort=80), "port 8080 is the host's, too"),
        (lambda pod, c: c.pop("livenessProbe"), "livenessProbe is not set"),
        (lambda pod, c: pod.pop("automountServiceAccountToken"), "automountServiceAccountToken is not false"),
        (
            lambda pod, c: pod.update(initContainers=[{"name": "i", "image": "i:1"}]),
            "container i: capabilities",
        ),
    ],
)
def test_a_broken_rule_is_named(
    policy: ModuleType, objects: list[Object], spoil: Callable[[Object, Object], None], said: str
) -> None:
    pod = objects[0]["spec"]["template"]["spec"]
    spoil(pod, pod["containers"][0])

    found = policy.violations(objects)

    assert found
    assert all(text.startswith("Deployment d: ") for text in found)
    assert any(said in text for text in found), found


def test_a_digest_stands_for_a_tag(policy: ModuleType, objects: list[Object]) -> None:
    objects[0]["spec"]["template"]["spec"]["containers"][0]["image"] = "torchere@sha256:" + "0" * 64
    assert policy.violations(objects) == []


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ({"podSelector": {"matchLabels": {"app": "other"}}, "policyTypes": ["Ingress", "Egress"]}, 2),
        ({"podSelector": {}, "policyTypes": ["Ingress"]}, 1),
        ({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}, 0),
    ],
)
def test_pods_need_a_network_policy_for_both_directions(
    policy: ModuleType, objects: list[Object], spec: Object, missing: int
) -> None:
    objects[1]["spec"] = spec
    assert sum("no NetworkPolicy" in text for text in policy.violations(objects)) == missing


def test_only_predictions_leave_the_cluster(policy: ModuleType, objects: list[Object]) -> None:
    objects[2]["spec"]["ports"].append({"port": 8081, "targetPort": "management"})
    (found,) = policy.violations(objects)
    assert found == "Service s: port 8081 leaves the cluster; only predictions may"


def test_what_can_not_be_rendered_is_said_on_one_line(
    policy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy, "program", lambda name: None)
    assert policy.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "policy: helm is not installed (make tools), so the chart is not checked",
        "policy: kubectl is not installed (make tools), so k8s/base is not checked",
        "policy: 1 renderings, 0 violations",
    ]
