"""The floor under image classification: a bare loop over the same TorchScript file, nothing served.

`python bare_loop.py FILE SECONDS THREADS`; prints JSON, pictures a second by batch size. With THREADS threads
in one process, each looping over its own batch with one intra-op thread, or one thread with all of them:
whichever is faster counts.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import torch

BATCHES = (1, 2, 4, 8, 16)
SIDE = 224


def loop(model: torch.nn.Module, batch: int, seconds: float, done: list[int]) -> None:
    """Run one batch over and over."""
    pictures = torch.full((batch, 3, SIDE, SIDE), 0.5)
    stop_s = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < stop_s:
            model(pictures)
            done.append(batch)


def rate(model: torch.nn.Module, batch: int, seconds: float, threads: int) -> float:
    """Pictures a second of `threads` loops side by side."""
    done: list[int] = []
    loops = [threading.Thread(target=loop, args=(model, batch, seconds, done)) for _ in range(threads)]
    started_s = time.perf_counter()
    for one in loops:
        one.start()
    for one in loops:
        one.join()
    return sum(done) / (time.perf_counter() - started_s)


def main(path: str, seconds: float, threads: int) -> None:
    """Measure each batch size both ways."""
    model = torch.jit.load(path).eval()  # type: ignore[no-untyped-call]
    share_s = seconds / len(BATCHES)
    best = {}
    for batch in BATCHES:
        torch.set_num_threads(threads)
        loop(model, batch, 0.3, [])
        together = rate(model, batch, share_s, 1)
        torch.set_num_threads(1)
        loop(model, batch, 0.3, [])
        best[str(batch)] = max(together, rate(model, batch, share_s, threads))
    print(json.dumps(best))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
