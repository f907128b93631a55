"""Memory of `torchere serve` as PSS: of its process tree, and of the process that listens for requests alone.

    python benchmarks/memory.py                               every part
    python benchmarks/memory.py --parts large --size-mb 400 --executors 8 --isolation thread --json FILE
    python benchmarks/memory.py --parts tensors,density,cycles --tree COMMIT_OR_FOLDER

large    a TorchScript model of linear layers with one executor, with eight, and in two versions, once with
         threads as executors and once with processes; every executor is kept busy before the measurement
tensors  an identity at rest, and after 10 GiB of tensors of 600 KB in requests (as many bytes are answered)
density  100 tiny TorchScript models with one executor each, with defaults and with `isolation: shared`
cycles   a tiny model is registered, asked and unregistered 1,000 times
programs a tiny exported program with one worker and with four; and how long one that is killed is away
imports  four workers whose handler imports transformers' pipelines, which each imports or all share

A tree is what `old_and_new.py` takes. Exit status 1 when a goal is missed or a figure could not be measured.
Linux only; needs about four times the large model's size on disk and three times in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import requests
from harness import servers
from harness.arguments import Listed
from harness.errors import Failed, Unavailable
from harness.load import http_load
from harness.machine import facts
from harness.models import ENVELOPE, FEATURES, LARGE, Workshop, instances_body, v2_binary
from harness.processes import START_S, Endpoint, Probe, last_words, until_answered
from harness.pss import Memory, memory_of
from harness.trees import CHECKOUT, tree

PARTS = ("large", "tensors", "density", "cycles", "programs", "imports")
GOALS = {"thread": 1.15, "process": 1.5}  # memory over that of one version with one executor, by isolation
SERVER_MB = 94.4  # 90 MiB: the server process alone, at rest and after the tensors
LARGE_MB = 1.1 * 648  # 400 MB in threads, 8 executors: what commit a2f837a took, and a tenth
DENSITY_MB = 1.3 * 303  # 100 tiny models with `shared`: 289 MiB of a2f837a, and three tenths
CYCLES_RATIO = 1.1  # most over least, once the first cycles are over
_SIZE_MB, _EXECUTORS = 400.0, 8
_PREDICTIONS_PER_EXECUTOR = 12
_PIXELS = 3 * 224 * 224  # float32: 602,112 bytes, what EfficientNet-Lite0 takes
_TENSOR_CLIENTS, _TENSOR_PHASE_S = 4, 5.0
_FIRST_CYCLES, _SAMPLE_EVERY = 200, 100  # cycles before the first sample, and between samples
_SETTLE_S = 10.0
_WORKERS = (1, 4)  # of the exported program; the larger number of the handler that imports
_IMPORTING = Path(__file__).parent / "handlers" / "pipelines.py"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result; `limit` is the most it may be, None where nothing is asked."""

    part: str
    what: str
    value: float
    unit: str = "MB"  # or "s"; "" for ratios
    limit: float | None = None

    @property
    def line(self) -> str:
        """The figure in words."""
        shown = f"{self.value:10.0f} MB" if self.unit == "MB" else f"{self.value:10.2f} {self.unit:<2}"
        if self.limit is None:
            return f"{self.part:<9}{self.what:<52}{shown}"
        limit = f"{self.limit:.0f} MB" if self.unit else f"{self.limit:g}"
        said = "reached" if self.value <= self.limit else "MISSED"
        return f"{self.part:<9}{self.what:<52}{shown}   goal: at most {limit:<8}{said}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goals."""
    options = _arguments().parse_args(argv)
    try:
        served = tree(options.tree) if options.tree else CHECKOUT
    except Failed as err:
        print(err, file=sys.stderr)
        return 2
    machine = facts()
    print(
        f"{machine.cpu}, {machine.cores} cores, PyTorch {machine.torch}; commit {served.commit}", flush=True
    )
    figures: list[Figure] = []
    broken = False
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="torchere-memory-") as folder:
            try:
                for figure in _MEASURES[part](Workshop(Path(folder), served), options):
                    figures.append(figure)
                    print(figure.line, flush=True)
            except (Failed, requests.RequestException) as err:
                print(f"{part}: {err}", file=sys.stderr)
                broken = True
            except Unavailable as reason:
                print(f"{part:<9}skipped: {reason}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    missed = any(figure.limit is not None and figure.value > figure.limit for figure in figures)
    return 1 if broken or missed else 0


def large(shop: Workshop, options: argparse.Namespace) -> Iterator[Figure]:
    """One large model: one executor, many, and two versions with one each."""
    layers = max(1, round(options.size_mb * 1e6 / (LARGE * LARGE * 4)))
    for isolation in (options.isolation,) if options.isolation else GOALS:
        config = f"deviceType: cpu\nisolation: {isolation}\n"
        file = shop.pack(f"wide_{isolation}", shop.mlp(LARGE, layers), config)
        found = {
            "1 executor": _busy(shop, {"wide": file}, 1),
            f"{options.executors} executors": _busy(shop, {"wide": file}, options.executors),
            "2 versions": _busy(shop, {"wide": file, "twin": file}, 1),
        }
        one, many, _ = found.values()
        usual = (isolation, options.executors, options.size_mb) == ("thread", _EXECUTORS, _SIZE_MB)
        for name, memory in found.items():
            limit = LARGE_MB if usual and memory is many else None
            yield Figure("large", f"{isolation}, {name}", memory.tree / 1e6, limit=limit)
            yield Figure("large", f"{isolation}, {name}, server alone", memory.server / 1e6, limit=SERVER_MB)
            if memory is not one:
                ratio, most = memory.tree / one.tree, GOALS[isolation]
                yield Figure("large", f"{isolation}, {name}, to 1 executor", ratio, "", most)


def tensors(shop: Workshop, options: argparse.Namespace) -> Iterator[Figure]:
    """At rest, and after so many bytes of requests."""
    file = shop.pack("pixels", shop.mlp(_PIXELS, 0), "batchSize: 4\njobQueueSize: 1000\n", signed=_PIXELS)
    body, headers = v2_binary(_PIXELS)
    probe = Probe("/v2/models/pixels/infer", body, b'"outputs"', "application/octet-stream", headers)
    with servers.torchere_with(shop, {"pixels": file}, 2) as endpoint:
        until_answered(endpoint, probe)
        rest = memory_of(endpoint)
        sent = 0
        while sent < options.gib * 2**30:
            url = f"{endpoint.url}{probe.path}"
            load = http_load(url, body, _TENSOR_CLIENTS, _TENSOR_PHASE_S, probe.content_type, headers=headers)
            sent += load.requests * len(body)
        after = memory_of(endpoint)
    for when, memory in (("at rest", rest), (f"after {sent / 2**30:.1f} GiB", after)):
        yield Figure("tensors", when, memory.tree / 1e6)
        yield Figure("tensors", f"{when}, server alone", memory.server / 1e6, limit=SERVER_MB)


def density(shop: Workshop, options: argparse.Namespace) -> Iterator[Figure]:
    """Many tiny models, each with weights of its own, after each was asked once."""
    for words, config, limit in (
        ("defaults", "", None),
        ("shared", "isolation: shared\n", DENSITY_MB * options.models / 100),
    ):
        models = {}
        for number in range(options.models):
            name = f"{words}{number:03}"
            models[name] = shop.pack(name, shop.mlp(FEATURES, 4, seed=number), config)
        with servers.torchere_with(shop, models, 1, ENVELOPE) as endpoint:
            for name in models:
                until_answered(endpoint, _tiny(name))
            log = endpoint.log.read_text(encoding="utf-8", errors="replace")
            if refused := re.search(r".*isolation\b.*one of.*", log):
                raise Unavailable(f"isolation {words}: {refused[0].strip()[:200]}")
            memory = memory_of(endpoint)
        what = f"{options.models} models, {words}, {memory.processes} processes"
        yield Figure("density", what, memory.tree / 1e6, limit=limit)
        yield Figure("density", f"{what}, server alone", memory.server / 1e6)


def cycles(shop: Workshop, options: argparse.Namespace) -> Iterator[Figure]:
    """Register, ask and unregister; most over least memory once the first cycles are over."""
    file = shop.pack("tiny", shop.mlp(FEATURES, 4), "")
    samples: dict[int, Memory] = {}
    # It has a model that stays, for a server that never had one starts things on the first.
    server = servers.torchere_with(shop, {"stays": file}, 1, f"{ENVELOPE}enable_model_api=true\n")
    with server as endpoint, requests.Session() as session:
        until_answered(endpoint, _tiny("stays"))
        processes = memory_of(endpoint).processes
        for number in range(1, options.cycles + 1):
            _cycle(session, endpoint, file)
            if number >= _FIRST_CYCLES and number % _SAMPLE_EVERY == 0:
                samples[number] = _settled(endpoint, processes)
    if len(samples) < 2:
        raise Failed(f"found {options.cycles} cycles, expected {_FIRST_CYCLES + _SAMPLE_EVERY} or more")
    first, last = min(samples), max(samples)
    for kind in ("tree", "server"):
        values = [getattr(memory, kind) / 1e6 for memory in samples.values()]
        whose = ", server alone" if kind == "server" else ""
        yield Figure("cycles", f"after {first} cycles{whose}", values[0])
        yield Figure("cycles", f"after {last} cycles{whose}", values[-1])
        ratio = max(values) / min(values)
        yield Figure("cycles", f"most to least, {first} to {last}{whose}", ratio, "", CYCLES_RATIO)


def programs(shop: Workshop, options: argparse.Namespace) -> Iterator[Figure]:
    """A tiny exported program, whose workers need torch's compiler to load it, in processes of its own."""
    file = shop.pack("program", shop.exported_mlp(FEATURES, 4), "batchSize: 1\nisolation: process\n")
    for count in _WORKERS:
        with servers.torchere_with(shop, {"program": file}, count, ENVELOPE) as endpoint:
            until_answered(endpoint, _tiny("program"))
            _wait_until_ready(endpoint, "program", count)
            memory, away_s = memory_of(endpoint), _away_s(endpoint, "program", count)
        yield Figure("programs", f"workers: {count}", memory.tree / 1e6)
        yield Figure("programs", f"workers: {count}, one that is killed is away", away_s, "s")


def imports(shop: Workshop, options: argparse.Namespace) -> Iterator[Figure]:
    """Workers whose handler imports a large library, without and with `preload_modules`."""
    file = shop.pack("pipelines", None, "isolation: process\n", handler=str(_IMPORTING))
    for words, more in (("imported by each", ""), ("shared", "preload_modules=transformers.pipelines\n")):
        began_s = time.monotonic()
        with servers.torchere_with(shop, {"pipelines": file}, max(_WORKERS), more) as endpoint:
            until_answered(endpoint, Probe("/predictions/pipelines", b"{}", b"pipelines"))
            _wait_until_ready(endpoint, "pipelines", max(_WORKERS))
            up_s = time.monotonic() - began_s
            memory, away_s = memory_of(endpoint), _away_s(endpoint, "pipelines", max(_WORKERS))
        what = f"workers: {max(_WORKERS)}, {words}"
        yield Figure("imports", what, memory.tree / 1e6)
        yield Figure("imports", f"{what}: all are up after", up_s, "s")
        yield Figure("imports", f"{what}: one that is killed is away", away_s, "s")


_MEASURES = {
    "large": large,
    "tensors": tensors,
    "density": density,
    "cycles": cycles,
    "programs": programs,
    "imports": imports,
}


def _away_s(endpoint: Endpoint, model: str, executors: int) -> float:
    """Kill one worker; return the seconds until as many are READY without it."""
    worker = requests.get(f"{endpoint.management}/models/{model}", timeout=10).json()[0]["workers"][0]
    os.kill(worker["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    _wait_until_ready(endpoint, model, executors, without=worker["pid"])
    return time.monotonic() - killed_s


def _busy(shop: Workshop, models: dict[str, str], executors: int) -> Memory:
    """Memory of a fresh server with that many executors for each model, after all have been busy."""
    names = list(models)
    with servers.torchere_with(shop, models, executors, ENVELOPE) as endpoint:
        for name in names:
            until_answered(endpoint, replace(_tiny(name), body=instances_body(LARGE)))
            _wait_until_ready(endpoint, name, executors)
        _wait_until_unpacked(endpoint)  # what is moved out of an archive counts when it is read again

        def predict(number: int) -> None:
            url = f"{endpoint.url}/predictions/{names[number % len(names)]}"
            headers = {"Content-Type": "application/json"}
            requests.post(url, instances_body(LARGE), headers=headers, timeout=120).raise_for_status()

        # Twice as many at a time as there are executors, so that none is ever without work.
        with ThreadPoolExecutor(2 * executors) as clients:
            list(clients.map(predict, range(_PREDICTIONS_PER_EXECUTOR * executors * len(names))))
        return memory_of(endpoint)


def _tiny(name: str) -> Probe:
    return Probe(f"/predictions/{name}", instances_body(), b'"predictions"')


def _cycle(session: requests.Session, endpoint: Endpoint, file: str) -> None:
    models = f"{endpoint.management}/models"
    query = {"url": file, "model_name": "comes", "initial_workers": "1", "synchronous": "true"}
    session.post(models, params=query, timeout=START_S).raise_for_status()
    url, headers = f"{endpoint.url}/predictions/comes", {"Content-Type": "application/json"}
    session.post(url, instances_body(), headers=headers, timeout=START_S).raise_for_status()
    session.delete(f"{models}/comes", timeout=START_S).raise_for_status()


def _settled(endpoint: Endpoint, processes: int) -> Memory:
    """Memory when no more processes run than at the start, or after `_SETTLE_S`."""
    give_up_s = time.monotonic() + _SETTLE_S
    while (found := memory_of(endpoint)).processes > processes and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return found


def _wait_until_ready(endpoint: Endpoint, model: str, executors: int, without: int = 0) -> None:
    """Block until that many executors of the model are READY, without one process id.

    Raises:
        Failed: they are not after `START_S`, or the server has ended.
    """
    give_up_s = time.monotonic() + START_S
    while True:
        answer = requests.get(f"{endpoint.management}/models/{model}", timeout=10)
        workers = answer.json()[0]["workers"] if answer.ok else []
        ready = [worker["pid"] for worker in workers if worker["status"] == "READY"]
        if len(ready) >= executors and without not in ready:
            return
        if endpoint.process.poll() is not None or time.monotonic() > give_up_s:
            raise Failed(f"{model} has no {executors} READY executors: {last_words(endpoint)}")
        time.sleep(0.02)


def _wait_until_unpacked(endpoint: Endpoint) -> None:
    """Block until the server has let go of its archives: large weights stay in them for a moment."""
    give_up_s = time.monotonic() + START_S
    while ".mar" in Path(f"/proc/{endpoint.process.pid}/maps").read_text():
        if time.monotonic() > give_up_s:
            raise Failed("the server still has the pages of an archive in its memory")
        time.sleep(0.2)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Memory of the server and its workers.")
    parser.add_argument(
        "--parts", type=Listed(PARTS), default=list(PARTS), metavar="PART,...", help="default: all"
    )
    parser.add_argument("--tree", help="a commit, or a folder with a .venv; default: this checkout")
    parser.add_argument("--size-mb", type=float, default=_SIZE_MB, help="large: default %(default)s")
    parser.add_argument("--executors", type=int, default=_EXECUTORS, help="large: default %(default)s")
    parser.add_argument("--isolation", choices=tuple(GOALS), help="large: measure this one only")
    parser.add_argument(
        "--gib", type=float, default=10.0, help="tensors: bytes of requests; default %(default)s"
    )
    parser.add_argument("--models", type=int, default=100, help="density: default %(default)s")
    parser.add_argument("--cycles", type=int, default=1000, help="cycles: default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
