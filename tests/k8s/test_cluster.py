"""What the chart makes of objects that are in the cluster already: a small API server answers its lookups."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

Object = dict[str, Any]
NAMESPACE = "torchserve"
# Every kind of these tests: helm 4 asks for the kind of all that it renders.
KINDS = {
    "v1": ("ConfigMap", "Pod", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "monitoring.coreos.com/v1": ("PrometheusRule",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}
# An alias stands in place of the chart's name.
OTHER = {
    "app.kubernetes.io/instance": "other",
    "app.kubernetes.io/name": "bert",
    "helm.sh/chart": "bert-0.1.0",
}


class ApiServer(ThreadingHTTPServer):
    """Serves discovery, and the objects of one namespace; has no other verb than GET."""

    daemon_threads = True

    def __init__(self, objects: list[Object], forbidden: str) -> None:
        """Listen on a free port of loopback."""
        super().__init__(("127.0.0.1", 0), _Answer)
        self.objects = objects
        self.forbidden = forbidden

    def answer(self, path: str) -> Object | None:
        """The answer to a GET, or None where there is nothing."""
        words = path.strip("/").split("/")
        if path == "/version":
            return {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [_group(name) for name in KINDS if "/" in name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        group = "/".join(words[1:2] if words[0] == "api" else words[1:3])
        rest = words[2:] if words[0] == "api" else words[3:]
        if group not in KINDS:
            return None
        if not rest:
            kinds = [{"name": _plural(kind), "kind": kind, "namespaced": True, "verbs": ["get", "list"]}
                     for kind in KINDS[group]]  # fmt: skip
            return {"kind": "APIResourceList", "groupVersion": group, "resources": kinds}
        if rest[:2] != ["namespaces", NAMESPACE]:
            return None
        found = [each for each in self.objects if _plural(each["kind"]) == rest[2]]
        if len(rest) == 3:
            return {"kind": "List", "apiVersion": group, "metadata": {}, "items": found}
        return next((each for each in found if each["metadata"]["name"] == rest[3]), None)


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, ApiServer)
        path = self.path.partition("?")[0]
        refused = bool(self.server.forbidden) and path.endswith(f"/{self.server.forbidden}")
        found = None if refused else self.server.answer(path)
        code, reason = (403, "Forbidden") if refused else (404, "NotFound")
        failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        body = json.dumps(failure if found is None else found).encode()
        self.send_response(code if found is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _plural(kind: str) -> str:
    return re.sub(r"y$", "ie", kind.lower()) + "s"


def _group(name: str) -> Object:
    version = {"groupVersion": name, "version": name.partition("/")[2]}
    return {"name": name.partition("/")[0], "versions": [version], "preferredVersion": version}


@pytest.fixture
def rendered_in(
    tool: Callable[[str], str], root: Path, tmp_path: Path
) -> Iterator[Callable[..., dict[str, Object]]]:
    """Renders values in a cluster that has these objects, and forbids a list; by kind and name."""
    servers: list[ApiServer] = []

    def render(
        values: Object, *objects: Object, program: str = "helm", forbidden: str = ""
    ) -> dict[str, Object]:
        server = ApiServer(list(objects), forbidden)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        address = f"http://127.0.0.1:{server.server_address[1]}"
        command = [tool(program), "template", "rel", str(root / "k8s/chart"), "--namespace", NAMESPACE]
        command += ["--dry-run=server", "--kube-apiserver", address, "--disable-openapi-validation"]
        done = subprocess.run(
            [*command, "--values", str(tmp_path / "values.yaml")],
            check=False, capture_output=True, text=True, timeout=60,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
        return {f"{each['kind']}/{each['metadata']['name']}": each for each in made}

    yield render
    for server in servers:
        server.shutdown()
        server.server_close()


def running(replicas: int) -> Object:
    """The Deployment of the release, as helm installed it."""
    owner = {"meta.helm.sh/release-name": "rel", "meta.helm.sh/release-namespace": NAMESPACE}
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    metadata = {"name": "rel-torchere", "namespace": NAMESPACE, "annotations": owner, "labels": labels}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {"replicas": replicas},
    }


def of_other(kind: str, name: str, component: str = "") -> Object:
    """An object of another release."""
    version = "monitoring.coreos.com/v1" if kind == "PrometheusRule" else "v1"
    more = {"app.kubernetes.io/component": component, "app.kubernetes.io/part-of": "torchere"}
    labels = OTHER | (more if component else {})
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}}


@pytest.mark.parametrize("program", ["helm", "helm4"])
@pytest.mark.parametrize("scaler", ["autoscaling", "keda"])
@pytest.mark.parametrize("replicas", [6, 0])
def test_an_autoscaler_that_is_turned_on_takes_over_the_replicas_that_run(
    rendered_in: Callable[..., dict[str, Object]], scaler: str, program: str, replicas: int
) -> None:
    made = rendered_in({scaler: {"enabled": True}}, running(replicas), program=program)

    assert made["Deployment/rel-torchere"]["spec"]["replicas"] == replicas


def test_without_an_autoscaler_the_values_say_the_replicas(
    rendered_in: Callable[..., dict[str, Object]],
) -> None:
    assert rendered_in({"replicaCount": 3}, running(6))["Deployment/rel-torchere"]["spec"]["replicas"] == 3


def test_of_two_releases_in_a_namespace_one_has_the_rules_and_the_dashboards(
    rendered_in: Callable[..., dict[str, Object]],
) -> None:
    values = {"prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}}
    rules = of_other("PrometheusRule", "x", "rules")
    boards = of_other("ConfigMap", "y", "dashboards")
    plain = of_other("ConfigMap", "z")
    own = {"PrometheusRule/rel-torchere", "ConfigMap/rel-torchere-dashboards"}

    assert own <= rendered_in(values, plain).keys()
    assert own & rendered_in(values, rules, plain).keys() == {"ConfigMap/rel-torchere-dashboards"}
    assert own & rendered_in(values, rules, boards).keys() == set()


def test_rules_of_a_release_whose_objects_do_not_say_what_they_are_part_of_are_found(
    rendered_in: Callable[..., dict[str, Object]],
) -> None:
    rules = of_other("PrometheusRule", "x", "rules")
    del rules["metadata"]["labels"]["app.kubernetes.io/part-of"]
    values = {"prometheusRule": {"enabled": True}}
    assert "PrometheusRule/rel-torchere" in rendered_in(values, rules)  # of another chart

    rules["metadata"]["labels"]["helm.sh/chart"] = "torchere-0.1.0"
    assert "PrometheusRule/rel-torchere" not in rendered_in(values, rules)


def test_an_upgrade_keeps_its_own_rules_and_dashboards(
    rendered_in: Callable[..., dict[str, Object]],
) -> None:
    values = {"prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}}
    names = ("PrometheusRule/rel-torchere", "ConfigMap/rel-torchere-dashboards")
    first = rendered_in(values)

    again = rendered_in(values, *(first[name] for name in names))

    assert set(names) <= again.keys()


def test_an_upgrade_to_another_name_keeps_its_rules(
    rendered_in: Callable[..., dict[str, Object]],
) -> None:
    values = {"prometheusRule": {"enabled": True}}
    first = rendered_in(values)

    again = rendered_in(values | {"fullnameOverride": "renamed"}, first["PrometheusRule/rel-torchere"])

    assert "PrometheusRule/renamed" in again


@pytest.mark.parametrize(("other", "kept"), [("aaa", set()), ("zzz", {"PrometheusRule/rel-torchere"})])
def test_of_two_aliases_in_a_release_that_both_have_rules_the_first_by_name_keeps_them(
    rendered_in: Callable[..., dict[str, Object]], other: str, kept: set[str]
) -> None:
    values = {"prometheusRule": {"enabled": True}}
    own = rendered_in(values)["PrometheusRule/rel-torchere"]
    labels = {"app.kubernetes.io/instance": "rel", "app.kubernetes.io/name": other}
    sibling = of_other("PrometheusRule", f"rel-{other}", "rules")
    sibling["metadata"]["labels"] |= labels

    again = rendered_in(values, own, sibling)

    assert {name for name in again if name.startswith("PrometheusRule/")} == kept


@pytest.mark.parametrize("program", ["helm", "helm4"])
def test_the_defaults_need_neither_the_operator_of_prometheus_nor_a_right_to_list_its_rules(
    rendered_in: Callable[..., dict[str, Object]], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Deployment/rel-torchere" in rendered_in({}, program=program, forbidden="prometheusrules")

    monkeypatch.delitem(KINDS, "monitoring.coreos.com/v1")
    assert "Deployment/rel-torchere" in rendered_in({}, program=program)
