from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchere.handlers.base import BaseHandler
from torchere.handlers.micro_batching import MicroBatching

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


@pytest.mark.parametrize("in_parts", [False, True])
def test_describe_runs_no_stage(
    make_context: Any, begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "true")
    handler = BaseHandler()
    handler.describe_handle = lambda: {"inputs": 3}  # type: ignore[method-assign]
    handle = MicroBatching(handler) if in_parts else handler.handle
    context = make_context(tmp_path)
    begin(context, 1, describe="True")
    assert handle([{}], context) == [{"inputs": 3}]
