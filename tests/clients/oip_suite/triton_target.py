"""Triton with the models of the suite: the `tritonserver` of the nvidia-pytriton wheel, standalone.

Its environment is the benchmarks' (`.peers/triton`, built by `benchmarks/run.py --peers triton`).
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oip_suite.models import SAMPLES, WIDTH
from oip_suite.target import Target, free_ports, running

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".peers" / "triton"
MODEL = Path(__file__).parent / "triton" / "model.py"
_TYPES = {name: f"TYPE_{'STRING' if name == 'BYTES' else name}" for name in SAMPLES}
_SEQUENCES = """sequence_batching { max_sequence_idle_microseconds: 60000000
oldest { max_candidate_sequences: 4 } control_input [
{ name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }] },
{ name: "ID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }] }
"""


@contextmanager
def serving(folder: Path) -> Iterator[Target]:
    """The server, with its files in `folder`."""
    found = list(ENVIRONMENT.glob("lib/python*/site-packages/pytriton/tritonserver"))
    if not found:
        pytest.skip(f"{ENVIRONMENT} is not there: python benchmarks/run.py --only tiny_mlp --peers triton")
    bundled = found[0]
    packages = bundled.parents[1]
    repository = folder / "models"
    loaded = _write_all(repository)
    ports = free_ports(2)
    environment = {
        "PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{packages / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR') or ''}",
        "PYTHONPATH": str(packages),
    }
    command = [
        str(bundled / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={_backends(folder, bundled)}",
        *(f"--{api}-address=127.0.0.1" for api in ("http", "grpc")),
        *(f"--{api}-port={port}" for api, port in zip(("http", "grpc"), ports, strict=True)),
        *("--allow-metrics=false", "--model-control-mode=explicit", "--exit-timeout-secs=5"),
        *(f"--load-model={name}" for name in loaded),
    ]
    with running(
        command, folder, said="Started HTTPService", http=f"127.0.0.1:{ports[0]}", environment=environment
    ):
        http, grpc = (f"127.0.0.1:{port}" for port in ports)
        yield Target("triton", http, grpc, http)


def _write_all(repository: Path) -> list[str]:
    for datatype in SAMPLES:
        _write(repository, f"identity_{datatype}", "identity", ["x"], ["y"], datatype=datatype)
    _write(repository, "two", "two", ["a", "b"], ["sum", "difference"])
    _write(repository, "versioned", "versioned", ["x"], ["y"], width=1, versions=(1, 2))
    _write(repository, "failing", "failing", ["x"], ["y"], width=1)
    _write(repository, "streaming", "streaming", ["x"], ["y"], datatype="INT32", width=1, batch=0)
    _write(repository, "summing", "summing", ["x"], ["y"], datatype="INT32", width=1)
    loaded = sorted(path.name for path in repository.iterdir())
    _write(repository, "spare", "identity", ["x"], ["y"])
    return loaded


def _write(
    repository: Path,
    name: str,
    kind: str,
    inputs: list[str],
    outputs: list[str],
    *,
    datatype: str = "FP32",
    width: int = WIDTH,
    versions: tuple[int, ...] = (1,),
    batch: int = 8,
) -> None:
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True)
        shutil.copy(MODEL, repository / name / str(version) / "model.py")
    tensors = "".join(
        f'{side} [{{ name: "{one}" data_type: {_TYPES[datatype]} dims: [ {width} ] }}]\n'
        for side, names in (("input", inputs), ("output", outputs))
        for one in names
    )
    (repository / name / "config.pbtxt").write_text(
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: {batch}\n{tensors}'
        "version_policy: { all {} }\ninstance_group [{ kind: KIND_CPU count: 1 }]\n"
        f'parameters: {{ key: "kind" value: {{ string_value: "{kind}" }} }}\n'
        f"model_transaction_policy {{ decoupled: {'true' if kind == 'streaming' else 'false'} }}\n"
        f"{_SEQUENCES if kind == 'summing' else ''}"
    )


def _backends(folder: Path, bundled: Path) -> Path:
    """Triton wants the backend and the stub of the interpreter's version in one folder."""
    target = folder / "backends" / "python"
    shutil.copytree(bundled / "backends" / "python", target)
    stubs = bundled / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
    shutil.copy(stubs / "triton_python_backend_stub", target)
    return target.parent
