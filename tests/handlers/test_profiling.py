from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# In a process of its own, for two profilers at once end the process.
THREADS = """
import threading
import torch
from torchere.handlers.base import run_profiled

results = []

def run():
    for _ in range(4):
        results.append(run_profiled(lambda: torch.ones(64, 64) @ torch.ones(64, 64), "m", {})[0].sum())

threads = [threading.Thread(target=run) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(results))
"""


def test_batches_of_several_threads_are_profiled_in_turn(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == "16"
    assert len(list((tmp_path / "pytorch_profiler" / "m").glob("*.json"))) == 16
