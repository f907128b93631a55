"""Renders the chart and the Kustomize base, and checks what comes out against schemas."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "1.35.0"
QUICK_GO = {"GOGC": "off", "GOMAXPROCS": "1"}  # helm runs hundreds of times; a fifth less processor time
SCHEMAS = Path(__file__).parent / "schemas"  # of custom resources, which kubernetes-validate does not know

Object = dict[str, Any]


@pytest.fixture(scope="session")
def helm(tool: Callable[[str], str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `helm template` on the chart with a file of values; `program` is helm (3) or helm4."""

    def template(
        values: Path, *options: str, program: str = "helm", release: str = "rel"
    ) -> subprocess.CompletedProcess[str]:
        command = [tool(program), "template", release, str(ROOT / "k8s/chart"), "--namespace", "torchserve"]
        return subprocess.run(
            [*command, "--kube-version", KUBERNETES, "--values", str(values), *options],
            check=False, capture_output=True, text=True, timeout=60, env=os.environ | QUICK_GO,
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
            kept[name, program] = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
        return kept[name, program]

    return rendered


# kubernetes-validate parses the definitions of all kinds again for each object, which takes most of its time.
VALIDATE = """
import functools
from kubernetes_validate import __main__, utils
utils.schema_contents = functools.cache(utils.schema_contents)
__main__.main()
"""


@pytest.fixture(scope="session")
def assert_valid(tool: Callable[[str], str]) -> Callable[[Mapping[str, list[Object]], Path], None]:
    """Checks renderings strictly: built-in kinds by kubernetes-validate, custom ones by the schemas here."""

    def validate(renderings: Mapping[str, list[Object]], folder: Path) -> None:
        built_in: list[str] = []
        custom: dict[str, list[str]] = {}
        for rendering, objects in renderings.items():
            for number, each in enumerate(objects):
                file = folder / f"{rendering}-{number}-{each['kind']}.yaml"
                file.write_text(yaml.dump(each, Dumper=yaml.CSafeDumper))
                has_schema = (SCHEMAS / f"{each['kind']}.json").exists()
                (custom.setdefault(each["kind"], []) if has_schema else built_in).append(str(file))
        if built_in:
            python = Path(tool("kubernetes-validate")).parent / "python"
            options = ["-k", KUBERNETES, "--strict", *built_in]
            output = _output_of([str(python), "-c", VALIDATE, *options])
            # It only warns of kinds that it does not know: count what passed.
            assert output.count(" passed for resource ") == len(built_in), output
        for kind, files in custom.items():
            _output_of([tool("check-jsonschema"), "--schemafile", str(SCHEMAS / f"{kind}.json"), *files])

    return validate


def _output_of(command: list[str]) -> str:
    """What a command prints that succeeds."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def policy() -> ModuleType:
    """`k8s/policy.py`, which is a script and in no package."""
    sys.path.append(str(ROOT / "k8s"))  # of the module beside it
    spec = importlib.util.spec_from_file_location("k8s_policy", ROOT / "k8s/policy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kserve_objects() -> dict[str, Object]:
    """The objects of k8s/kserve by file, and the service in the comment of the multi-node runtime."""
    texts = {path.stem: path.read_text() for path in sorted((ROOT / "k8s/kserve").glob("*.yaml"))}
    parts = texts["servingruntime-multinode"].split("\n#\n")
    (service,) = [part for part in parts if "kind: InferenceService" in part]
    lines = [line.removeprefix("#") for line in service.splitlines()]
    return {name: yaml.safe_load(text) for name, text in texts.items()} | {
        "service of several machines": yaml.safe_load("\n".join(lines))
    }


@pytest.fixture(scope="session")
def changed() -> Callable[[Object, str, Any], Object]:
    """Copies an object with another value at a path like `spec.containers.0.name`; `...` drops the field."""

    def copied(each: Object, path: str, value: Any) -> Object:
        result = copy.deepcopy(each)
        *parents, last = path.split(".")
        at: Any = result
        for step in parents:
            at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
        if value is ...:
            del at[last]
        else:
            at[last] = value
        return result

    return copied
