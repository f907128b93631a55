"""Renders the chart and the Kustomize base, and checks what comes out against schemas."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (ROOT / ".tools/bin", ROOT / ".tools/venv/bin")
KUBERNETES = "1.35.0"
SCHEMAS = Path(__file__).parent / "schemas"  # of custom resources, which kubernetes-validate does not know

Object = dict[str, Any]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Finds a tool in .tools or on PATH; skips the test when there is none."""

    def find(name: str) -> str:
        found = shutil.which(name, path=os.pathsep.join([*map(str, TOOLS), os.environ["PATH"]]))
        if found is None:
            pytest.skip(f"{name} is not installed: deploy/tools.sh fetches it")
        return found

    return find


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
def pods() -> Callable[[list[Object]], Iterator[Object]]:
    """The pod specifications among objects."""

    def find(objects: list[Object]) -> Iterator[Object]:
        for each in objects:
            if each["kind"] == "Pod":
                yield each["spec"]
            elif each["kind"] == "Deployment":
                yield each["spec"]["template"]["spec"]
            elif each["kind"] == "ClusterServingRuntime":
                yield each["spec"]

    return find


@pytest.fixture(scope="session")
def assert_restricted() -> Callable[[Object], None]:
    """A pod passes the Restricted Pod Security Standard, and some more."""

    def check(pod: Object) -> None:
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not [volume for volume in pod.get("volumes", ()) if "hostPath" in volume]
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            context = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] > 0
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert container["resources"]["requests"]

    return check
