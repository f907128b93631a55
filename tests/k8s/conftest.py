"""Renders the chart and the Kustomize base, and checks what comes out against schemas."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "1.35.0"
SCHEMAS = Path(__file__).parent / "schemas"  # of custom resources, which kubernetes-validate does not know

Object = dict[str, Any]


@pytest.fixture(scope="session")
def helm(tool: Callable[[str], str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `helm template` on the chart with a file of values; `program` is helm (3) or helm4."""

    def template(values: Path, *options: str, program: str = "helm") -> subprocess.CompletedProcess[str]:
        command = [tool(program), "template", "rel", str(ROOT / "k8s/chart"), "--namespace", "torchserve"]
        return subprocess.run(
            [*command, "--kube-version", KUBERNETES, "--values", str(values), *options],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return template


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., list[Object]]:
    """The objects that the chart makes of a file of values in tests/k8s/values."""
    kept: dict[tuple[str, str], list[Object]] = {}

    def rendered(name: str, program: str = "helm") -> list[Object]:
        if (name, program) not in kept:
            done = helm(Path(__file__).parent / f"values/{name}.yaml", program=program)
            assert done.returncode == 0, done.stderr
            kept[name, program] = [each for each in yaml.safe_load_all(done.stdout) if each]
        return kept[name, program]

    return rendered


@pytest.fixture(scope="session")
def assert_valid(tool: Callable[[str], str]) -> Callable[[list[Object], Path], None]:
    """Checks objects strictly: built-in kinds by kubernetes-validate, custom ones by the schemas here."""

    def validate(objects: list[Object], folder: Path) -> None:
        own = [each for each in objects if (SCHEMAS / f"{each['kind']}.json").exists()]
        built_in = [each for each in objects if each not in own]
        (folder / "built-in.yaml").write_text(yaml.safe_dump_all(built_in))
        if built_in:
            command = [
                tool("kubernetes-validate"),
                "-k",
                KUBERNETES,
                "--strict",
                str(folder / "built-in.yaml"),
            ]
            _assert_quiet(command, len(built_in))
        for number, each in enumerate(own):
            (folder / f"{number}.yaml").write_text(yaml.safe_dump(each))
            schema = str(SCHEMAS / f"{each['kind']}.json")
            _assert_quiet([tool("check-jsonschema"), "--schemafile", schema, str(folder / f"{number}.yaml")])

    return validate


def _assert_quiet(command: list[str], passed: int | None = None) -> None:
    """The command succeeds. kubernetes-validate only warns of kinds it does not know: count what passed."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    if passed is not None:
        assert (done.stdout + done.stderr).count(" passed for resource ") == passed, done.stdout + done.stderr


@pytest.fixture(scope="session")
def policy() -> ModuleType:
    """`k8s/policy.py`, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("k8s_policy", ROOT / "k8s/policy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
