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


def alert(expression: str, summary: str = "") -> list[Object]:
    """Groups of rules with a recorded series, failed:ratio, and one alert."""
    failed, all_ = (f'sum by (model) (rate(torchere_requests_total{{{matchers}}}[5m]))' for matchers in
                    ('job="torchere", code="500"', 'job="torchere"'))  # fmt: skip
    record = {"record": "failed:ratio", "expr": f"{failed} / ({all_} > 0)"}
    return [{"rules": [record, {"alert": "A", "expr": expression, "annotations": {"summary": summary}}]}]


@pytest.mark.parametrize(
    "expression",
    [
        "torchere_saturation > 1.9",
        "min_over_time(torchere_saturation[5m]) > 1.9",
        "failed:ratio > 14.4 * 0.05 and failed:ratio > 0",
        "torchere_ready == 0",
        'max by (instance) (torchere_model_state{state=~"loading|failed"}) == 1',
        "histogram_quantile(0.99, sum by (le) (rate(torchere_request_duration_seconds_bucket[5m]))) > 100",
        "torchere_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
        "torchere_queue_oldest_age_seconds > 0.5 * torchere_model_response_timeout_seconds",
        "rate(torchere_cgroup_cpu_throttled_seconds_total[5m]) > 0.25",
        "torchere_queue_depth > 0 unless on (model, version) rate(torchere_batch_size_count[2m]) > 0",
        "process_resident_memory_bytes > 5 and process_resident_memory_bytes offset 6h",
        "GPUMemoryUtilization > 95 or DiskUtilization > 95",
    ],
)
def test_an_alert_that_can_fire_is_let_through(policy: ModuleType, expression: str) -> None:
    assert list(policy.rule_violations(alert(expression))) == []


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("torchere_saturation > 2", "never > 2: torchere_saturation is 0 to 2"),
        ("min_over_time(torchere_saturation[5m]) >= 2.1", "is 0 to 2"),
        ("100 * torchere_saturation > 201", "never > 201: the left side is 0 to 200"),
        ("failed:ratio > 14.4 * 0.1", "never > 1.44: failed:ratio is 0 to 1"),
        ("torchere_saturation > 1 and torchere_saturation < 0", "never < 0"),
        ("torchere_ready == 2", "never == 2: torchere_ready is 0 to 1"),
        ('torchere_model_state{state=~"loading|broken"} == 1', "torchere_model_state is never broken"),
        ("DiskUtilization > 100", "never > 100"),
        (
            "histogram_quantile(0.9, sum by (le) (rate(torchere_queue_duration_seconds_bucket[5m]))) > 120",
            "is 0 to 120",
        ),
        (
            "histogram_quantile(0.9, sum by (model) (rate(torchere_queue_duration_seconds_bucket[5m]))) > 1",
            "without the label le",
        ),
        ("torchere_saturated > 1", "the server has no torchere_saturated"),
        ("torchere_batch_size > 1", "the server has no torchere_batch_size"),
        ("rate(torchere_queue_depth[5m]) > 1", "which is no counter"),
        ('torchere_ready{model="net"} == 0', "torchere_ready has no label model"),
        ("sum by (stage) (torchere_queue_depth) > 0", "torchere_queue_depth have no such label"),
        ("torchere_queue_depth > torchere_inflight", "one side only has model, version"),
        ("torchere_queue_depth and on (model) torchere_inflight", "on model: a side has no such label"),
        ("quantile(0.9, torchere_saturation) > 1", "(0.9, torchere_saturation)' is not understood"),
        ("torchere_saturation > > 1", "A: invalid promql query"),
        ("torchere_saturation > 1 $", "A: unexpected character: '$'"),
    ],
)  # fmt: skip
def test_an_alert_that_can_not_fire_is_refused(policy: ModuleType, expression: str, said: str) -> None:
    found = list(policy.rule_violations(alert(expression)))

    assert len(found) == 1
    assert said in found[0]


def test_annotations_name_labels_that_the_alert_has(policy: ModuleType) -> None:
    groups = alert(
        "sum by (model) (torchere_queue_depth) > 1", "{{ $labels.model }} on {{ $labels.instance }}"
    )
    (found,) = policy.rule_violations(groups)
    assert found == "A: its annotations name the label instance, which it does not have"


@pytest.mark.parametrize(
    ("kind", "target", "refused"),
    [
        ("HorizontalPodAutoscaler", "700m", False),
        ("HorizontalPodAutoscaler", "2", True),
        ("ScaledObject", "0.7", False),
        ("ScaledObject", "2.5", True),
        ("ScaledObject", "0", True),
    ],
)
def test_an_autoscaler_whose_target_no_pod_exceeds_is_refused(
    policy: ModuleType, kind: str, target: str, refused: bool
) -> None:
    query = "sum(max by (instance) (torchere_saturation))"
    specs = {
        "HorizontalPodAutoscaler": {"metrics": [
            {"type": "Pods", "pods": {"metric": {"name": "torchere_saturation"},
                                      "target": {"averageValue": target}}}]},
        "ScaledObject": {"triggers": [
            {"type": "prometheus", "metricType": "AverageValue",
             "metadata": {"query": query, "threshold": target}}]},
    }  # fmt: skip

    found = policy.violations([{"kind": kind, "metadata": {"name": "a"}, "spec": specs[kind]}])

    assert [f"target {target}, expected" in text for text in found] == [True] * refused


def test_what_can_not_be_rendered_is_said_on_one_line(
    policy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy, "program", lambda name: None)
    assert policy.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "policy: helm is not installed (make tools), so the chart is not checked",
        "policy: kubectl is not installed (make tools), so k8s/base is not checked",
        "policy: 2 renderings, 0 violations",
    ]
