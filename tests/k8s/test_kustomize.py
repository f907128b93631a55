"""The Kustomize base: as valid, as closed and as well drained as the chart."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import configure

Object = dict[str, Any]


@pytest.fixture(scope="module")
def base(tool: Callable[[str], str], root: Path) -> dict[str, Object]:
    """The objects of the base, by kind and name."""
    built = subprocess.run(
        [tool("kubectl"), "kustomize", root / "k8s/base"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(built.stdout)}


def test_objects_are_valid_for_kubernetes(
    base: dict[str, Object], assert_valid: Callable[..., None], tmp_path: Path
) -> None:
    assert_valid({"base": list(base.values())}, tmp_path)


def test_everything_keeps_to_the_policy(base: dict[str, Object], policy: ModuleType) -> None:
    assert policy.violations(base.values()) == []


def test_everything_selects_its_own_pods_and_no_others(base: dict[str, Object]) -> None:
    labels = {"app.kubernetes.io/name": "torchere"}

    assert base["Deployment/torchere"]["spec"]["template"]["metadata"]["labels"] == labels
    assert base["Service/torchere"]["spec"]["selector"] == labels
    assert base["PodDisruptionBudget/torchere"]["spec"]["selector"] == {"matchLabels": labels}
    assert base["NetworkPolicy/torchere"]["spec"]["podSelector"] == {"matchLabels": labels}


def test_the_start_waits_for_the_models_and_liveness_for_the_start(base: dict[str, Object]) -> None:
    deployment = base["Deployment/torchere"]["spec"]
    server = deployment["template"]["spec"]["containers"][0]
    startup, liveness = server["startupProbe"], server["livenessProbe"]

    assert startup["httpGet"]["path"] == "/startupz"
    assert liveness["httpGet"]["path"] == "/livez"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= deployment["progressDeadlineSeconds"]


def test_the_configuration_is_understood_and_leaves_time_to_drain(
    root: Path, base: dict[str, Object]
) -> None:
    found = configure(read_properties(root / "k8s/base/config.properties"))

    assert found.of_level("error") + found.of_level("warning") == ()
    assert found.settings.management_address.host == "127.0.0.1"
    grace_s = base["Deployment/torchere"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > found.settings.drain_delay_s + found.settings.drain_timeout_s
