"""Measures the memory of a model: a separate process loads it, runs it twice and prints its growth.

    python -m torchere.archiver.models.verify.memory FILE EXAMPLE OPTIONS

The sum of the model's tensors would miss weights that are packed a second time for an engine, and buffers.
The options are `TorchScriptOptions` as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.models.convert.optimize_gain import loaded
from torchere.archiver.scan.weights import TORCHSCRIPT, classify_file
from torchere.archiver.torchscript_options import TorchScriptOptions

_TIMEOUT_S = 600
_STATM = Path("/proc/self/statm")  # Linux; second field: resident pages


def resident_bytes(file: Path, options: TorchScriptOptions, example: tuple[torch.Tensor, ...]) -> int | None:
    """Return the growth in bytes of a process that loads the TorchScript file and runs it twice.

    Return None if the file is not TorchScript, if the process fails, or if the system has no /proc.
    """
    if not _STATM.is_file() or classify_file(file).kind != TORCHSCRIPT:
        return None
    with tempfile.TemporaryDirectory(prefix="torchere-memory-") as folder:
        inputs = Path(folder, "example.pt")
        torch.save(list(example), inputs)
        command = [sys.executable, "-m", __name__, str(file), str(inputs), json.dumps(asdict(options))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None


def main(argv: list[str]) -> int:
    """Print the growth in bytes."""
    file, inputs, options = argv
    example = torch.load(inputs, weights_only=True)
    torch.set_num_threads(1)
    torch.zeros(64, 64) @ torch.zeros(64, 64)  # allocate torch's own memory before the measurement
    before = _resident_bytes()
    model: Callable[..., Any] = loaded(Path(file), TorchScriptOptions(**json.loads(options)))
    with torch.inference_mode():
        for _ in range(2):
            model(*example)
    print(max(0, _resident_bytes() - before))
    return 0


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
