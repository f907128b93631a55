"""Mixed load on `torchere serve` for a long time: nothing may grow, and nobody may get a wrong answer.

    python benchmarks/soak.py [--minutes 30] [--clients 6] [--svg FILE] [--json FILE]
    nohup python benchmarks/soak.py > soak.log 2>&1 &       # by itself: the last line is the verdict

Clients predict with thread and process executors, stream, make the handler fail and go away in the middle; a
crowd asks a tiny model for more than the server can answer at once, and goes again; an operator registers,
scales and unregisters a model; workers are killed with signal 9. Memory, descriptors, threads and temporary
files are sampled; after a warm-up their level in the last third must be that in the first. Exit status 1 when
one has risen, when an answer was none that was expected, when the server ended by itself, or when its own
count of accepted and answered predictions differ. SIGTERM ends it and the server. Linux only.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
from soaking.actors import Actor, Client, Killer, Operator
from soaking.crowd import STAYS_S, Crowd
from soaking.plant import Plant, served
from soaking.samples import Level, Sample, levels, sparkline, svg, take

SAMPLES = 240  # of a whole soak
TOLD_EVERY = 24  # samples


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print, draw, and compare with the bounds."""
    parser = argparse.ArgumentParser(description="Mixed load for a long time: nothing may grow.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--clients", type=int, default=6, help="how many at a time (default: 6)")
    parser.add_argument("--svg", type=Path, help="draw the samples there")
    parser.add_argument("--json", type=Path, help="write the samples there")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM: no verdict"))  # and takes the server
    with tempfile.TemporaryDirectory(prefix="torchere-soak-") as folder:
        with served(Path(folder)) as plant:
            samples, actors = soak(plant, options.minutes * 60, options.clients)
        ledger, status = plant.ledger(), plant.process.returncode
        left = [path.name for path in plant.temp.iterdir()]
    if options.svg:
        options.svg.write_text(svg(samples))
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1))
    problems = report(levels(samples), actors)
    if ledger[0] != ledger[1] or ledger[0] < 0:
        problems.append(f"the server accepted {ledger[0]} predictions and answered {ledger[1]}")
    if status or left:
        problems.append(f"the server ended with status {status} and left {left} in its temporary folder")
    print(f"accepted and answered    {ledger[0]} {ledger[1]}")
    print("\n".join(problems) or "level, and every answer as expected")
    return 1 if problems else 0


def soak(plant: Plant, seconds: float, clients: int) -> tuple[list[Sample], list[Actor]]:
    """Let everybody work for that long, or until the server ends; returns samples and workers."""
    over = threading.Event()
    stays_s = min(STAYS_S, int(seconds / 2))
    actors: list[Actor] = [Client(plant, over, seed) for seed in range(clients)]
    actors += [Operator(plant, over, 1001), Killer(plant, over, 1002), Crowd(plant, over, 1003, stays_s)]
    for actor in actors:
        actor.start()
    process, started_s = psutil.Process(plant.process.pid), time.monotonic()
    samples = []
    while (at_s := time.monotonic() - started_s) < seconds:
        samples.append(take(process, plant.temp, at_s))
        if len(samples) % TOLD_EVERY == 1:
            print(f"{at_s:7.0f} s of {seconds:.0f}   {samples[-1].rss_mb:.0f} MB", flush=True)
        over.wait(seconds / SAMPLES)
        if plant.process.poll() is not None:
            break  # its status is told at the end
    over.set()
    for actor in actors:
        actor.join()
        actor.session.close()
    return samples, actors


def report(found: Sequence[Level], actors: Sequence[Actor]) -> list[str]:
    """Print what was seen; returns what is wrong, in words."""
    tally: Counter[str] = sum((actor.tally for actor in actors), Counter())
    print("done   ", ", ".join(f"{count} {what}" for what, count in sorted(tally.items())))
    problems = [wrong for actor in actors for wrong in actor.wrong]
    for level in found:
        name = level.bound.name
        print(f"{name:<12}{level.first:9.1f} ->{level.last:9.1f}   {sparkline(level.values)}")
        if not level.holds:
            problems.append(f"{name} rose from {level.first:.1f} to {level.last:.1f}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
