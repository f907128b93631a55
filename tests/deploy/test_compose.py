"""The compose file fits the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import configure


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, dict[str, Any]]:
    parsed = yaml.safe_load((root / "deploy/compose.yaml").read_text())
    services: dict[str, dict[str, Any]] = parsed["services"]
    return services


def test_every_mounted_file_is_there(root: Path, services: dict[str, dict[str, Any]]) -> None:
    mounts = [
        mount for service in services.values() for mount in service["volumes"] if isinstance(mount, str)
    ]
    sources = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]

    assert len(sources) == 4
    assert [source for source in sources if not (root / "deploy" / source).exists()] == []


def test_nothing_is_published_beyond_this_machine_and_management_not_at_all(
    services: dict[str, dict[str, Any]],
) -> None:
    ports = [port for service in services.values() for port in service["ports"]]

    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not [port for port in ports if port.endswith((":8081", ":7071"))]


def test_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    others = [service["image"] for service in services.values() if "build" not in service]

    assert len(others) == 2
    assert all(":" in image and not image.endswith(":latest") for image in others)


def test_the_container_is_killed_only_after_the_drain(
    root: Path, services: dict[str, dict[str, Any]]
) -> None:
    settings = configure(read_properties(root / "deploy/config.properties")).settings

    grace_s = float(services["torchere"]["stop_grace_period"].removesuffix("s"))

    assert grace_s > settings.drain_delay_s + settings.drain_timeout_s


def test_compiled_models_can_be_run_from_where_they_are_unpacked(services: dict[str, dict[str, Any]]) -> None:
    options = dict(mount.split(":") for mount in services["torchere"]["tmpfs"])

    for folder in ("/tmp", "/home/model-server/tmp"):  # Docker mounts a tmpfs noexec unless told otherwise
        assert "exec" in options[folder].split(",")


def test_grafana_looks_for_dashboards_where_they_are_mounted(
    root: Path, services: dict[str, dict[str, Any]]
) -> None:
    provider = yaml.safe_load((root / "deploy/grafana/provisioning/dashboards/dashboards.yaml").read_text())
    targets = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]

    assert provider["providers"][0]["options"]["path"] in targets
    assert list((root / "deploy/grafana/dashboards").glob("*.json"))


def test_grafana_finds_the_prometheus_of_the_file(root: Path, services: dict[str, dict[str, Any]]) -> None:
    source = yaml.safe_load((root / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())

    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in services["prometheus"]["ports"]
