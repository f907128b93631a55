"""Packs one large TorchScript model with torchere and with the real torch-model-archiver, in turns.

    python benchmarks/packing.py [--rounds 3] [--size-mb 400] [--json FILE]

Both are timed as whole commands, each round once, so that the machine's moods hit both alike; the figure is
the median. torchere's archive is packed twice and must be the same bytes. Exit code 1 when it is not, or when
torchere takes more than `GOAL` of the other's time. The real archiver lives in an environment of its own
(`python tests/interop/real_torchserve.py --build-only` makes it). Needs about four times the model's size
on disk.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".peers" / "torchserve" / "bin" / "torch-model-archiver"
GOAL = 1 / 5  # torchere's time over the other's
_WIDTH = 2048  # one square float32 layer of this width has 16 MiB
_LAYER_MB = _WIDTH * _WIDTH * 4 / 1e6


@dataclass(frozen=True, slots=True)
class Result:
    """One comparison. Times are medians over `rounds`, in seconds; `ratio` is torchere's over the peer's."""

    model_bytes: int
    rounds: int
    torchere_s: float
    peer_s: float
    ratio: float
    torchere_bytes: int
    peer_bytes: int
    equal_when_packed_twice: bool
    cpu_count: int
    python: str


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and say by the exit code whether the goal is met."""
    parser = argparse.ArgumentParser(description="Time packing against torch-model-archiver.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size-mb", type=int, default=400)
    parser.add_argument("--peer", type=Path, default=PEER, help="the real torch-model-archiver")
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args(argv)
    if not options.peer.exists():
        print(f"{options.peer} is missing; run: python tests/interop/real_torchserve.py --build-only")
        return 2
    with tempfile.TemporaryDirectory(prefix="torchere-packing-") as folder:
        result = measure(Path(folder), options.peer, options.rounds, options.size_mb)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0 if result.equal_when_packed_twice and result.ratio <= GOAL else 1


def measure(folder: Path, peer: Path, rounds: int, size_mb: int) -> Result:
    """Make the model in `folder` and pack it `rounds` times with each archiver."""
    model = _make_model(folder / "model.pt", size_mb)
    ours, theirs, twin = folder / "torchere", folder / "peer", folder / "twin"
    commands: dict[Path, list[str]] = {
        ours: [sys.executable, "-m", "torchere.archiver"],
        theirs: [str(peer)],
    }
    times: dict[Path, list[float]] = {ours: [], theirs: []}
    for number in range(rounds):
        order = [ours, theirs] if number % 2 == 0 else [theirs, ours]
        for target in order:
            times[target].append(_pack(commands[target], model, target))
    _pack(commands[ours], model, twin)
    torchere_s, peer_s = statistics.median(times[ours]), statistics.median(times[theirs])
    return Result(
        model_bytes=model.stat().st_size,
        rounds=rounds,
        torchere_s=round(torchere_s, 3),
        peer_s=round(peer_s, 3),
        ratio=round(torchere_s / peer_s, 4),
        torchere_bytes=(ours / "large.mar").stat().st_size,
        peer_bytes=(theirs / "large.mar").stat().st_size,
        equal_when_packed_twice=filecmp.cmp(ours / "large.mar", twin / "large.mar", shallow=False),
        cpu_count=os.cpu_count() or 1,
        python=platform.python_version(),
    )


def table(result: Result) -> str:
    """The result for people."""
    rows = (
        f"TorchScript model of {result.model_bytes / 1e6:.0f} MB, median of {result.rounds} rounds, "
        f"{result.cpu_count} CPUs, Python {result.python}",
        f"{'archiver':<22}{'seconds':>10}{'archive MB':>12}",
        f"{'torchere':<22}{result.torchere_s:>10.2f}{result.torchere_bytes / 1e6:>12.1f}",
        f"{'torch-model-archiver':<22}{result.peer_s:>10.2f}{result.peer_bytes / 1e6:>12.1f}",
        f"ratio {result.ratio:.3f} (goal: at most {GOAL}); "
        f"packed twice: {'equal bytes' if result.equal_when_packed_twice else 'DIFFERENT BYTES'}",
    )
    return "\n".join(rows)


def _make_model(path: Path, size_mb: int) -> Path:
    """Save a TorchScript stack of layers with random weights, which compress as badly as trained ones."""
    import torch  # noqa: PLC0415  # seconds to import, so not before the arguments are known to be right

    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(max(1, round(size_mb / _LAYER_MB)))]
    torch.jit.script(torch.nn.Sequential(*layers)).save(str(path))
    return path


def _pack(command: list[str], model: Path, target: Path) -> float:
    """Run one archiver as a command of its own; returns the seconds from its start to its end."""
    target.mkdir(exist_ok=True)
    arguments = ["--model-name", "large", "--version", "1.0", "--handler", "base_handler"]
    arguments += ["--serialized-file", str(model), "--export-path", str(target), "--force"]
    started_s = time.perf_counter()
    subprocess.run([*command, *arguments], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
