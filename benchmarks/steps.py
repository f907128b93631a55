"""Counts what a request costs in steps: system calls and objects that Python allocates, of one or two trees.

    python benchmarks/steps.py [--old COMMIT_OR_FOLDER] [--clients 32] [--seconds 3]

A tree is what `old_and_new.py` takes. Each serves the tiny MLP with 32 clients that ask without pause: JSON
over REST, a tensor as raw bytes over REST, and `ModelInfer` over gRPC (8 connections). `perf stat` counts in
the server process, and in all its processes, while the load runs; the counts are divided by the answers. An
allocation is a call of `PyObject_Malloc`; objects that Python keeps for reuse (most tuples and floats) are
not among them. Its probe stops the program each time, so allocations are counted in a load of their own.

Needs Linux, root, perf (Debian: linux-perf), wrk, h2load, and a Python with a shared library. The counts hold
on a busy machine, too: only the time that a batch waits changes them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from harness import servers
from harness.arguments import whole_seconds
from harness.errors import Failed
from harness.grpc_probe import MODEL_INFER, row_message, until_called
from harness.load import Load, grpc_load, http_load
from harness.machine import facts
from harness.models import ENVELOPE, FEATURES, Workshop, instances_body, v2_binary
from harness.processes import Endpoint, Probe, until_answered
from harness.report import Table, aligned
from harness.trees import CHECKOUT, Tree, tree

SYSTEM_CALLS = "raw_syscalls:sys_enter"
_GROUP, _NAME = "torchere_steps", "allocated"
ALLOCATIONS = f"{_GROUP}:{_NAME}"
_CONNECTIONS = 8
_WARM_UP_S = 2.0
_ATTACH_S = 1.0
_RAW = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Request:
    """One kind of request: what serves it, and how `clients` of them are sent for so many seconds."""

    title: str
    archive: str
    properties: str
    wait: Callable[[Endpoint], object]
    load: Callable[[Endpoint, int, float], Load]


def requests() -> tuple[Request, ...]:
    """The kinds that are counted."""
    json = Probe("/predictions/tiny", instances_body(), b'"predictions"')
    body, headers = v2_binary(FEATURES)
    tensor = Probe("/v2/models/tiny_tensor/infer", body, b'"outputs"', _RAW, headers)
    message = row_message("tiny_tensor", FEATURES)

    def called(endpoint: Endpoint, clients: int, seconds: float) -> Load:
        streams = max(1, clients // _CONNECTIONS)
        return grpc_load(
            endpoint.grpc, MODEL_INFER, message, connections=_CONNECTIONS, streams=streams, seconds=seconds
        )

    return (
        Request("JSON over REST", "tiny", ENVELOPE, *_by_http(json)),
        Request("raw tensor over REST", "tiny_tensor", "", *_by_http(tensor)),
        Request(
            "ModelInfer over gRPC",
            "tiny_tensor",
            "",
            lambda endpoint: until_called(endpoint, MODEL_INFER, message, b"FP32"),
            called,
        ),
    )


def _by_http(
    probe: Probe,
) -> tuple[Callable[[Endpoint], object], Callable[[Endpoint, int, float], Load]]:
    def load(endpoint: Endpoint, clients: int, seconds: float) -> Load:
        url = f"{endpoint.url}{probe.path}"
        return http_load(url, probe.body, clients, seconds, probe.content_type, headers=probe.headers)

    return lambda endpoint: until_answered(endpoint, probe), load


def counted(request: Request, side: Tree, shop: Workshop, clients: int, seconds: float) -> dict[str, float]:
    """Serve, and count for one answer: both events, in the server process and in all processes."""
    found: dict[str, float] = {}
    with servers.torchere(replace(shop, tree=side), request.archive, 2, request.properties) as endpoint:
        request.wait(endpoint)
        request.load(endpoint, clients, _WARM_UP_S)
        root = psutil.Process(endpoint.process.pid)
        pids = {"server process": [root.pid]}
        pids["all processes"] = [root.pid, *(child.pid for child in root.children(recursive=True))]
        with probe_of_allocations(root.pid):
            for event in (SYSTEM_CALLS, ALLOCATIONS):
                for whose, numbers in pids.items():
                    with _counting(event, numbers) as counts:
                        answers = request.load(endpoint, clients, seconds).requests
                    (events,) = counts
                    found[f"{'system calls' if event == SYSTEM_CALLS else 'allocations'}, {whose}"] = (
                        events / answers
                    )
    return found


@contextlib.contextmanager
def _counting(event: str, pids: Sequence[int]) -> Iterator[list[int]]:
    """Count an event in processes during the block; the list has the count after it."""
    counts: list[int] = []
    command = ["perf", "stat", "-x;", "-e", event, "-p", ",".join(map(str, pids))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as perf:
        try:
            time.sleep(_ATTACH_S)
            yield counts
        finally:
            perf.send_signal(signal.SIGINT)
            said = perf.communicate()[1]
    counts.append(count_of(said, event))


def count_of(said: str, event: str) -> int:
    """The count of an event in what `perf stat -x;` prints.

    Raises:
        Failed: it has none.
    """
    for line in said.splitlines():
        cells = line.split(";")
        if len(cells) > 2 and cells[2] == event and cells[0].isdigit():
            return int(cells[0])
    raise Failed(f"perf counted no {event}: {said.strip()[-300:]}")


@contextlib.contextmanager
def probe_of_allocations(pid: int) -> Iterator[None]:
    """Have the kernel count calls of `PyObject_Malloc` in the library of Python that a process has mapped."""
    found = re.search(r"(/\S*libpython\S*\.so\S*)", Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"))
    if found is None:
        raise Failed("found a Python without a shared library, expected libpython*.so among its mappings")
    _perf_probe("-x", found[1], "--add", f"{ALLOCATIONS}=PyObject_Malloc")
    try:
        yield
    finally:
        _perf_probe("--del", ALLOCATIONS)


def _perf_probe(*arguments: str) -> None:
    done = subprocess.run(["perf", "probe", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"perf probe {' '.join(arguments)}: {done.stderr.strip()[-300:]}")


def table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    """A line for each request and count, a column for each tree; `found` is by tree, request and count."""
    trees = list(found)
    lines = [
        [title, what, *(f"{found[name][title][what]:.1f}" for name in trees)]
        for title, counts in found[trees[0]].items()
        for what in counts
    ]
    return [["request", "for one answer", *trees], *lines]


def main(argv: Sequence[str] | None = None) -> int:
    """Count and print."""
    options = _arguments().parse_args(argv)
    if os.geteuid() or not shutil.which("perf"):
        print("found no root, or no perf on the PATH; both are needed to count", file=sys.stderr)
        return 2
    try:
        sides = [tree(options.old), CHECKOUT] if options.old else [CHECKOUT]
        machine = facts()
        print(f"{machine.cpu}, {machine.cores} cores, Python {machine.python}; {options.clients} clients")
        found: dict[str, dict[str, dict[str, float]]] = {}
        with tempfile.TemporaryDirectory(prefix="torchere-steps-") as folder:
            shop = Workshop(Path(folder))
            for side in sides:
                found[side.commit] = {
                    request.title: counted(request, side, shop, options.clients, options.seconds)
                    for request in requests()
                }
    except Failed as err:
        print(err, file=sys.stderr)
        return 1
    print(aligned(table(found)))
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="System calls and allocations of a request.")
    parser.add_argument("--old", help="another tree beside this one: a commit, or a folder with a .venv")
    parser.add_argument("--clients", type=int, default=32, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=whole_seconds, default=3.0, help="of each load; default: %(default)g"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
