"""What it costs to try a model's sizes in a child process: forked from the packer, or a fresh interpreter.

    python benchmarks/trial_process.py

Signatures of a small model and of one of 400 MB are derived in this process, in a forked child, and, as the
least that a fresh interpreter needs, torch is imported and the model is loaded there. Medians of 9 rounds.
No goal; decision 28 has figures.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from torchere.archiver.models.probe import derive
from torchere.archiver.models.probe.derive import signature_of
from torchere.archiver.models.steps import silent

ROUNDS = 9
MODELS = {
    "small": (nn.Linear(64, 10), torch.rand(2, 64)),
    "400 MB": (nn.Linear(10_000, 10_000), torch.rand(2, 10_000)),
}


def main() -> None:
    """Print the table."""
    print(f"{'model':<10}{'in this process':>18}{'forked child':>18}{'fresh interpreter':>20}   (ms)")
    for name, (module, rows) in MODELS.items():
        here, child, fresh = measured(module.eval(), rows)
        print(f"{name:<10}{here:>18.0f}{child:>18.0f}{fresh:>20.0f}")


def measured(module: nn.Module, rows: torch.Tensor) -> tuple[float, float, float]:
    """Return the milliseconds in this process, in a forked child, and of the start of an interpreter."""

    def derived() -> None:
        signature_of(module, (rows,), ["x"], [], probe_batch=True)

    def here() -> None:
        with mock.patch.object(derive, "isolated", lambda work, say: work(silent, say)):
            derived()

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.pt")
        torch.jit.trace(module, rows).save(str(file))
        code = f"import torch; torch.jit.load({str(file)!r})"
        fresh = median_ms(lambda: subprocess.run([sys.executable, "-c", code], check=True))
    return median_ms(here), median_ms(derived), fresh


def median_ms(way: Callable[[], object]) -> float:
    """Return the median of the wall time of a call."""
    way()
    taken = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        way()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken) * 1000


if __name__ == "__main__":
    main()
