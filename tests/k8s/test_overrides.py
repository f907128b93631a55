"""Values that Helm merges with our defaults, or that one object has and another depends on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchere.serving.config.properties import parse_properties

Object = dict[str, Any]


@pytest.fixture
def rendered(
    helm: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Callable[[Object], dict[str, Object]]:
    """The objects that the chart makes of these values, by kind and name."""

    def render(values: Object) -> dict[str, Object]:
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        done = helm(tmp_path / "values.yaml")
        assert done.returncode == 0, done.stderr
        objects = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
        return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}

    return render


@pytest.fixture
def properties(rendered: Callable[[Object], dict[str, Object]]) -> Callable[[Object], dict[str, str]]:
    """What the server's reader finds in the config.properties that the chart makes of `server.properties`."""

    def read(values: Object) -> dict[str, str]:
        config = rendered({"server": {"properties": values}})["ConfigMap/rel-torchere"]
        return {entry.key: entry.value for entry in parse_properties(config["data"]["config.properties"])}

    return read


def test_properties_arrive_as_they_were_written(properties: Callable[[Object], dict[str, str]]) -> None:
    given = {
        "allowed_urls": r"https://models\.internal/.*",
        "default_isolation": "shared\\",  # alone, it would continue on the next line
        "cors_allowed_origin": r"\u0041\n\\",
        "cors_allowed_headers": '  blanks, \t and = : # ! "quotes" \t',
        "cors_allowed_methods": " ",
        "install_py_dep_per_model": "=",
        "worker_sandbox": "",
        "zz_last": "a blank at the end ",
    }

    found = properties(given)

    assert {key: found[key] for key in given} == given
    assert found["drain_delay_s"] == "10"  # the line after default_isolation's is one of its own


def test_a_zero_or_a_false_property_is_no_missing_one(properties: Callable[[Object], dict[str, str]]) -> None:
    given = {
        "grpc_inference_max_connection_age_ms": 0,  # the chart suggests others for both
        "grpc_inference_max_connection_age_grace_ms": "",
        "decode_input_request": False,
    }

    found = properties(given)

    assert [found[key] for key in given] == ["0", "", "false"]


def test_names_of_digits_stay_texts(
    rendered: Callable[[Object], dict[str, Object]], assert_valid: Callable[..., None], tmp_path: Path
) -> None:
    given = {
        "nameOverride": "123",
        "priorityClassName": "100",
        "runtimeClassName": "1",
        "serviceAccount": {"name": "7"},
        "modelStore": {"type": "pvc", "pvc": {"claimName": "2024", "create": True, "subPath": "1, 2"}},
        "auth": {"enabled": True, "secretName": "1", "secretKey": "1.0"},
        "tls": {"enabled": True, "secretName": "2"},
        "autoscaling": {"enabled": True, "metric": "1"},
        "ingress": {"enabled": True, "className": "1", "hosts": [{"host": "models.example"}]},
        "service": {"type": "LoadBalancer", "loadBalancerClass": "1"},
    }

    objects = rendered(given)

    assert_valid({"digits": list(objects.values())}, tmp_path)
    pod = objects["Deployment/rel-123"]["spec"]["template"]
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "123"
    (mount,) = [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "store"]
    assert mount["subPath"] == "1, 2"


def test_a_variable_of_the_values_takes_the_place_of_the_charts(
    rendered: Callable[[Object], dict[str, Object]],
) -> None:
    pods = [
        rendered(
            {"server": {"env": env}, "modelStore": {"type": "init", "init": {"image": "fetch:1", "env": env}}}
        )
        for env in ([], [{"name": "HOME", "value": "/cache"}])
    ]

    for objects, home in zip(pods, ("/tmp", "/cache"), strict=True):
        pod = objects["Deployment/rel-torchere"]["spec"]["template"]["spec"]
        for container, other in ((pod["containers"][0], "TEMP"), (pod["initContainers"][0], "MODEL_STORE")):
            names = [each["name"] for each in container["env"]]
            assert sorted(names) == sorted(
                ["HOME", other]
            )  # server-side apply refuses a name that comes twice
            assert {"name": "HOME", "value": home} in container["env"]


