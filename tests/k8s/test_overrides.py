"""Values that Helm merges with our defaults, or that one object has and another depends on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

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
        objects = [each for each in yaml.safe_load_all(done.stdout) if each]
        return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}

    return render


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


def test_who_brings_a_configuration_on_a_claim_is_told_of_the_tokens(
    tool: Callable[[str], str], root: Path
) -> None:
    def notes(*options: str) -> str:
        done = subprocess.run(
            [tool("helm4"), "install", "rel", root / "k8s/chart", "--dry-run=client", *options],
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout.partition("\nNOTES:\n")[2]

    theirs = ("--values", str(root / "tests/k8s/values/torchserve-chart.yaml"))

    assert "Tokens are on" in notes(*theirs)
    assert "Tokens are on" not in notes(*theirs, "--set", "server.extraArgs={--disable-token-auth}")
    assert "Tokens are on" not in notes()
