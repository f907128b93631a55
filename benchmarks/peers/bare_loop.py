"""The floor under a model server: bare loops over the same file, nothing served.

    python bare_loop.py FILE INPUT... --seconds 2 --threads 2 [--batches 1,2,4,8,16,32] [--each] [--optimize]

FILE is TorchScript, or a `.pt2`, which is loaded as the server does, for torch's own binding keeps the GIL.
An INPUT is one row: a `.npy` file with the batch as its first dimension, repeated for larger batches; or a
picture, which is decoded, cut and normalised anew for every row, as the handler `image_classifier` would.

Loops side by side, each with one intra-op thread, and one loop with all of them are tried with every batch
size; `--each` tries the former only; those near the fastest are tried again, in turn, for a noisy second
must not decide. `--optimize` optimises TorchScript first, as the server does where an archive says
`optimize_for_inference`. The fastest is then measured for so many seconds. Prints JSON: its batch, its loops,
its rows a second, and what the tries gave.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1]))
from harness.tries import fastest, tries_of  # found by the line above

Inputs = tuple[torch.Tensor, ...]
WARM_UP_RUNS = 3  # TorchScript specialises on the second
TRY_S = 0.4  # of each batch size and way; at least one run
RESIZE, CROP = 256, 224  # of pictures, in pixels


class Way(NamedTuple):
    """How to run a model: rows in a batch, loops side by side, intra-op threads of each."""

    batch: int
    loops: int
    intra_op: int


class Work:
    """A model and what it is run on. `run` may be called from several threads at once."""

    def __init__(self, file: Path, inputs: list[Path], *, optimize: bool = False) -> None:
        self.model = _loaded(file, optimize=optimize)
        pictures = [path.read_bytes() for path in inputs if path.suffix != ".npy"]
        self._picture = pictures[0] if pictures else None
        self._rows = [torch.from_numpy(np.load(path)) for path in inputs if path.suffix == ".npy"]

    def inputs(self, batch: int) -> Inputs:
        """So many rows."""
        if self._picture is not None:
            return (torch.stack([pixels(self._picture) for _ in range(batch)]),)
        return tuple(row.repeat(batch, *[1] * (row.dim() - 1)) for row in self._rows)

    def run(self, batch: int, until: Callable[[], bool]) -> int:
        """Run batches until told to stop, at least one; returns the rows."""
        rows, given = 0, self.inputs(batch)
        with torch.inference_mode():
            while not rows or not until():
                if self._picture is not None and rows:
                    given = self.inputs(batch)
                self.model(*given)
                rows += batch
        return rows


def _loaded(file: Path, *, optimize: bool) -> Any:
    if file.suffix != ".pt2":
        plain = torch.jit.load(str(file))
        if not optimize:
            return plain
        from torchere.archiver.models.load.torchscript import optimized  # noqa: PLC0415  # else torch is enough

        return optimized(plain.eval())
    from torchere.handlers.compiled.load import load_package  # noqa: PLC0415  # as above

    return load_package(str(file), tempfile.mkdtemp(prefix="torchere-bench-"), "cpu")


def pixels(picture: bytes) -> torch.Tensor:
    """Float tensor [3, 224, 224] of the middle of a picture, from -1 to 1."""
    with Image.open(io.BytesIO(picture)) as image:
        scale = RESIZE / min(image.size)
        size = (int(image.width * scale), int(image.height * scale))
        resized = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    left, top = (resized.width - CROP) // 2, (resized.height - CROP) // 2
    array = np.asarray(resized.crop((left, top, left + CROP, top + CROP)))
    return torch.from_numpy(array.transpose(2, 0, 1).astype(np.float32)).sub_(127).div_(128)


def rate(work: Work, way: Way, seconds: float) -> float:
    """Rows a second."""
    batch, loops, intra_op = way
    rows: list[int] = []
    barrier = threading.Barrier(loops + 1)

    def loop() -> None:
        torch.set_num_threads(intra_op)
        for _ in range(WARM_UP_RUNS):
            work.run(batch, lambda: True)
        barrier.wait()
        stop_s = time.perf_counter() + seconds
        rows.append(work.run(batch, lambda: time.perf_counter() >= stop_s))

    threads = [threading.Thread(target=loop) for _ in range(loops)]
    for thread in threads:
        thread.start()
    barrier.wait()
    started_s = time.perf_counter()
    for thread in threads:
        thread.join()
    if len(rows) < loops:
        raise RuntimeError("a loop ended early; its traceback is above")
    return sum(rows) / (time.perf_counter() - started_s)


def main() -> None:
    """Try everything, measure the best, print."""
    options = _arguments().parse_args()
    work = Work(options.file, options.inputs, optimize=options.optimize)
    tries = _tries(work, _ways(options))
    best = fastest(tries)
    found = {"batch": best.batch, "loops": best.loops, "per_second": rate(work, best, options.seconds)}
    tried = {f"batch {way.batch}, {way.loops} loop(s)": rates for way, rates in tries.items()}
    print(json.dumps({**found, "tries": tried}))


def _ways(options: argparse.Namespace) -> list[Way]:
    sides = [(options.threads, 1)]
    if not options.each and options.threads > 1:
        sides.append((1, options.threads))
    return [Way(batch, *side) for batch in map(int, options.batches.split(",")) for side in sides]


def _tries(work: Work, ways: list[Way]) -> dict[Way, list[float]]:
    """Rows a second of each way; what is the only one need not be tried."""
    if len(ways) == 1:
        return {ways[0]: [0.0]}
    return tries_of(ways, lambda way: rate(work, way, TRY_S))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Bare loops over one model.")
    parser.add_argument("file", type=Path, help="TorchScript or .pt2")
    parser.add_argument("inputs", type=Path, nargs="+", help=".npy files of one row, or one picture")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the measurement; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="in all; default: %(default)s")
    parser.add_argument("--batches", default="1,2,4,8,16,32", help="sizes to try; default: %(default)s")
    parser.add_argument("--each", action="store_true", help="one thread for each loop, and no other way")
    parser.add_argument("--optimize", action="store_true", help="TorchScript for this processor, at load")
    return parser


if __name__ == "__main__":
    main()