def test_a_spread_has_the_servers_labels_only_where_it_names_none(
    rendered: Callable[[Object], dict[str, Object]],
) -> None:
    spread = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    selectors: list[Object] = [{"matchLabels": {"team": "vision"}}, {}]
    given = [spread, *(spread | {"labelSelector": each} for each in selectors)]

    deployment = rendered({"topologySpreadConstraints": given})["Deployment/rel-torchere"]["spec"]

    made = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert made == [spread | {"labelSelector": deployment["selector"]}, *given[1:]]


def test_recreate_has_nothing_of_the_rolling_update_that_helm_merges_in(
    rendered: Callable[[Object], dict[str, Object]],
) -> None:
    strategy = rendered({"strategy": {"type": "Recreate"}})["Deployment/rel-torchere"]["spec"]["strategy"]

    assert strategy == {"type": "Recreate"}  # Kubernetes refuses it otherwise


def test_a_half_given_rolling_update_keeps_the_other_half(
    rendered: Callable[[Object], dict[str, Object]],
) -> None:
    strategy = rendered({"strategy": {"rollingUpdate": {"maxSurge": "50%"}}})["Deployment/rel-torchere"]

    assert strategy["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "50%", "maxUnavailable": 0}


def test_a_small_limit_of_torchserves_chart_is_not_below_what_we_request(
    rendered: Callable[[Object], dict[str, Object]],
) -> None:
    deployment = rendered({"torchserve": {"n_cpu": 0.5, "memory_limit": "1Gi"}})["Deployment/rel-torchere"]
    (server,) = deployment["spec"]["template"]["spec"]["containers"]

    assert server["resources"]["requests"] == server["resources"]["limits"] == {"cpu": "0.5", "memory": "1Gi"}


def test_the_older_values_of_torchserves_chart_name_no_claim_and_request_less_than_their_limit(
    rendered: Callable[[Object], dict[str, Object]], root: Path
) -> None:
    theirs = yaml.safe_load((root / "tests/k8s/values/torchserve-chart-older.yaml").read_text())
    pod = rendered(theirs)["Deployment/rel-torchere"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]

    assert server["resources"]["requests"] == {"cpu": "1", "memory": "1Gi"}
    assert server["resources"]["limits"] == {"cpu": "1", "memory": "4Gi", "nvidia.com/gpu": 1}
    claims = [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
    assert {"claimName": "model-store-claim", "readOnly": True} in claims
    assert "--ts-config=/home/model-server/shared/config/config.properties" in server["args"]


@pytest.mark.parametrize(
    ("hooks", "sleep"), [({"postStart": {"exec": {"command": ["true"]}}}, "10"),
                         ({"preStop": {"exec": {"command": ["sleep", "3"]}}}, "3")]
)  # fmt: skip
def test_only_another_hook_of_its_end_replaces_the_sleep_of_a_pod_with_a_configuration_on_a_claim(
    hooks: Object, sleep: str, rendered: Callable[[Object], dict[str, Object]], root: Path
) -> None:
    theirs = yaml.safe_load((root / "tests/k8s/values/torchserve-chart.yaml").read_text())

    pod = rendered(theirs | {"lifecycle": hooks})["Deployment/rel-torchere"]["spec"]["template"]["spec"]

    wanted = hooks | {"preStop": {"exec": {"command": ["sleep", sleep]}}}
    assert pod["containers"][0]["lifecycle"] == wanted


def test_the_user_may_be_left_to_the_platform(
    rendered: Callable[[Object], dict[str, Object]], root: Path
) -> None:
    text = (root / "docs/kubernetes.md").read_text().partition("\n## OpenShift\n")[2]
    objects = rendered(yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0]))

    for pod in (objects["Deployment/rel-torchere"]["spec"]["template"]["spec"],
                objects["Pod/rel-torchere-test-ready"]["spec"]):  # fmt: skip
        assert {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys() == set()
        assert pod["securityContext"]["runAsNonRoot"] is True
    egress = objects["NetworkPolicy/rel-torchere"]["spec"]["egress"]
    assert {53, 5353} == {port["port"] for rule in egress for port in rule["ports"]}


@pytest.mark.parametrize(
    ("endpoint", "policy"),
    [
        ("https://s3.example", {}),  # 443
        ("http://s3.example:9000", {"storeEgress": [{"ports": [{"protocol": "TCP", "port": 9000}]}]}),
        ("http://s3.example:9000", {"storeEgress": [{"ports": [{"port": 8000, "endPort": 9500}]}]}),
        ("http://s3.example:9000", {"storeEgress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]}),
        ("https://[fd00::1]:9443", {"extraEgress": [{"ports": [{"port": "objects"}]}]}),
        ("http://s3.example:9000", {"enabled": False}),
    ],
)
def test_a_store_at_any_endpoint_is_taken_whose_port_is_open(
    endpoint: str, policy: Object, rendered: Callable[[Object], dict[str, Object]]
) -> None:
    store = {"type": "s3", "s3": {"uri": "s3://models/production", "endpointUrl": endpoint}}

    objects = rendered({"modelStore": store, "networkPolicy": policy})

    (fetch,) = objects["Deployment/rel-torchere"]["spec"]["template"]["spec"]["initContainers"]
    assert {"name": "AWS_ENDPOINT_URL", "value": endpoint} in fetch["env"]


def test_the_agents_that_give_workload_identities_are_reached_as_documented(
    rendered: Callable[[Object], dict[str, Object]], root: Path
) -> None:
    text = (root / "docs/kubernetes.md").read_text().partition("\nA workload identity of AWS")[2]
    values = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    objects = rendered({**values, "modelStore": {"type": "gcs", "gcs": {"uri": "gs://models/production"}}})

    egress = objects["NetworkPolicy/rel-torchere"]["spec"]["egress"]
    opened = {
        (peer["ipBlock"]["cidr"], port["port"])
        for rule in egress
        for peer in rule.get("to", ())
        for port in rule["ports"]
        if "ipBlock" in peer
    }
    assert opened == {("169.254.169.252/32", 988), ("169.254.169.254/32", 80), ("169.254.170.23/32", 80)}
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in egress
    assert "worker_sandbox=strict" in objects["ConfigMap/rel-torchere"]["data"]["config.properties"]


def test_helm_test_gets_through_a_narrow_network_policy_and_is_no_server(
    rendered: Callable[[Object], dict[str, Object]],
) -> None:
    mine = {"podSelector": {"matchLabels": {"client": "yes"}}}
    objects = rendered({"networkPolicy": {"inferenceFrom": [mine]}})
    labels = objects["Pod/rel-torchere-test-ready"]["metadata"]["labels"]

    first, second = objects["NetworkPolicy/rel-torchere"]["spec"]["ingress"][0]["from"]

    assert first == mine
    assert second["podSelector"]["matchLabels"].items() <= labels.items()
    for service in (each for name, each in objects.items() if name.startswith("Service/")):
        assert not service["spec"]["selector"].items() <= labels.items()


def test_keda_adds_up_the_pods_of_a_scrape_that_does_not_name_them(
    rendered: Callable[[Object], dict[str, Object]], tool: Callable[[str], str], tmp_path: Path
) -> None:
    scaled = rendered({"keda": {"enabled": True}})["ScaledObject/rel-torchere"]
    labels = 'namespace="torchserve", service="rel-torchere-metrics"'
    series = [
        {"series": f'{name}{{{labels}, {more}instance="{pod}", model="{model}"}}', "values": f"{value}+0x9"}
        for pod, model, saturation in (("a", "net", 1), ("a", "idle", 0), ("b", "net", 0.5))
        for name, more, value in (
            ("torchere_saturation", "", saturation),
            ("torchere_executors", 'state="ready", ', 2),
        )
    ]
    query = {"expr": scaled["spec"]["triggers"][0]["metadata"]["query"], "eval_time": "5m"}
    case = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [query | {"exp_samples": [{"value": 1.5}]}],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"tests": [case]}))

    tested = subprocess.run(
        [tool("promtool"), "test", "rules", tmp_path / "tests.yaml"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.fixture
def notes(tool: Callable[[str], str], root: Path) -> Callable[..., str]:
    """What Helm prints after an installation with these options."""

    def printed(*options: str) -> str:
        done = subprocess.run(
            [tool("helm4"), "install", "rel", root / "k8s/chart", "--dry-run=client", *options],
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout.partition("\nNOTES:\n")[2]

    return printed


def test_the_notes_name_the_pods_of_a_server(notes: Callable[..., str]) -> None:
    groups = ("--set", "leaderWorkerSet.enabled=true,leaderWorkerSet.secretName=ranks")

    assert "port-forward deploy/rel-torchere 8081" in notes()
    assert "port-forward sts/rel-torchere 8081" in notes(*groups)


def test_who_brings_a_configuration_on_a_claim_is_told_of_the_tokens(
    notes: Callable[..., str], root: Path
) -> None:
    theirs = ("--values", str(root / "tests/k8s/values/torchserve-chart.yaml"))

    assert "Tokens are on" in notes(*theirs)
    assert "Tokens are on" not in notes(*theirs, "--set", "server.extraArgs={--disable-token-auth}")
    assert "Tokens are on" not in notes()


@pytest.fixture
def deployed(tool: Callable[[str], str], root: Path, tmp_path: Path) -> Callable[..., list[Object]]:
    """The Deployments of a chart that has ours among its dependencies under these aliases; `off` is off."""

    def render(program: str, release: str, *aliases: str) -> list[Object]:
        shutil.copytree(root / "k8s/chart", tmp_path / "charts/torchere")
        one = {"name": "torchere", "version": "0.1.0"}
        of = [one | ({"alias": name} if name != "torchere" else {}) | {"condition": f"{name}.enabled"}
              for name in aliases]  # fmt: skip
        chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": of}
        (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
        values = {name: {"enabled": name != "off"} for name in aliases}
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        done = subprocess.run(
            [tool(program), "template", release, tmp_path, "--kube-version", "1.35.0"],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made = yaml.load_all(done.stdout, yaml.CSafeLoader)
        return [each for each in made if each and each["kind"] == "Deployment"]

    return render


@pytest.mark.parametrize("program", ["helm", "helm4"])
def test_a_chart_may_have_it_twice_among_its_dependencies_on_a_condition(
    program: str, deployed: Callable[..., list[Object]]
) -> None:
    found = deployed(program, "rel", "bert", "resnet", "off")

    assert [each["metadata"]["name"] for each in found] == ["rel-bert", "rel-resnet"]
    labels = [each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] for each in found]
    assert labels == ["bert", "resnet"]


@pytest.mark.parametrize("program", ["helm", "helm4"])
@pytest.mark.parametrize(
    ("release", "aliases", "names"),
    [
        ("llama-bert", ("bert", "llama"), ["llama-bert-bert", "llama-bert-llama"]),
        ("bert", ("bert", "llama"), ["bert", "bert-llama"]),
        (
            "torchere-prod",
            ("torchere", "prod"),
            ["torchere-prod", "torchere-prod-prod"],
        ),  # the first has no alias
    ],
)
def test_each_of_several_dependencies_has_a_name_of_its_own(
    release: str,
    aliases: tuple[str, ...],
    names: list[str],
    program: str,
    deployed: Callable[..., list[Object]],
) -> None:
    found = deployed(program, release, *aliases)

    assert sorted(each["metadata"]["name"] for each in found) == names
