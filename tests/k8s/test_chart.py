"""What the Helm chart makes of many values: valid for Kubernetes, closed, and understood by the server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import Configuration, configure
from torchere.serving.frontend.authorisation import PROBES
from torchere.serving.telemetry.metrics import Metrics

VALUES = sorted(path.stem for path in (Path(__file__).parent / "values").glob("*.yaml"))
Object = dict[str, Any]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def named(objects: list[Object], kind: str, suffix: str = "") -> Object:
    """The one object of a kind whose name ends so."""
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"].endswith(suffix)]
    return found


def container(objects: list[Object]) -> Object:
    only: Object = named(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return only


def configuration(objects: list[Object], folder: Path) -> Configuration:
    """What the server reads out of the ConfigMap."""
    (text,) = [each["data"]["config.properties"] for each in of_kind(objects, "ConfigMap")
               if "config.properties" in each["data"]]  # fmt: skip
    (folder / "config.properties").write_text(text)
    return configure(read_properties(folder / "config.properties"))


@pytest.mark.parametrize("program", ["helm", "helm4"])
def test_lint_finds_nothing(program: str, tool: Callable[[str], str], root: Path) -> None:
    linted = subprocess.run(
        [tool(program), "lint", "--strict", root / "k8s/chart"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert linted.returncode == 0, linted.stdout
    assert "1 chart(s) linted, 0 chart(s) failed" in linted.stdout


def test_objects_are_valid_for_kubernetes(
    render: Callable[..., list[Object]], assert_valid: Callable[..., None], tmp_path: Path
) -> None:
    assert_valid({values: render(values) for values in VALUES}, tmp_path)


@pytest.mark.parametrize("values", VALUES)
def test_both_helms_render_the_same(values: str, render: Callable[..., list[Object]]) -> None:
    def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
        return {(each["kind"], each["metadata"]["name"]): each for each in objects}

    assert by_name(render(values)) == by_name(render(values, "helm4"))


@pytest.mark.parametrize("values", VALUES)
def test_pods_keep_to_the_policy(
    values: str, render: Callable[..., list[Object]], policy: ModuleType
) -> None:
    pods = [pod for each in render(values) for pod in policy.pod_specs(each)]

    assert len(pods) == 2  # the server's, and that of `helm test`
    for pod in pods:
        assert list(policy.pod_violations(pod)) == []
        assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("values", VALUES)
def test_the_server_understands_its_configuration_and_has_time_to_drain(
    values: str, render: Callable[..., list[Object]], tmp_path: Path
) -> None:
    if values.startswith("torchserve-chart"):
        pytest.skip("the configuration is on the claim")
    objects = render(values)
    found = configuration(objects, tmp_path)

    assert found.of_level("error") + found.of_level("warning") == ()
    settings = found.settings
    grace_s = named(objects, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > settings.drain_delay_s + settings.drain_timeout_s
    ports = {port["name"]: port["containerPort"] for port in container(objects)["ports"]}
    assert settings.metrics_address and settings.grpc_inference_address
    assert ports["http"] == settings.inference_address.port
    assert ports["grpc"] == settings.grpc_inference_address.port
    assert ports["metrics"] == settings.metrics_address.port
    is_open = settings.management_address.host == "0.0.0.0"
    assert is_open == ("management" in ports)


@pytest.mark.parametrize("values", VALUES)
def test_services_reach_the_pods_and_only_the_management_service_the_management_port(
    values: str, render: Callable[..., list[Object]]
) -> None:
    objects = render(values)
    template = named(objects, "Deployment")["spec"]["template"]
    ports = {port["name"] for port in container(objects)["ports"]}

    for service in of_kind(objects, "Service"):
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        assert targets <= ports
        name = service["metadata"]["name"]
        assert any("management" in target for target in targets) == name.endswith("-management")
        assert ("metrics" in targets) == name.endswith("-metrics")
    for policy in of_kind(objects, "NetworkPolicy"):
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} <= ports


@pytest.mark.parametrize("values", VALUES)
def test_probes_ask_what_the_server_answers_without_a_token(
    values: str, render: Callable[..., list[Object]]
) -> None:
    server = container(render(values))
    paths = {kind: server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}

    assert set(paths.values()) <= PROBES
    # A model that does not load must not get the process killed; one that loads slowly must not, either.
    assert paths == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}


@pytest.mark.parametrize("values", VALUES)
def test_the_start_may_take_as_long_as_the_rollout_waits_for_it(
    values: str, render: Callable[..., list[Object]]
) -> None:
    objects = render(values)
    startup = container(objects)["startupProbe"]

    patience_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert patience_s >= named(objects, "Deployment")["spec"]["progressDeadlineSeconds"]


def test_a_change_of_the_configuration_rolls_the_pods(render: Callable[..., list[Object]]) -> None:
    def checksum(values: str) -> str:
        annotations = named(render(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert checksum("defaults") == checksum("monitored")
    assert checksum("defaults") != checksum("tuned")


def test_models_become_the_list_to_load(render: Callable[..., list[Object]], tmp_path: Path) -> None:
    settings = configuration(render("pvc"), tmp_path).settings

    assert settings.load_models == ("bert.mar", "classifier=resnet-1.2.mar")
    (mount,) = [mount for mount in container(render("pvc"))["volumeMounts"] if mount["name"] == "store"]
    assert mount == {"name": "store", "mountPath": str(settings.model_store), "readOnly": True,
                     "subPath": "store/production"}  # fmt: skip


def test_large_numbers_stay_whole(render: Callable[..., list[Object]], tmp_path: Path) -> None:
    settings = configuration(render("tuned"), tmp_path).settings

    assert settings.limits.max_request_bytes == 65_535_000
    assert settings.drain_delay_s == 2.5
    assert settings.grpc_inference_max_connection_age_ms == 60_000


def test_tls_is_on_for_every_public_port_and_for_the_probes(
    render: Callable[..., list[Object]], tmp_path: Path
) -> None:
    objects = render("tls")
    settings = configuration(objects, tmp_path).settings

    assert settings.inference_address.tls and settings.grpc_tls_enabled
    assert container(objects)["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    (mount,) = [mount for mount in container(objects)["volumeMounts"] if mount["name"] == "tls"]
    assert str(settings.private_key_file) == f"{mount['mountPath']}/tls.key"


def test_keys_of_a_secret_serve_many_replicas(render: Callable[..., list[Object]], tmp_path: Path) -> None:
    objects = render("tokens")
    settings = configuration(objects, tmp_path).settings
    deployment = named(objects, "Deployment")["spec"]
    (volume,) = [each for each in deployment["template"]["spec"]["volumes"] if each["name"] == "keys"]
    (mount,) = [each for each in container(objects)["volumeMounts"] if each["name"] == "keys"]

    assert deployment["replicas"] == 3
    assert settings.token_auth_enabled
    # The server refuses keys that others may read, and a subPath would never see a new Secret.
    assert volume["secret"]["defaultMode"] == 0o440
    assert mount["readOnly"] and "subPath" not in mount
    assert volume["secret"]["items"] == [{"key": "production.json", "path": "keys.json"}]
    assert str(settings.token_keys_file) == f"{mount['mountPath']}/keys.json"


@pytest.mark.parametrize("values", ["autoscaled", "keda"])
def test_an_autoscaler_owns_the_number_of_replicas(values: str, render: Callable[..., list[Object]]) -> None:
    assert "replicas" not in named(render(values), "Deployment")["spec"]


def test_autoscalers_look_at_gauges_that_the_server_has(render: Callable[..., list[Object]]) -> None:
    exposition = Metrics(hostname="h").exposition()

    metric = named(render("autoscaled"), "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"][
        "name"
    ]
    queries = [
        trigger["metadata"]["query"] for trigger in named(render("keda"), "ScaledObject")["spec"]["triggers"]
    ]

    assert f"# TYPE {metric} gauge" in exposition
    assert metric == "torchere_saturation"
    assert "torchere_saturation{" in queries[0] and "# TYPE torchere_saturation gauge" in exposition
    assert "torchere_request_duration_seconds_bucket{" in queries[1]
    assert 'service="rel-torchere-metrics"' in queries[0]


def test_both_autoscalers_see_the_same_mean_of_the_same_gauge(
    render: Callable[..., list[Object]], root: Path
) -> None:
    keda = named(render("keda"), "ScaledObject")["spec"]["triggers"][0]["metadata"]
    hpa = named(render("autoscaled"), "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
    block = (root / "docs/kubernetes.md").read_text().split("For prometheus-adapter:")[1].split("```")[1]
    (adapter,) = yaml.safe_load(block.removeprefix("yaml"))["rules"]

    assert adapter["seriesQuery"].startswith(hpa["metric"]["name"] + "{")
    assert "avg_over_time(<<.Series>>{<<.LabelMatchers>>}[1m])" in adapter["metricsQuery"]
    assert re.search(r"avg_over_time\(torchere_saturation\{[^}]*\}\[1m\]\)", keda["query"])
    defaults = yaml.safe_load((root / "k8s/chart/values.yaml").read_text())
    assert defaults["keda"]["saturationThreshold"] == "0.8"
    assert defaults["autoscaling"]["averageValue"] == "800m"


def test_rules_and_dashboards_are_those_of_the_files(render: Callable[..., list[Object]], root: Path) -> None:
    objects = render("monitored")
    groups = yaml.safe_load((root / "k8s/chart/rules/torchere.yaml").read_text())["groups"]
    disabled = {"TorchereHostMemoryLow", "TorchereDiskFull"}

    rules = [rule for group in named(objects, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]

    expected = [rule for group in groups for rule in group["rules"] if rule.get("alert") not in disabled]
    assert rules[:-1] == expected
    assert rules[-1]["alert"] == "QueueOfMine"
    shown = named(objects, "ConfigMap", "-dashboards")["data"]
    files = {path.name: path.read_text() for path in (root / "k8s/chart/dashboards").glob("*.json")}
    assert shown == files and len(files) == 2


def test_the_service_monitor_finds_one_service_and_names_the_job_as_the_rules_do(
    render: Callable[..., list[Object]],
) -> None:
    objects = render("monitored")
    monitor = named(objects, "ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()

    (service,) = [
        each for each in of_kind(objects, "Service") if wanted <= each["metadata"]["labels"].items()
    ]

    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "torchere"}]
    assert "annotations" not in service["metadata"]  # or it would be scraped twice


def test_the_values_of_torchserves_chart_do_what_they_did(render: Callable[..., list[Object]]) -> None:
    objects = render("torchserve-chart")
    server = container(objects)

    assert server["image"] == "registry.example/torchere:0.1.0-cuda"
    assert "--ts-config=/home/model-server/shared/config/config.properties" in server["args"]
    assert "--model-store=/home/model-server/shared/model-store" in server["args"]
    assert server["resources"]["limits"] == {"cpu": "16", "memory": "32Gi", "nvidia.com/gpu": 4}
    assert server["resources"]["requests"] == {"cpu": "16", "memory": "32Gi"}  # no more than the limits
    assert named(objects, "Deployment")["spec"]["replicas"] == 2
    volumes = named(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"claimName": "efs-claim", "readOnly": True} in [v.get("persistentVolumeClaim") for v in volumes]
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]


def test_a_copied_store_is_there_before_the_server_starts_and_may_be_fetched(
    render: Callable[..., list[Object]],
) -> None:
    objects = render("s3")
    (fetch,) = named(objects, "Deployment")["spec"]["template"]["spec"]["initContainers"]

    assert fetch["args"][-2:] == ["s3://models/production", "/mnt/model-store"]
    assert {"secretRef": {"name": "s3-credentials"}} in fetch["envFrom"]
    egress = named(objects, "NetworkPolicy")["spec"]["egress"]
    assert {"protocol": "TCP", "port": 9000} in [port for rule in egress for port in rule["ports"]]


def test_by_default_nothing_may_leave_but_questions_for_names(render: Callable[..., list[Object]]) -> None:
    (rule,) = named(render("defaults"), "NetworkPolicy")["spec"]["egress"]

    assert {port["port"] for port in rule["ports"]} == {53}
