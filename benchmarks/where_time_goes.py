"""Where the event loop's time goes, request by request, in rows of `run.py` that a faster one would help.

    python benchmarks/where_time_goes.py [--seconds 6] [--write-docs]

Starts the server as the row does, measures the processor time of its event loop's thread while wrk loads it,
and then samples that thread's stack (py-spy) under the same load. A sample belongs to the part whose code was
the last on the stack. Needs wrk and py-spy (`pip install py-spy`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from harness import servers
from harness.arguments import whole_seconds
from harness.errors import Failed
from harness.load import http_load
from harness.machine import facts
from harness.models import ENVELOPE, Workshop, instances_body, plain_body
from harness.paths import ROOT
from harness.processes import Endpoint, Probe, until_answered
from harness.report import aligned, markdown_table
from harness.rows_models import LITE0, MINILM, RealModel, packed, plan_of

DOCUMENT = ROOT / "docs" / "profile.md"
LOOP = "waiting, receiving, waking (uvloop)"
# Whose code a stack is in: the first of its frames, from the inside, that begins so.
PARTS = {
    "serving/frontend/": "HTTP, tensors and the data plane",
    "serving/telemetry/": "metrics, timeline and access log",
    "serving/logs/": "metrics, timeline and access log",
    "serving/batching/": "batching",
    "serving/workers/": "the executor's side: threads, frames, host",
    "handlers/": "the handler",
    "torch/": "the model",
}
_FRAME = re.compile(r"\(([^():]+)(?::\d+)?\)$")
_SAMPLES_PER_S = 200
_WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A server under a load; `clients` requests are on their way at any time."""

    title: str
    server: AbstractContextManager[Endpoint]
    probe: Probe
    clients: int


@dataclass(frozen=True, slots=True)
class Found:
    """Of one subject: requests a second, and microseconds of the loop's thread for each, by part."""

    per_second: float
    us: dict[str, float]


def part_of(stack: str) -> str | None:
    """Which part a stack as py-spy writes it (`frame;frame`) belongs to; None: it is not the event loop's."""
    frames = stack.split(";")
    if not any("asyncio/runners.py" in frame for frame in frames):
        return None
    for frame in reversed(frames):
        found = _FRAME.search(frame)
        for prefix, part in PARTS.items():
            if found is not None and found[1].startswith(prefix):
                return part
    return LOOP


def shares(lines: Iterable[str]) -> dict[str, float]:
    """The share of each part in samples (`stack count`) of the event loop."""
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        part = part_of(stack)
        if part is not None:
            counts[part] += int(count)
    whole = counts.total()
    return {part: counts[part] / whole for part in (LOOP, *dict.fromkeys(PARTS.values())) if whole}


def subjects(shop: Workshop) -> Iterator[Subject]:
    """The rows to look at. A real model is first served in several ways, which takes minutes."""
    yield Subject(
        "tiny MLP, 32 clients",
        servers.torchere(shop, "tiny", 2, ENVELOPE),
        Probe("/predictions/tiny", instances_body(), b'"predictions"'),
        32,
    )
    yield Subject(
        "custom handler in 2 processes, 32 clients",
        servers.torchere(shop, "custom", 2),
        Probe("/predictions/custom", plain_body(), b'"y"'),
        32,
    )
    yield _real_model("MiniLM tensors", MINILM, shop)
    yield _real_model("EfficientNet-Lite0 tensors of 600 KB", LITE0, shop)


def _real_model(title: str, model: RealModel, shop: Workshop) -> Subject:
    print(f"trying ways to serve {model.name} ...", flush=True)
    plan = plan_of(model, shop)
    server = servers.torchere(shop, model.name, plan.executors)
    return Subject(f"{title}, {plan.clients} clients", server, packed(model, plan, shop), plan.clients)


def measured(subject: Subject, seconds: float) -> Found:
    """Start it, load it, and look where it is."""
    with subject.server as endpoint:
        until_answered(endpoint, subject.probe)
        _load(endpoint, subject, _WARM_UP_S)
        before_s = _loop_s(endpoint)
        per_second = _load(endpoint, subject, seconds)
        us = 1e6 * (_loop_s(endpoint) - before_s) / (per_second * seconds)
        sampled = threading.Thread(target=_load, args=(endpoint, subject, seconds + 1))
        sampled.start()
        found = shares(_sampled(endpoint, seconds))
        sampled.join()
    return Found(per_second, {part: us * share for part, share in found.items()})


def _load(endpoint: Endpoint, subject: Subject, seconds: float) -> float:
    probe = subject.probe
    url = f"{endpoint.url}{probe.path}"
    return http_load(
        url, probe.body, subject.clients, seconds, probe.content_type, headers=probe.headers
    ).per_second


def _loop_s(endpoint: Endpoint) -> float:
    """Processor time of the main thread, which is the event loop's."""
    pid = endpoint.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise SystemExit(f"found no py-spy on the PATH or beside {sys.executable}: pip install py-spy")
    return found


def _sampled(endpoint: Endpoint, seconds: float) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stacks")
        command = [_py_spy(), "record", "--pid", str(endpoint.process.pid), "--duration", f"{seconds:.0f}"]
        command += ["--rate", str(_SAMPLES_PER_S), "--format", "raw", "--output", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            raise Failed(f"py-spy took no samples: {done.stderr.strip()[-300:]}")
        return file.read_text(encoding="utf-8").splitlines()


def table(found: dict[str, Found]) -> list[list[str]]:
    """Microseconds by part, a column for each subject."""
    head = ["microseconds of the event loop for a request", *found]
    parts = [LOOP, *dict.fromkeys(PARTS.values())]
    lines = [[part, *(f"{one.us.get(part, 0):.0f}" for one in found.values())] for part in parts]
    sums = ["in all", *(f"{sum(one.us.values()):.0f}" for one in found.values())]
    rates = ["requests a second", *(f"{one.per_second:,.0f}" for one in found.values())]
    return [head, *lines, sums, rates]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the document if asked to."""
    options = _arguments().parse_args(argv)
    machine = facts()
    _py_spy()  # before the first load, rather than in the middle of it
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="torchere-bench-") as folder:
        for subject in subjects(Workshop(Path(folder))):
            print(f"{subject.title} ...", flush=True)
            found[subject.title] = measured(subject, options.seconds)
    print(f"\n{aligned(table(found))}")
    if options.write_docs:
        measured_on = f"Measured {machine.date} on {machine.cpu}, {machine.cores} cores, torchere "
        measured_on += f"{machine.torchere} (commit {machine.commit}).\n"
        DOCUMENT.write_text(
            "\n".join([_HEAD, measured_on, markdown_table(table(found)), _TAIL]), encoding="utf-8"
        )
        print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0


_HEAD = """# Where the time goes

How long the server's event loop works for a request, by part of the code.
Written by `python benchmarks/where_time_goes.py --write-docs`; do not edit. The loads are those of rows of
[benchmarks.md](benchmarks.md) that a faster event loop would help: its thread takes in every request, and
sends every answer.
"""
_TAIL = """
A sample of the thread's stack belongs to the part whose code was the innermost; the sum is the thread's
processor time for a request, measured under the same load without the sampler. Models in threads or processes
of their own are not in it, nor is the client. The same code takes longer beside a large model, probably
because the weights push it out of the caches between two requests.
"""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Where the event loop's time goes.")
    parser.add_argument(
        "--seconds", type=whole_seconds, default=6.0, help="of each load; default: %(default)g"
    )
    parser.add_argument("--write-docs", action="store_true", help="write docs/profile.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
