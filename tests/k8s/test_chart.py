"""What the Helm chart makes of many values: valid for Kubernetes, closed, and understood by the server."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import Configuration, configure
from torchere.serving.frontend.authorisation import PROBES

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


def values_read(templates: Path) -> set[str]:
    """The values that templates name, with dots: by themselves, or through a variable that holds a part."""
    found = set()
    for file in [*templates.glob("*.tpl"), *templates.rglob("*.yaml"), *templates.glob("*.txt")]:
        text = file.read_text()
        parts = dict(re.findall(r"\$(\w+) := \$?\.Values\.([\w.]+)", text))
        found |= set(re.findall(r"\.Values\.([\w.]+)", text)) - set(parts.values())
        found |= {
            f"{parts[name]}.{rest}" for name, rest in re.findall(r"\$(\w+)\.([\w.]+)", text) if name in parts
        }
    return found


def leaves(schema: Object, path: str = "") -> Iterator[str]:
    """The values that a schema allows, with dots, down to those without members of their own."""
    for name, each in schema.get("properties", {}).items():
        if "properties" in each:
            yield from leaves(each, f"{path}{name}.")
        else:
            yield path + name


def test_every_value_of_the_schema_is_read_by_a_template_and_has_a_default(root: Path) -> None:
    chart = root / "k8s/chart"
    schema = json.loads((chart / "values.schema.json").read_text())
    theirs = ("torchserve", "namespace", "deployment", "persistentVolume", "persitant_volume")  # TorchServe's
    allowed = [path for path in leaves(schema) if path != "enabled" and not path.startswith(theirs)]
    read = values_read(chart / "templates")
    defaults = yaml.safe_load((chart / "values.yaml").read_text())

    def is_read(path: str) -> bool:
        return any(path == each or path.startswith(f"{each}.") for each in read)

    def has_default(path: str) -> bool:
        first, *rest = path.split(".")
        value = defaults.get(first)
        for name in rest:
            value = value.get(name, value) if value else value  # an empty map stands for its members
        return first in defaults and value is not None

    assert len(allowed) > 150
    assert [path for path in allowed if not is_read(path)] == []
    assert [path for path in allowed if not has_default(path)] == []


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
    is_open = settings.management_address.host in ("0.0.0.0", "::")
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


def test_rules_and_dashboards_are_those_of_the_files(render: Callable[..., list[Object]], root: Path) -> None:
    objects = render("monitored")
    groups = yaml.safe_load((root / "k8s/chart/rules/torchere.yaml").read_text())["groups"]
    disabled = {"TorchereHostMemoryLow", "TorchereDiskFull"}

    rules = [rule for group in named(objects, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]

    expected = [rule for group in groups for rule in group["rules"] if rule.get("alert") not in disabled]
    assert [rule | {"expr": ""} for rule in rules[:-1]] == [rule | {"expr": ""} for rule in expected]
    assert rules[-1]["alert"] == "QueueOfMine"
    shown = named(objects, "ConfigMap", "-dashboards")["data"]
    files = {path.name: path.read_text() for path in (root / "k8s/chart/dashboards").glob("*.json")}
    assert shown == files and len(files) == 2


def test_rules_are_about_their_own_namespace_and_have_the_thresholds_of_the_values(
    render: Callable[..., list[Object]], tool: Callable[[str], str], tmp_path: Path
) -> None:
    spec = named(render("monitored"), "PrometheusRule")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    ours = [rule for group in spec["groups"][:-1] for rule in group["rules"]]
    alerts = {rule["alert"]: rule["expr"] for rule in ours if "alert" in rule}

    checked = subprocess.run(
        [tool("promtool3"), "check", "rules", tmp_path / "rules.yaml"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert checked.returncode == 0, checked.stdout + checked.stderr
    for rule in ours:  # each selector, and each recorded series
        selected = re.findall(r'torchere:\w+:\w+(?!\w)|job="torchere"', rule["expr"])
        assert selected and rule["expr"].count('namespace="torchserve"') == len(selected), rule["expr"]
    assert alerts["TorchereLatencyHigh"].endswith("> 0.25")
    assert alerts["TorchereErrorBudgetBurn"].rstrip().endswith("> 20")
    assert alerts["TorchereErrorBudgetBurnSlow"].rstrip().endswith("> 20")
    assert alerts["TorchereNoTargets"] == 'absent(up{job="torchere", namespace="torchserve"})'


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
    assert endpoint["relabelings"][0] == {"targetLabel": "job", "replacement": "torchere"}
    (dropped,) = [each for each in endpoint["relabelings"] if each.get("action") == "drop"]
    assert (dropped["sourceLabels"], dropped["regex"]) == (["__meta_kubernetes_pod_phase"], "Pending")
    assert endpoint["relabelings"][-1]["targetLabel"] == "node"
    assert (endpoint["interval"], endpoint["scrapeTimeout"]) == ("30s", "25s")
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
    assert fetch["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}
    assert fetch["resources"]["requests"] == {"cpu": "100m", "memory": "256Mi"}
    egress = named(objects, "NetworkPolicy")["spec"]["egress"]
    assert {"protocol": "TCP", "port": 9000} in [port for rule in egress for port in rule["ports"]]


@pytest.mark.parametrize("values", ["gcs", "azure", "init-container"])
def test_a_pod_may_reach_the_store_that_it_copies(values: str, render: Callable[..., list[Object]]) -> None:
    egress = named(render(values), "NetworkPolicy")["spec"]["egress"]

    assert {"ports": [{"protocol": "TCP", "port": 443}]} in egress


def test_a_copied_store_of_google_and_azure_is_there_before_the_server_starts(
    render: Callable[..., list[Object]],
) -> None:
    def fetch(values: str) -> Object:
        pod = named(render(values), "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["initContainers"]
        return {**container, "volumes": pod["volumes"]}

    google, azure = fetch("gcs"), fetch("azure")

    assert google["args"] == ["gs://models/production", "/mnt/model-store"]
    (variable,) = [each for each in google["env"] if each["name"] == "GOOGLE_APPLICATION_CREDENTIALS"]
    (mount,) = [each for each in google["volumeMounts"] if each["name"] == "store-credentials"]
    assert variable["value"] == f"{mount['mountPath']}/account.json"
    secrets = [each["secret"]["secretName"] for each in google["volumes"] if "secret" in each]
    assert secrets == ["store-key"]
    assert azure["args"] == ["https://models.blob.core.windows.net/store/production", "/mnt/model-store"]
    assert azure["envFrom"] == [{"secretRef": {"name": "store-key"}}]


def test_a_claim_that_the_chart_makes_is_mounted_and_outlives_the_release(
    render: Callable[..., list[Object]],
) -> None:
    objects = render("new-claim")
    claim = named(objects, "PersistentVolumeClaim")
    volumes = named(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]

    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "100Gi"
    name = claim["metadata"]["name"]
    assert {"claimName": name, "readOnly": True} in [each.get("persistentVolumeClaim") for each in volumes]


def test_a_model_may_have_workers_and_a_batch_size_of_its_own(
    render: Callable[..., list[Object]], tmp_path: Path
) -> None:
    settings = configuration(render("per-model"), tmp_path).settings

    assert settings.load_models == (
        "bert=bert.mar",
        "bert=bert-1.mar",
        "classifier=resnet-1.2.mar",
        "other.mar",
    )
    assert settings.model_defaults == {
        "bert": {
            "1.0": {"minWorkers": 1, "maxWorkers": 1},
            "2.0": {
                "minWorkers": 4,
                "maxWorkers": 4,
                "batchSize": 16,
                "maxBatchDelay": 5,
                "responseTimeout": 30,
            },
        }
    }


def test_an_ingress_leads_to_the_service_by_the_names_of_its_ports(
    render: Callable[..., list[Object]],
) -> None:
    objects = render("ingress")

    backends = [path["backend"]["service"] for rule in named(objects, "Ingress")["spec"]["rules"]
                for path in rule["http"]["paths"]]  # fmt: skip

    assert [backend["port"]["name"] for backend in backends] == ["http", "grpc"]
    assert {backend["name"] for backend in backends} == {"rel-torchere"}


def test_a_load_balancer_is_not_told_to_probe_over_http(render: Callable[..., list[Object]]) -> None:
    def protocol(values: str) -> str | None:
        (http, _) = named(render(values), "Service", "rel-torchere")["spec"]["ports"]
        return str(http["appProtocol"]) if "appProtocol" in http else None

    assert [protocol(values) for values in ("defaults", "load-balancer", "tls")] == ["http", None, None]


def test_routes_share_traffic_with_another_release_by_weight(render: Callable[..., list[Object]]) -> None:
    objects = render("gateway")
    ports = {
        port["name"]: port["port"] for port in named(objects, "Service", "rel-torchere")["spec"]["ports"]
    }

    for kind, port in (("HTTPRoute", ports["http"]), ("GRPCRoute", ports["grpc"])):
        (rule,) = named(objects, kind)["spec"]["rules"]
        shares = [(each["name"], each["port"], each["weight"]) for each in rule["backendRefs"]]
        assert shares == [("rel-torchere", port, 90), ("canary-torchere", port, 10)]


def test_images_come_from_a_mirror_whatever_their_registry_is(render: Callable[..., list[Object]]) -> None:
    pods = [named(render("mirrored"), "Deployment")["spec"]["template"]["spec"],
            named(render("mirrored"), "Pod")["spec"]]  # fmt: skip

    images = {each["image"] for pod in pods for each in [*pod.get("initContainers", ()), *pod["containers"]]}

    mirror = "mirror.example:5000/cache"
    assert images == {f"{mirror}/team/torchere:0.1.0", f"{mirror}/amazon/aws-cli:2.27.0"}
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "mirror"}]] * 2


def test_the_pod_of_helm_test_runs_its_script_without_the_images_entrypoint(
    render: Callable[..., list[Object]],
) -> None:
    (container,) = named(render("defaults"), "Pod")["spec"]["containers"]

    assert "args" not in container  # the entrypoint gives lines with blanks and brackets to a shell
    program, option, script = container["command"]
    assert (program, option) == ("python", "-c")
    compile(script, "ready.py", "exec")


def test_companions_of_the_server_are_in_its_pod_and_extra_objects_are_templates(
    render: Callable[..., list[Object]],
) -> None:
    objects = render("companions")
    deployment = named(objects, "Deployment")["spec"]
    pod = deployment["template"]["spec"]

    assert [each["name"] for each in pod["initContainers"]] == ["warm-cache"]
    assert [each["name"] for each in pod["containers"]] == ["torchere", "log-shipper"]
    assert named(objects, "ConfigMap", "rel-notes")["data"] == {"service": "rel-torchere"}
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == deployment["selector"]["matchLabels"]
    assert pod["terminationGracePeriodSeconds"] == 90
    assert deployment["minReadySeconds"] == 15


def test_by_default_nothing_may_leave_but_questions_for_names(render: Callable[..., list[Object]]) -> None:
    (rule,) = named(render("defaults"), "NetworkPolicy")["spec"]["egress"]

    assert {port["port"] for port in rule["ports"]} == {53}
