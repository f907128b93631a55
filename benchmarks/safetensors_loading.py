"""Loading safetensors: time, memory, and the speed of a model on the loaded weights.

    python benchmarks/safetensors_loading.py [--python OTHER_TREE/.venv/bin/python] [--rounds 5]

Writes one file of float32 matrices, reads it once so that it is in the page cache, and loads it in a fresh
process a round: by `read_safetensors` of this tree, and of the tree that `--python` belongs to, in turns.
Printed are medians and the range. Linux only: memory is VmRSS and VmHWM of /proc/self/status.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

_WIDTH = 2048
_LAYER_MB = _WIDTH * _WIDTH * 4 / 1e6
_CHILD = """
import json, statistics, sys, time
from pathlib import Path
import torch
from torchere.archiver.models.load.safetensors import read_safetensors

def memory_mb(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6

def timed(run):
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1e3

torch.set_num_threads(1)
with torch.device("meta"):
    names, width = range(int(sys.argv[2])), int(sys.argv[3])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in names))
row = torch.ones(1, width)
(row @ row.T).item()
before = memory_mb("VmRSS")
load = timed(lambda: model.load_state_dict(read_safetensors(Path(sys.argv[1])), assign=True))
after, peak = memory_mb("VmRSS"), memory_mb("VmHWM")
with torch.inference_mode():
    first = timed(lambda: model(row))
    runs = [timed(lambda: model(row)) for _ in range(20)]
found = {"load, ms": load, "resident growth, MB": after - before, "peak growth, MB": peak - before}
print(json.dumps({**found, "first run, ms": first, "later run, ms": statistics.median(runs)}))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time and memory of loading safetensors.")
    parser.add_argument("--python", type=Path, help="the interpreter of another tree, to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=420)
    options = parser.parse_args()
    trees = {"this tree": sys.executable, **({"other tree": str(options.python)} if options.python else {})}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.safetensors")
        layers = max(1, round(options.size_mb / _LAYER_MB))
        save_file({f"{index}.weight": torch.rand(_WIDTH, _WIDTH) / _WIDTH for index in range(layers)}, path)
        path.read_bytes()
        print(f"{path.stat().st_size / 1e6:.0f} MB, {layers} layers, {options.rounds} rounds")
        rounds = [
            {name: _measured(python, path, layers) for name, python in trees.items()}
            for _ in range(options.rounds)
        ]
    for name in trees:
        for what in rounds[0][name]:
            values = [one[name][what] for one in rounds]
            print(
                f"{name:<12}{what:<22}{statistics.median(values):8.0f}  ({min(values):.0f}-{max(values):.0f})"
            )


def _measured(python: str, path: Path, layers: int) -> dict[str, float]:
    done = subprocess.run(
        [python, "-c", _CHILD, str(path), str(layers), str(_WIDTH)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
