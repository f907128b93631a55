"""A model over several machines: the chart's LeaderWorkerSet, and KServe's runtime with workers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from torchere.serving.commands.join import add_join, address_of
from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import configure

Object = dict[str, Any]
VALUES = """
leaderWorkerSet: {enabled: true, secretName: ranks, size: 3}
replicaCount: 2
modelStore: {type: pvc, pvc: {claimName: models}}
models: [{archive: large.mar}]
gpu: {count: 4}
podAnnotations: {sidecar.istio.io/inject: "false"}
"""


@pytest.fixture(scope="module")
def objects(
    helm: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Object]:
    """What the chart makes of the values, by kind and name."""
    values = tmp_path_factory.mktemp("chart") / "values.yaml"
    values.write_text(VALUES)
    done = helm(values)
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.fixture(scope="module")
def pods(objects: dict[tuple[str, str], Object]) -> tuple[Object, Object]:
    """The templates of the leader and of the other pods."""
    template = objects["LeaderWorkerSet", "rel-torchere"]["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def arguments(command: list[str]) -> argparse.Namespace:
    """Read the arguments of `torchere join`."""
    parser = argparse.ArgumentParser()
    add_join(parser)
    assert command[:2] == ["torchere", "join"]
    return parser.parse_args(command[2:])


def test_the_set_takes_the_place_of_the_deployment(objects: dict[tuple[str, str], Object]) -> None:
    assert not [name for kind, name in objects if kind == "Deployment"]
    spec = objects["LeaderWorkerSet", "rel-torchere"]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 3)
    assert spec["startupPolicy"] == "LeaderCreated"  # a leader that waits for its group is not ready


def test_its_objects_are_valid_and_keep_to_the_policy(
    objects: dict[tuple[str, str], Object],
    pods: tuple[Object, Object],
    assert_valid: Callable[..., None],
    policy: ModuleType,
    tmp_path: Path,
) -> None:
    assert policy.violations(objects.values()) == []
    # The templates are pods of Kubernetes, whose schemas are at hand for Deployments.
    as_deployments = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": f"of-{number}"},
            "spec": {"selector": {"matchLabels": pod["metadata"]["labels"]}, "template": pod},
        }
        for number, pod in enumerate(pods)
    ]
    assert_valid({"set": [*objects.values(), *as_deployments]}, tmp_path)


def test_no_service_takes_the_name_of_one_that_the_controller_makes_for_the_pods(
    objects: dict[tuple[str, str], Object],
) -> None:
    spec = objects["LeaderWorkerSet", "rel-torchere"]["spec"]
    shared = spec.get("networkConfig", {}).get("subdomainPolicy") != "UniquePerReplica"
    leaders = {f"rel-torchere-{number}" for number in range(spec["replicas"])}

    made = {"rel-torchere"} if shared else leaders

    # The controller leaves such a one as it is.
    assert made & {name for kind, name in objects if kind == "Service"} == set()


def test_only_the_leader_is_reached_by_clients(
    objects: dict[tuple[str, str], Object], pods: tuple[Object, Object]
) -> None:
    leader, ranks = (pod["metadata"]["labels"].items() for pod in pods)
    for kind in ("Service", "PodDisruptionBudget"):
        for each in (object_ for (found, _), object_ in objects.items() if found == kind):
            selector = each["spec"]["selector"]
            assert selector.get("matchLabels", selector).items() <= leader
            assert not selector.get("matchLabels", selector).items() <= ranks


def test_all_pods_have_the_annotations_of_the_values(pods: tuple[Object, Object]) -> None:
    for pod in pods:
        assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"


def test_the_pods_of_a_group_meet_where_its_leader_listens(
    objects: dict[tuple[str, str], Object], pods: tuple[Object, Object], tmp_path: Path
) -> None:
    text = objects["ConfigMap", "rel-torchere"]["data"]["config.properties"]
    (tmp_path / "config.properties").write_text(text)
    settings = configure(read_properties(tmp_path / "config.properties")).checked()
    (ranks,) = pods[1]["spec"]["containers"]
    options = arguments(ranks["args"])
    host, port = address_of(options.leader.replace("$(LWS_LEADER_ADDRESS)", "leader.example"))
    assert (host, port) == ("leader.example", settings.rendezvous.port)
    assert settings.rendezvous.host == "0.0.0.0"
    mounts = {each["mountPath"]: each["name"] for each in ranks["volumeMounts"]}
    assert settings.rendezvous.secret_file is not None
    assert mounts[str(settings.rendezvous.secret_file.parent)] == "rendezvous"
    assert mounts[str(settings.model_store)] == "store"
    assert mounts[str(Path(options.ts_config).parent)] == "config"
    for pod in pods:
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_the_ranks_speak_to_each_other_and_to_nobody_else(
    objects: dict[tuple[str, str], Object], pods: tuple[Object, Object]
) -> None:
    policy = objects["NetworkPolicy", "rel-torchere-ranks"]["spec"]
    (allowed,) = policy["ingress"]
    assert "ports" not in allowed  # gloo and NCCL take any
    selectors = [each["podSelector"]["matchLabels"].items() for each in allowed["from"]]
    assert all(any(labels <= pod["metadata"]["labels"].items() for labels in selectors) for pod in pods)
    selected = {each["key"]: each["values"] for each in policy["podSelector"]["matchExpressions"]}
    for pod in pods:
        assert all(pod["metadata"]["labels"][key] in values for key, values in selected.items())


def test_the_runtime_of_kserve_has_workers_that_join_its_head(root: Path, policy: ModuleType) -> None:
    runtime = yaml.safe_load((root / "k8s/kserve/servingruntime-multinode.yaml").read_text())["spec"]
    (head,), (worker,) = runtime["containers"], runtime["workerSpec"]["containers"]
    settings = configure(
        [], {each["name"]: each["value"] for each in head["env"]} | {"TS_ENABLE_ENVVARS_CONFIG": "true"}
    )
    assert not settings.of_level("error")
    options = arguments(worker["args"])
    # What KServe sets in a worker: the head's service has the generation of the InferenceService in its name.
    variables = {"ISVC_NAME": "large", "HEAD_SVC": "large-head-3", "POD_NAMESPACE": "serving"}
    leader = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], options.leader)
    assert address_of(leader) == ("large-head-3.serving.svc.cluster.local", 29400)
    secret = {each["name"]: each["value"] for each in head["env"]}["TS_RENDEZVOUS_SECRET_FILE"]
    assert options.secret_file == secret
    for container in (head, worker):
        assert str(Path(secret).parent) in [each["mountPath"] for each in container["volumeMounts"]]
        assert container["image"] == head["image"]
    for pod in (runtime, runtime["workerSpec"]):
        assert list(policy.pod_violations(pod)) == []
