"""Measures the memory of models: a separate process loads each, runs it twice and reports its growth.

    python -m torchere.archiver.models.verify.memory ANSWER EXAMPLE FILE OPTIONS [FILE OPTIONS ...]

The sizes of the model's tensors would leave out working memory, and copies of weights packed for an engine.
The options are `TorchScriptOptions` as JSON. One process imports torch, and forks a child for each file.

Only anonymous memory is counted. At first a forked child has no pages of torch's libraries, so 10 MB of their
code, which all processes of a machine share, would otherwise be counted for every model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.optimize_gain import loaded
from torchere.archiver.models.inputs.run import Run
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.probe.isolation import isolated
from torchere.archiver.models.steps import Say, silent
from torchere.archiver.scan.weights import TORCHSCRIPT, classify_file
from torchere.archiver.torchscript_options import TorchScriptOptions

_TIMEOUT_S = 600  # for each file
_STATM = Path("/proc/self/statm")  # second field: resident pages, third: those of files or shared memory


def resident_bytes(
    files: Sequence[Path | None], loads: Sequence[TorchScriptOptions], example: Tensors
) -> list[int | None]:
    """Return for each file how many bytes a process grows by loading it as TorchScript and running it twice.

    The result is None for a file that is None, is not TorchScript or fails to run, and for all files after a
    timeout and on a system without /proc. Without a file to measure, no process is started.
    """
    sizes: list[int | None] = [None] * len(files)
    if not _STATM.is_file():
        return sizes
    scripts = [
        (place, file, load)
        for place, (file, load) in enumerate(zip(files, loads, strict=True))
        if file is not None and classify_file(file).kind == TORCHSCRIPT
    ]
    if not scripts:
        return sizes
    with tempfile.TemporaryDirectory(prefix="torchere-memory-") as folder:
        answer, inputs = Path(folder, "answer.json"), Path(folder, "example.pt")
        torch.save(list(example), inputs)
        command = [sys.executable, "-m", __name__, str(answer), str(inputs)]
        for _, file, load in scripts:
            command += [str(file), json.dumps(asdict(load))]
        limit_s = _TIMEOUT_S * len(scripts)
        # The current folder must not shadow modules of torchere or torch (Python 3.11 on).
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        try:
            done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, env=environment)
        except subprocess.TimeoutExpired:  # the archive is good without this number
            return sizes
        found = json.loads(answer.read_text()) if done.returncode == 0 else [None] * len(scripts)
    for (place, _, _), size in zip(scripts, found, strict=True):
        sizes[place] = size
    return sizes


def main(argv: list[str]) -> int:
    """Write the growth in bytes for each file, null where it fails, as a list in JSON."""
    torch.set_num_threads(1)
    answer, inputs, *rest = argv
    example = torch.load(inputs, weights_only=True)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    sizes = [_growth(Path(file), options, example) for file, options in pairs]
    Path(answer).write_text(json.dumps(sizes))
    return 0


def _growth(file: Path, options: str, example: Sequence[torch.Tensor]) -> int | None:
    """Return the growth of a forked process; None if it fails."""

    def work(tell: Say, say: Say) -> str:
        torch.zeros(64, 64) @ torch.zeros(64, 64)  # allocate torch's own memory before the measurement
        before = _anonymous_bytes()
        model: Run = loaded(file, TorchScriptOptions(**json.loads(options)))
        with torch.inference_mode():
            for _ in range(2):
                model(*example)
        return str(max(0, _anonymous_bytes() - before))

    try:
        return int(isolated(work, silent))
    except ModelRefused:
        return None


def _anonymous_bytes() -> int:
    resident, shared = map(int, _STATM.read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
