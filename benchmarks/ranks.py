"""A model over two ranks: its answers, the memory of each rank, and its speed beside the same under torchrun.

    python benchmarks/ranks.py [--pairs 5] [--seconds 4] [--starts 3] [--parts memory,speed,start]

memory  a transformer of 170 MB in one process, with `parallel: {tensor: 2}`, `{pipeline: 2}` and both: the
        greatest difference of the answers, and the PSS of each process above that of a model without weights
speed   requests a second with `tensor: 2` and two clients, and batches of one a second of the same module,
        split by the same plan, in a loop under torchrun; in turns
start   seconds from the order to start a worker until it serves, of the class without weights and of a small
        Llama in a Hugging Face folder; processor time and PSS of each rank. No goal

The ranks talk by gloo over loopback. Exit status 1: a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests
import torch
from handlers.layers import WORDS, Layers
from harness import servers
from harness.errors import Failed
from harness.load import http_load
from harness.machine import facts
from harness.models import Workshop
from harness.pairs import interval, ratios
from harness.processes import Endpoint, Probe, ask, until_answered
from harness.pss import pss

from torchere.archiver.models.spread import spread
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.split import Split
from torchere.archiver.writer import write_archive
from torchere.serving.commands.cli import main as torchere

HERE = Path(__file__).parent
LENGTH = 64  # words of a request
KINDS = {
    "one process": "",
    "tensor": "parallel: {tensor: 2}\n",
    "pipeline": "parallel: {pipeline: 2}\n",
    "both": "parallel: {tensor: 2, pipeline: 2}\n",
}
MOST_DIFFERENCE = 1e-4
MOST_MEMORY = 0.6  # of a rank above the runtime's own, to the weights of the whole model
LEAST_SPEED = 0.95  # of the loop under torchrun
_TYPE = "application/json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--parts", default="memory,speed,start")
    parser.add_argument("--loop", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.loop:
        loop(options.loop)
        return 0
    machine = facts()
    print(f"{machine.cpu}, {machine.cores} cores, PyTorch {machine.torch}", flush=True)
    with tempfile.TemporaryDirectory(prefix="torchere-ranks-") as folder:
        shop = Workshop(Path(folder))
        parts = {"memory": memory, "speed": speed, "start": start}
        return 0 if all([parts[part](shop, options) for part in options.parts.split(",")]) else 1


def memory(shop: Workshop, options: argparse.Namespace) -> bool:
    """Compare the answers and the memory of each kind."""
    weights_mb = sum(each.numel() * 4 for each in Layers().parameters()) / 1e6
    bodies = [words(seed) for seed in range(8)]
    answers: dict[str, torch.Tensor] = {}
    reached = True
    for kind in KINDS:
        with served(shop, kind, "big") as endpoint, served(shop, kind, "none") as empty:
            answers[kind] = torch.tensor([answer(endpoint, body) for body in bodies])
            answer(empty, bodies[0])
            own = [(big - none) / 1e6 for big, none in zip(workers(endpoint), workers(empty), strict=True)]
        difference = (answers[kind] - answers["one process"]).abs().max().item()
        good = difference <= MOST_DIFFERENCE and (len(own) == 1 or max(own) <= MOST_MEMORY * weights_mb)
        reached = reached and good
        shown = ", ".join(f"{each:.0f}" for each in own)
        print(
            f"{kind:<12} weights {weights_mb:.0f} MB, above the runtime's own {shown} MB, difference "
            f"{difference:.1e}: {'reached' if good else 'MISSED'}",
            flush=True,
        )
    return reached


def speed(shop: Workshop, options: argparse.Namespace) -> bool:
    """Compare requests a second with batches a second under torchrun."""
    mine: list[float | None] = []
    bare: list[float | None] = []
    with served(shop, "tensor", "big") as endpoint:
        url = f"{endpoint.url}/predictions/big"
        http_load(url, words(0), 2, options.seconds, _TYPE)
        for _ in range(options.pairs):
            mine.append(http_load(url, words(0), 2, options.seconds, _TYPE).per_second)
            bare.append(under_torchrun(options.seconds))
            print(f"server {mine[-1]:.1f} a second, torchrun {bare[-1]:.1f}", flush=True)
    found = interval(ratios(mine, bare))
    print(f"ratio {found.median:.3f} ({found.low:.3f}-{found.high:.3f}), goal {LEAST_SPEED}")
    return found.median >= LEAST_SPEED


def start(shop: Workshop, options: argparse.Namespace) -> bool:
    """Start workers of each kind; print how long that takes, and what it costs."""
    splits = {"tensor": "tensor=2", "pipeline": "pipeline=2", "both": "tensor=2,pipeline=2"}
    _save_llama(shop.folder / "llama")
    for kind, split in splits.items():
        _pack(shop, f"class_{kind}", KINDS[kind], small=True)
        given = [f"--model-name=llama_{kind}", f"--serialized-file={shop.folder / 'llama'}"]
        if torchere(["archive", *given, f"--export-path={shop.store}", f"--parallel={split}"]):
            raise Failed(f"the Llama was not packed with --parallel {split}")
    with servers.torchere_with(shop, {}, 0, "enable_model_api=true\n") as endpoint:
        while ask(endpoint.url, Probe("/v2", b"", b""))[0] == 0:
            time.sleep(0.05)
        for model in [f"{name}_{kind}" for name in ("class", "llama") for kind in splits]:
            models = f"{endpoint.management}/models"
            requests.post(f"{models}?url={model}.mar&initial_workers=0", timeout=60).raise_for_status()
            for _ in range(options.starts):
                _start_once(f"{models}/{model}", model)
    return True


def _start_once(url: str, model: str) -> None:
    """Scale a model to one worker and back to none."""
    began_s = time.monotonic()
    requests.put(f"{url}?min_worker=1&synchronous=true", timeout=300).raise_for_status()
    wall_s = time.monotonic() - began_s
    first = psutil.Process(requests.get(url, timeout=60).json()[0]["workers"][0]["pid"])
    ranks = [first, *first.children()]
    used = [rank.cpu_times().user + rank.cpu_times().system for rank in ranks]
    held = ", ".join(f"{pss(rank.pid) / 1e6:.0f}" for rank in ranks)
    requests.put(f"{url}?min_worker=0&max_worker=0&synchronous=true", timeout=60).raise_for_status()
    shown = ", ".join(f"{each:.2f}" for each in used)
    load = os.getloadavg()[0]
    print(
        f"{model:<15} serves after {wall_s:.2f} s, processor time {sum(used):.2f} s ({shown}), "
        f"PSS {held} MB; load {load:.1f}",
        flush=True,
    )


def _save_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=50,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def served(shop: Workshop, kind: str, model: str) -> Iterator[Endpoint]:
    """Serve the transformer (`big`), or one without weights to speak of (`none`)."""
    name = f"{model}_{kind.replace(' ', '_')}"
    if not (shop.store / f"{name}.mar").exists():
        _pack(shop, name, KINDS[kind], small=model == "none")
    with servers.torchere_with(shop, {model: f"{name}.mar"}, 1) as endpoint:
        until_answered(endpoint, Probe(f"/predictions/{model}", words(0), b"["))
        yield endpoint


def _pack(shop: Workshop, name: str, config: str, *, small: bool) -> None:
    source = (HERE / "handlers" / "layers.py").read_text(encoding="utf-8")
    if small:
        source = source.replace("WIDTH, HEADS, LAYERS, WORDS, CLASSES = 768, 12,", _SMALL)
    file, settings, weights = (shop.folder / f"{name}{end}" for end in (".py", ".yaml", ".pth"))
    file.write_text(source, encoding="utf-8")
    settings.write_text(f"batchSize: 1\nisolation: process\n{config}", encoding="utf-8")
    space: dict[str, object] = {}
    exec(compile(source, str(file), "exec"), space)
    torch.save(space["Layers"]().state_dict(), weights)  # type: ignore[operator]
    write_archive(
        ArchiveRequest(
            model_name=name,
            version="1.0",
            handler=str(HERE / "handlers" / "words.py"),
            model_file=file,
            serialized_file=weights,
            export_path=shop.store,
            config_file=settings,
        )
    )


_SMALL = "WIDTH, HEADS, LAYERS, WORDS, CLASSES = 16, 2,"


def words(seed: int) -> bytes:
    """A request."""
    chosen = random.Random(seed)
    return json.dumps([chosen.randrange(WORDS) for _ in range(LENGTH)]).encode()


def answer(endpoint: Endpoint, body: bytes) -> list[float]:
    """The answer to a request of the only model."""
    model = "big" if ask(endpoint.url, Probe("/predictions/big", body, b"["))[0] == 200 else "none"
    status, text = ask(endpoint.url, Probe(f"/predictions/{model}", body, b"["))
    if status != 200:
        raise Failed(f"{model} answers {status}: {text[:200]!r}")
    found: list[float] = json.loads(text)
    return found


def workers(endpoint: Endpoint) -> list[int]:
    """PSS of each process of the model, rank 0 first; the fork server and the listener are left out."""
    tree = psutil.Process(endpoint.process.pid).children(recursive=True)
    forked = [process for process in tree if "fork_server" in " ".join(process.cmdline())]
    deepest = max(forked, key=lambda process: len(process.parents()))
    ranks = [process for process in forked if len(process.parents()) == len(deepest.parents())]
    first = psutil.Process(deepest.ppid())
    group = ranks if "fork_server" not in " ".join(first.cmdline()) else [first, *ranks]
    return [pss(process.pid) for process in group if process.ppid() != endpoint.process.pid]


def under_torchrun(seconds: float) -> float:
    """Batches a second of the same module, split by the same plan, under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__)), "--loop", str(seconds)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("a second: ")]
    if not found:
        raise Failed(f"torchrun ended with {done.returncode}: {done.stderr[-800:]}")
    return float(found[0].removeprefix("a second: "))


def loop(seconds: float) -> None:
    """Run batches of one row in every rank for a time, and print how many there were a second."""
    torch.set_num_threads(1)
    model = spread(Layers().eval(), Split(tensor=2), torch.device("cpu"))
    row = torch.tensor([json.loads(words(0))])
    with torch.inference_mode():
        for _ in range(5):
            model(row)
        count, began_s = 0, time.monotonic()
        goes_on = torch.ones(1)
        while goes_on.item():
            model(row)
            count += 1
            goes_on[0] = float(time.monotonic() - began_s < seconds)
            torch.distributed.broadcast(goes_on, src=0)
        elapsed_s = time.monotonic() - began_s
    if os.environ["RANK"] == "0":
        print(f"a second: {count / elapsed_s}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
