"""Makes the environments of programs that were written for TorchServe, for `test_programs.py`.

    python tests/interop/programs.py              all of them (4 GB in `.peers/`, some minutes)
    python tests/interop/programs.py torchx       one of them

Each has an environment of its own, because their dependencies contradict each other and torchere's. Not
collected by pytest; a test whose environment is not there is skipped.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / ".peers"


@dataclass(frozen=True, slots=True)
class Program:
    """Steps of `pip install`, one after the other: arguments of each.

    With `beside` the packages go to a folder for the import path of torchere's own Python.
    """

    steps: tuple[tuple[str, ...], ...]
    beside: bool = False


PROGRAMS = {
    "mlflow-torchserve": Program(
        (("torch==2.13.0", "setuptools<81"), ("mlflow-torchserve==0.1.0",)),
    ),
    "torchx": Program((("torchx==0.7.0", "fsspec", "requests", "setuptools<81"),)),
    # It does not name httpx, and its Streamlit is too old for a newer altair.
    "torchserve-dashboard": Program((("torchserve-dashboard==0.6.0", "httpx", "altair<5"),)),
    "kserve": Program((("kserve==0.21.0", "requests"),)),
    # SageMaker's handler runs in torchere's workers, beside its torch and NumPy.
    "sagemaker": Program(
        (
            (
                *("--no-deps", "sagemaker-inference==1.10.1", "sagemaker-pytorch-inference==2.0.25"),
                *("retrying==1.3.7", "six", "werkzeug", "setuptools<81", "boto3==1.44.5"),
                *("botocore==1.44.5", "s3transfer", "jmespath"),
            ),
        ),
        beside=True,
    ),
}


def python_of(name: str) -> Path | None:
    """Return the interpreter of a program, or the folder of its packages; None if it is not installed."""
    folder = PEERS / name
    return (folder if PROGRAMS[name].beside else folder / "bin" / "python") if _is_made(folder) else None


def make(name: str) -> None:
    """Make the environment of a program, once."""
    folder, program = PEERS / name, PROGRAMS[name]
    if _is_made(folder):
        return
    print(f"==> {folder}", flush=True)
    if not program.beside:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    for step in program.steps:
        target = ["--target", str(folder)] if program.beside else []
        command = [*pip, *target] if program.beside else [str(folder / "bin" / "python"), *pip[1:]]
        subprocess.run([*command, *step], check=True)
    (folder / ".installed").touch()


def _is_made(folder: Path) -> bool:
    return (folder / ".installed").exists()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or PROGRAMS:
        make(wanted)
