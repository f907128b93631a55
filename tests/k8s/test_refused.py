"""Values that can't work are refused with a message that names them, before anything reaches a cluster."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

Object = dict[str, Any]
FEATURES: Object = {
    "autoscaling": {"enabled": True},
    "dashboards": {"enabled": True},
    "ingress": {"enabled": True, "hosts": [{"host": "models.example"}]},
    "httpRoute": {"enabled": True, "grpc": True, "parentRefs": [{"name": "gateway"}]},
    "modelStore": {"type": "pvc", "pvc": {"claimName": "models", "create": True}},
    "prometheusRule": {"enabled": True},
    "service": {"type": "LoadBalancer"},
    "serviceMonitor": {"enabled": True},
    "tls": {"enabled": True, "secretName": "tls"},
}
REFUSED = sorted((Path(__file__).parent / "refused").glob("*.yaml"))


def emptied(defaults: Object, schema: Object, needed: bool) -> Object:
    """The values that the schema needs, or all others, each of them null."""
    result: Object = {}
    for name, value in defaults.items():
        below = schema["properties"][name]
        is_required = name in schema.get("required", ())
        if is_required and "properties" in below:
            result[name] = emptied(value, below, needed)
        elif is_required == needed:
            result[name] = None
    return result


def leaves(values: Object, path: str = "") -> Iterator[str]:
    """The paths of the nulls among values, with dots."""
    for name, value in values.items():
        if value is None:
            yield path + name
        else:
            yield from leaves(value, f"{path}{name}.")


def is_told(path: str, message: str) -> bool:
    """Whether helm 3 (a line for a value) or helm 4 (one for a section) says that a value is missing."""
    above, _, name = path.rpartition(".")
    section = re.search(rf"- at '{'/' * bool(above)}{above.replace('.', '/')}': missing propert.*", message)
    return f"- {above or '(root)'}: {name} is required" in message or bool(
        section and f"'{name}'" in section[0]
    )


@pytest.mark.parametrize("program", ["helm", "helm4"])
@pytest.mark.parametrize("values", REFUSED, ids=lambda path: path.stem)
def test_it_is_refused(
    values: Path, program: str, helm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    expected = values.read_text().splitlines()[0].removeprefix("# expect: ")

    done = helm(values, program=program)

    assert done.returncode != 0
    # helm 3 writes paths with dots, helm 4 with slashes
    assert expected in done.stderr or expected in done.stderr.replace("/", "."), done.stderr


def test_image_volumes_are_refused_where_kubernetes_has_none(
    helm: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = helm(Path(__file__).parent / "values/image-volume.yaml", "--kube-version", "1.30.0")

    assert "Kubernetes 1.33 or later, found v1.30.0" in done.stderr


@pytest.mark.parametrize("release", ["123", "net.v1"])
def test_a_release_whose_service_could_not_have_its_name_is_refused(
    release: str, helm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    defaults = Path(__file__).parent / "values/defaults.yaml"

    done = helm(defaults, release=release)

    assert f"the release name {release} gives the Service the name {release}-torchere" in done.stderr
    assert helm(defaults, "--set", "fullnameOverride=net", release=release).returncode == 0


@pytest.mark.parametrize("program", ["helm", "helm4"])
def test_an_empty_value_is_refused_where_the_chart_needs_one(
    program: str, helm: Callable[..., subprocess.CompletedProcess[str]], root: Path, tmp_path: Path
) -> None:
    schema = json.loads((root / "k8s/chart/values.schema.json").read_text())
    defaults = yaml.safe_load((root / "k8s/chart/values.yaml").read_text())
    needed, others = emptied(defaults, schema, needed=True), emptied(defaults, schema, needed=False)
    sections = {name: None for name in schema["required"]}

    for values in (needed, sections):
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        done = helm(tmp_path / "values.yaml", program=program)
        for path in leaves(values):
            assert is_told(path, done.stderr), (path, done.stderr)
    # Every other value may be empty: `tolerations:` with its items in comments.
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(others))
    for feature in ({}, FEATURES):
        (tmp_path / "features.yaml").write_text(yaml.safe_dump(feature))
        done = helm(tmp_path / "values.yaml", "--values", str(tmp_path / "features.yaml"), program=program)
        assert done.returncode == 0, done.stderr
        assert not re.search(r"<nil>|%!|no value", done.stdout)
