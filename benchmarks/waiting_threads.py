"""How long threads of a model may spin for each other: wall and processor time of a run, by GOMP_SPINCOUNT.

    python benchmarks/waiting_threads.py [--rounds 15] [--counts 300000,10000,1000,0] [--threads 2]

A thread of OpenMP that waits at the end of a parallel region spins before it sleeps: libgomp's own limit is
300,000 looks where it has no more threads than cores. Each model runs in a process for each limit, and these
have turns, alone and beside a process that keeps one core busy, as the server, another model or another
container does. The median over the rounds is printed, of the median of each turn's runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.models import Workshop
from harness.real_models import SIDE, lite0_file, minilm_file, minilm_inputs_of
from harness.report import aligned

LIBRARYS_OWN = 300_000
_RUNS_S = 0.25  # of one turn
_BUSY = "while True: pass"
_RUNS = """
import json, os, sys, time
import torch
torch.set_num_threads(int(sys.argv[3]))
model, inputs = torch.jit.load(sys.argv[1]).eval(), torch.load(sys.argv[2])
def run():
    with torch.inference_mode():
        model(*inputs)
for _ in range(5):
    run()
for line in sys.stdin:
    walls, begun, cpu = [], time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < float(line):
        start = time.perf_counter()
        run()
        walls.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    print(json.dumps([sorted(walls)[len(walls) // 2] * 1e3, cpu / len(walls) * 1e3]), flush=True)
"""


class Runs:
    """A process that runs a model, with the milliseconds of each turn."""

    def __init__(self, file: Path, inputs: Path, count: int, threads: int) -> None:
        self.wall_ms: dict[bool, list[float]] = {False: [], True: []}  # by whether a core is busy
        self.cpu_ms: dict[bool, list[float]] = {False: [], True: []}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUNS, str(file), str(inputs), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GOMP_SPINCOUNT": str(count)},
        )

    def turn(self, busy: bool) -> None:
        """Run for a while, and keep the times."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(_RUNS_S, file=self.process.stdin, flush=True)
        wall, cpu = json.loads(self.process.stdout.readline())
        self.wall_ms[busy].append(wall)
        self.cpu_ms[busy].append(cpu)


def models(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Names, files and files of inputs."""
    import torch  # noqa: PLC0415 - seconds

    shop = Workshop(folder)
    made = [
        ("MLP, 4 x 64, batch 16", shop.mlp(64, 4), (torch.rand(16, 64),)),
        ("MLP, 8 x 1024, batch 1", shop.mlp(1024, 8), (torch.rand(1, 1024),)),
        ("EfficientNet-Lite0, batch 1", lite0_file(shop), (torch.rand(1, 3, SIDE, SIDE),)),
        ("EfficientNet-Lite0, batch 8", lite0_file(shop), (torch.rand(8, 3, SIDE, SIDE),)),
        ("MiniLM, 32 tokens, batch 1", minilm_file(shop), minilm_inputs_of(1)),
        ("MiniLM, 32 tokens, batch 8", minilm_file(shop), minilm_inputs_of(8)),
    ]
    for number, (name, file, inputs) in enumerate(made):
        saved = folder / f"inputs_{number}.pt"
        torch.save(inputs, saved)
        yield name, file, saved


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy in the block."""
    with subprocess.Popen([sys.executable, "-c", _BUSY]) as process:
        try:
            time.sleep(0.05)
            yield
        finally:
            process.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The time of a run by GOMP_SPINCOUNT.")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each process (default: 15)")
    parser.add_argument("--counts", default=f"{LIBRARYS_OWN},10000,1000,0", help="limits to compare")
    parser.add_argument("--threads", type=int, default=2, help="threads of a run (default: 2)")
    asked = parser.parse_args(argv)
    counts = [int(count) for count in asked.counts.split(",")]
    head = [
        "wall ms (processor ms)",
        *(f"{place}, {count:,}" for place in ("alone", "busy") for count in counts),
    ]
    table = [head]
    with tempfile.TemporaryDirectory(prefix="torchere-bench-") as folder:
        for name, file, inputs in models(Path(folder)):
            with ExitStack() as up:
                runs = [Runs(file, inputs, count, asked.threads) for count in counts]
                for one in runs:
                    up.callback(one.process.wait)
                    up.callback(one.process.kill)
                for number in range(asked.rounds):
                    order = runs if number % 2 else runs[::-1]
                    for one in order:
                        one.turn(busy=False)
                    with busy_core():
                        for one in order:
                            one.turn(busy=True)
            cells = [
                f"{statistics.median(one.wall_ms[busy]):.3g} ({statistics.median(one.cpu_ms[busy]):.3g})"
                for busy in (False, True)
                for one in runs
            ]
            table.append([name, *cells])
            print(f"{name}: {'  '.join(cells)}", flush=True)
    print(f"\n{asked.threads} threads, {os.cpu_count()} cores, {asked.rounds} rounds\n{aligned(table)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
