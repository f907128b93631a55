"""Values that can't work are refused with a message that names them, before anything reaches a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

REFUSED = sorted((Path(__file__).parent / "refused").glob("*.yaml"))


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
