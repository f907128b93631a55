"""Checks what the chart and the Kustomize base render against the house's rules for workloads.

    python k8s/policy.py

The rules are those of the Restricted Pod Security Standard, and what a reviewer would ask for beside it;
alerts and autoscalers have to be able to reach their thresholds (`promql.py`). The chart is rendered with its
defaults and with every file of `tests/k8s/values`. Exit code 1 and a line for each violation; without helm
(or kubectl, for the base) one line says so, and the rest is checked. helm and kubectl are looked for in
`.tools/bin`, where `make tools` puts them, and on PATH.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from promql import Family, NotUnderstood, Reader, Value

from torchere.serving.registry.version import CONDITIONS
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.distributions import SECONDS_BUCKETS
from torchere.serving.telemetry.numbers import SIZE_BUCKETS
from torchere.serving.workers.executor import ExecutorState

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "k8s/chart/rules/torchere.yaml"
KUBERNETES = "1.35.0"  # what the chart is rendered for
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_HOSTS = ("hostNetwork", "hostPID", "hostIPC")

Object = dict[str, Any]


def violations(objects: Iterable[Object]) -> list[str]:
    """What is wrong with these objects, which are installed together; one line each, [] for nothing."""
    objects = list(objects)
    found = []
    for each in objects:
        where = f"{each['kind']} {each['metadata']['name']}"
        for pod in pod_specs(each):
            found += [f"{where}: {text}" for text in pod_violations(pod)]
        if each["kind"] == "Deployment":
            found += [f"{where}: {text}" for text in _deployment_violations(each, objects)]
        if each["kind"] == "Service":
            found += [f"{where}: {text}" for text in _service_violations(each)]
        if each["kind"] == "PrometheusRule":
            found += [f"{where}: {text}" for text in rule_violations(each["spec"]["groups"])]
        if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            found += [f"{where}: {text}" for text in _scaling_violations(each)]
    return found


def pod_specs(each: Object) -> Iterator[Object]:
    """The pod specification in an object, if it has one."""
    if each["kind"] in ("Pod", "ClusterServingRuntime"):
        yield each["spec"]
    elif each["kind"] == "Deployment":
        yield each["spec"]["template"]["spec"]
    elif each["kind"] == "LeaderWorkerSet":
        of_group = each["spec"]["leaderWorkerTemplate"]
        yield from (of_group[role]["spec"] for role in ("leaderTemplate", "workerTemplate"))


def pod_violations(pod: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a pod and its containers."""
    yield from (f"{name} shares the host's" for name in _HOSTS if pod.get(name))
    for volume in pod.get("volumes", ()):
        if "hostPath" in volume:
            yield f"volume {volume['name']} is a hostPath"
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        context = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        wrong = (*_context(context), *_image(container["image"]), *_resources(container), *_ports(container))
        yield from (f"container {container['name']}: {text}" for text in wrong)


def _context(context: Mapping[str, Any]) -> Iterator[str]:
    wanted = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "capabilities": {"drop": ["ALL"]},
    }
    for name, value in wanted.items():
        if context.get(name) != value:
            yield f"{name} is {context.get(name)}, expected {value}"
    if not context.get("runAsUser"):
        yield f"runAsUser is {context.get('runAsUser')}, expected a number above 0"
    if context.get("privileged"):
        yield "it is privileged"


def _image(image: str) -> Iterator[str]:
    name, _, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if not digest and tag in ("", "latest"):
        yield f"image {image} has no tag that stays, expected a version or a digest"


def _resources(container: Mapping[str, Any]) -> Iterator[str]:
    resources = container.get("resources", {})
    for kind, names in (("requests", ("cpu", "memory")), ("limits", ("memory",))):
        for name in names:
            if name not in (resources.get(kind) or {}):
                yield f"resources.{kind}.{name} is not set"


def _ports(container: Mapping[str, Any]) -> Iterator[str]:
    for port in container.get("ports", ()):
        if "hostPort" in port:
            yield f"port {port['containerPort']} is the host's, too"


