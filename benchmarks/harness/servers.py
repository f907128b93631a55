"""How each contender is started, as its own documents say. Every one binds to the loopback interface only.

All serve models with one intra-op thread, so that a second worker finds a core.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness.environments import environment, site_packages
from harness.models import MAX_BATCH, Workshop
from harness.paths import SCRIPTS
from harness.processes import Endpoint, free_ports, serving
from harness.trees import compile_tree

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
WAIT_MS = 1  # how long a batch waits for company, in every server that batches


@contextmanager
def torchere(shop: Workshop, archive: str, workers: int, properties: str = "") -> Iterator[Endpoint]:
    """`torchere serve` of the shop's tree, with its defaults but for ports and tokens."""
    with torchere_with(shop, {archive: shop.archive(archive)}, workers, properties) as endpoint:
        yield endpoint


@contextmanager
def torchere_with(
    shop: Workshop, models: Mapping[str, str], workers: int, properties: str = ""
) -> Iterator[Endpoint]:
    """The same with any number of models: their names, and the files in the store."""
    compile_tree(shop.tree)
    command = [shop.tree.program, "serve", "--ncs", "--disable-token-auth"]
    with _configured(shop, command, models, workers, properties) as endpoint:
        yield endpoint


@contextmanager
def torchserve(shop: Workshop, archive: str, workers: int, properties: str = "") -> Iterator[Endpoint]:
    """TorchServe 0.12.0 with the same archive and the same properties."""
    binaries = environment("torchserve") / "bin"
    # It starts Python by name, and writes logs where it stands.
    path = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", **_ONE_THREAD}
    command = [str(binaries / "torchserve"), "--start", "--foreground", "--ncs", "--disable-token-auth"]
    models = {archive: shop.archive(archive)}
    with _configured(shop, command, models, workers, properties, **path) as endpoint:
        yield endpoint


@contextmanager
def _configured(
    shop: Workshop,
    command: list[str],
    models: Mapping[str, str],
    workers: int,
    properties: str,
    **extra: str,
) -> Iterator[Endpoint]:
    ports = free_ports(5)
    with tempfile.TemporaryDirectory(dir=shop.folder) as place:
        # Else TorchServe's process number and sockets lie where any other TorchServe has its own, too.
        extra |= {"TMPDIR": place, "TEMP": place}
        config = Path(place, "config.properties")
        config.write_text(
            f"inference_address=http://127.0.0.1:{ports[0]}\n"
            f"management_address=http://127.0.0.1:{ports[1]}\n"
            f"metrics_address=http://127.0.0.1:{ports[2]}\n"
            f"grpc_inference_port={ports[3]}\n"
            f"grpc_management_port={ports[4]}\n"
            f"default_workers_per_model={workers}\n"
            f"disable_token_authorization=true\n{properties}",
            encoding="utf-8",
        )
        whole = [*command, "--model-store", str(shop.store), "--ts-config", str(config)]
        whole += ["--models", *(f"{name}={file}" for name, file in models.items())] if models else []
        started = serving(
            whole,
            Path(place),
            ports[0],
            grpc_port=ports[3],
            management_port=ports[1],
            environment=extra,
        )
        with started as endpoint:
            yield endpoint


@contextmanager
def http_echo(shop: Workshop) -> Iterator[Endpoint]:
    """The HTTP server that does nothing."""
    (port,) = free_ports(1)
    command = [sys.executable, str(SCRIPTS / "http_echo.py"), str(port)]
    with (
        tempfile.TemporaryDirectory(dir=shop.folder) as place,
        serving(command, Path(place), port) as endpoint,
    ):
        yield endpoint


@contextmanager
def mosec(shop: Workshop, width: int, layers: int, *, fast_json: bool = False) -> Iterator[Endpoint]:
    """The server of mosec, with one worker and its own batching; `fast_json`: see `peers/mosec_server.py`."""
    python = environment("mosec") / "bin" / "python"
    (port,) = free_ports(1)
    command = [str(python), str(SCRIPTS / "mosec_server.py"), "--address", "127.0.0.1", "--port", str(port)]
    extra = {"FAST_JSON": "1"} if fast_json else {}
    with _scripted(shop, command, port, width, layers, **extra) as endpoint:
        yield endpoint


@contextmanager
def litserve(shop: Workshop, width: int, layers: int) -> Iterator[Endpoint]:
    """LitServe with one worker and its own batching."""
    python = environment("litserve") / "bin" / "python"
    (port,) = free_ports(1)
    command = [str(python), str(SCRIPTS / "litserve_server.py")]
    with _scripted(shop, command, port, width, layers) as endpoint:
        yield endpoint


@contextmanager
def _scripted(
    shop: Workshop, command: list[str], port: int, width: int, layers: int, **variables: str
) -> Iterator[Endpoint]:
    extra = {
        **variables,
        "MODEL": str(shop.mlp(width, layers)),
        "PORT": str(port),
        "BATCH": str(MAX_BATCH),
        "WAIT_MS": str(WAIT_MS),
        **_ONE_THREAD,
    }
    with (
        tempfile.TemporaryDirectory(dir=shop.folder) as place,
        serving(command, Path(place), port, environment=extra) as endpoint,
    ):
        yield endpoint


@contextmanager
def triton(shop: Workshop, width: int, layers: int) -> Iterator[Endpoint]:
    """The `tritonserver` of the nvidia-pytriton wheel, alone, with its Python backend."""
    folder = environment("triton")
    packages = site_packages(folder)
    ports = free_ports(3)
    libraries = [str(packages / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR") or ""]
    extra = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": str(packages),
        "MODEL": str(shop.mlp(width, layers)),
        **_ONE_THREAD,
    }
    command = [str(packages / "pytriton" / "tritonserver" / "bin" / "tritonserver")]
    command += [f"--model-repository={_triton_models(shop, width)}", "--http-address=127.0.0.1"]
    command += [f"--backend-directory={_triton_backends(shop, packages)}", "--grpc-address=127.0.0.1"]
    command += ["--metrics-address=127.0.0.1", "--exit-timeout-secs=5"]
    command += [
        f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)
    ]
    with (
        tempfile.TemporaryDirectory(dir=shop.folder) as place,
        serving(command, Path(place), ports[0], grpc_port=ports[1], environment=extra) as endpoint,
    ):
        yield endpoint


def _triton_models(shop: Workshop, width: int) -> Path:
    repository = shop.folder / "triton_models"
    version = repository / "mlp" / "1"
    version.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCRIPTS / "triton_model.py", version / "model.py")
    (repository / "mlp" / "config.pbtxt").write_text(
        f'name: "mlp"\nbackend: "python"\nmax_batch_size: {MAX_BATCH}\n'
        f'input [{{ name: "x" data_type: TYPE_FP32 dims: [ {width} ] }}]\n'
        f'output [{{ name: "y" data_type: TYPE_FP32 dims: [ {width} ] }}]\n'
        "instance_group [{ kind: KIND_CPU count: 1 }]\n"
        "dynamic_batching { }\n",  # dispatches at once whatever waits: its fastest setting here
        encoding="utf-8",
    )
    return repository


def _triton_backends(shop: Workshop, packages: Path) -> Path:
    """Triton wants the backend and the stub of the interpreter's version in one folder."""
    target = shop.folder / "triton_backends" / "python"
    if not target.exists():
        bundled = packages / "pytriton" / "tritonserver"
        shutil.copytree(bundled / "backends" / "python", target)
        stubs = bundled / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
        shutil.copy(stubs / "triton_python_backend_stub", target)
    return target.parent