def _deployment_violations(deployment: Object, objects: Iterable[Object]) -> Iterator[str]:
    template = deployment["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    if pod.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken is not false"
    for container in pod["containers"]:
        missing = [probe for probe in _PROBES if probe not in container]
        yield from (f"container {container['name']}: {probe} is not set" for probe in missing)
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    for direction in ("Ingress", "Egress"):
        if not any(_covers(policy["spec"], labels, direction) for policy in policies):
            yield f"no NetworkPolicy says what {direction.lower()} its pods have"


def _covers(policy: Mapping[str, Any], labels: Mapping[str, str], direction: str) -> bool:
    selected = policy["podSelector"].get("matchLabels", {})
    return selected.items() <= labels.items() and direction in policy.get("policyTypes", ())


def _service_violations(service: Object) -> Iterator[str]:
    if service["spec"].get("type", "ClusterIP") == "ClusterIP":
        return
    for port in service["spec"]["ports"]:
        if str(port["targetPort"]) not in ("http", "grpc"):
            yield f"port {port['port']} leaves the cluster; only predictions may"


@functools.cache
def families() -> dict[str, Family]:
    """The metrics of a scrape by name: the server's own, TorchServe's, and what Prometheus adds."""
    states = {
        "torchere_model_state": CONDITIONS,
        "torchere_executors": [state.value for state in ExecutorState],
        "torchere_executor_state": [state.value for state in ExecutorState],
    }
    found = {"up": Family("gauge", high=1), **{name: Family("gauge") for name in catalogue.LIBRARY_GAUGES}}
    found |= {name: Family("counter") for name in catalogue.LIBRARY_COUNTERS.values()}
    for name, row in catalogue.FAMILIES.items():
        high = row.high
        if row.kind == "histogram":
            high = float((SIZE_BUCKETS if name == "torchere_batch_size" else SECONDS_BUCKETS)[-1])
        known = {"state": frozenset(states[name])} if name in states else {}
        found[name] = Family(row.kind, frozenset(row.labels), high, known)
    declared = yaml.safe_load((ROOT / "serving/telemetry/metrics.yaml").read_text())
    for kinds in (declared["ts_metrics"], declared["model_metrics"]):
        for kind, rows in kinds.items():
            for row in rows:
                high = 100.0 if row["unit"] == "Percent" else math.inf
                found[row["name"]] = Family(kind, frozenset(row["dimensions"]) | {"Hostname"}, high)
    return found


def rule_violations(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Why alerts could never fire, or not say where: metrics, labels, thresholds that no server has."""
    recorded: dict[str, Value] = {}
    for rule in (rule for group in groups for rule in group["rules"]):
        name = rule.get("record") or rule["alert"]
        try:
            reader = Reader(rule["expr"], families(), recorded)
            value = reader.read()
        except NotUnderstood as err:
            yield f"{name}: {err}"
            continue
        yield from (f"{name}: {text}" for text in reader.problems)
        if "record" in rule:
            recorded[name] = value
        texts = " ".join(rule.get("annotations", {}).values())
        for label in sorted(set(re.findall(r"\$labels\.(\w+)", texts)) - (value.labels or frozenset())):
            yield f"{name}: its annotations name the label {label}, which it does not have"


def _scaling_violations(scaler: Object) -> Iterator[str]:
    """Why replicas would never grow: a target that the metric of a pod does not reach."""
    targets = []
    if scaler["kind"] == "HorizontalPodAutoscaler":
        pods = [metric["pods"] for metric in scaler["spec"]["metrics"] if metric["type"] == "Pods"]
        targets = [(each["metric"]["name"], each["target"]["averageValue"], True) for each in pods]
    else:
        triggers = [each for each in scaler["spec"]["triggers"] if each["type"] == "prometheus"]
        targets = [
            (each["metadata"]["query"], each["metadata"]["threshold"], each.get("metricType") != "Value")
            for each in triggers
            if "torchere_" in each["metadata"]["query"]  # the others ask for metrics of other programs
        ]
    for query, target, is_average in targets:
        reader = Reader(query, families(), {})
        value = reader.read()
        most = value.each if is_average else value.high
        yield from reader.problems
        if not 0 < _number(target) < most:
            yield f"{query}: target {target}, expected more than 0 and less than {most:g}, its highest value"


def _number(quantity: str) -> float:
    """The number of a quantity of Kubernetes: 700m is 0.7."""
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def program(name: str) -> str | None:
    """Where a tool is, or None."""
    return shutil.which(name, path=os.pathsep.join([str(ROOT / ".tools/bin"), os.environ.get("PATH", "")]))


def rendered() -> Iterator[tuple[str, list[Object]]]:
    """Everything that can be rendered here, by name; says on one line what can't."""
    helm, kubectl = program("helm"), program("kubectl")
    if helm is None:
        print("policy: helm is not installed (make tools), so the chart is not checked")
    else:
        chart = [helm, "template", "rel", str(ROOT / "k8s/chart"), "--kube-version", KUBERNETES]
        chart += ["--namespace", "torchserve"]  # the one that values of TorchServe's chart may name
        for values in sorted((ROOT / "tests/k8s/values").glob("*.yaml")):
            # Values that opt out of the network policy are meant; everything else about them must hold.
            options = ["--values", str(values), "--set", "networkPolicy.enabled=true"]
            yield f"chart, {values.stem}", _objects([*chart, *options])
    if kubectl is None:
        print("policy: kubectl is not installed (make tools), so k8s/base is not checked")
    else:
        yield "base", _objects([kubectl, "kustomize", str(ROOT / "k8s/base")])
    runtime = ROOT / "k8s/kserve/clusterservingruntime.yaml"
    yield "KServe runtime", [each for each in yaml.safe_load_all(runtime.read_text()) if each]


def _objects(command: list[str]) -> list[Object]:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def main() -> int:
    """Check everything; 1 when a rule is broken."""
    checked = {name: violations(objects) for name, objects in rendered()}
    checked["rules"] = list(rule_violations(yaml.safe_load(RULES.read_text())["groups"]))
    for name, found in checked.items():
        for text in found:
            print(f"policy: {name}: {text}")
    broken = sum(map(len, checked.values()))
    print(f"policy: {len(checked)} renderings, {broken} violations")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
