"""What a second executor brings: one copy of the weights on two threads, and what the machine allows at most.

The same package in two processes shares nothing but the machine, so what these reach is the limit.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from quantised.compiled import Both
from quantised.zoo import Sample
from torchere.archiver.models.measure.cost import one_thread
from torchere.handlers.compiled.load import load_package
from torchere.serving.process.allocator import keep_freed_memory

_ROUNDS, _ROUND_S = 25, 0.4  # many and short: what neighbours of the machine do changes by the second
_START_S = 12.0  # a process needs that to import torch, on a busy machine
_LEAD_S = 0.2  # a task needs that to reach its thread or process
_LOADED: dict[str, Any] = {}  # in a process of the pool: its model and its arguments


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many times as many runs two do as one: medians over rounds, taken in turns."""

    aoti_threads: float
    aoti_processes: float
    torchscript_threads: float


def measured(forms: Both, sample: Sample) -> Scaling:
    """Run each kind alone and in pairs; some one and a half minutes."""
    arguments = (str(forms.aoti_file), sample)
    with (
        ThreadPoolExecutor(2) as threads,
        ProcessPoolExecutor(2, get_context("spawn"), initializer=_load, initargs=arguments) as processes,
        one_thread(),
    ):
        _rate(processes, 2, _run_loaded, (), _START_S)
        kinds: list[tuple[Executor, Callable[..., int], tuple[Any, ...]]] = [
            (threads, _run, (forms.aoti, sample)),
            (processes, _run_loaded, ()),
            (threads, _run, (forms.torchscript, sample)),
        ]
        ratios: list[list[float]] = [[] for _ in kinds]
        for _ in range(_ROUNDS):
            for (pool, run, given), found in zip(kinds, ratios, strict=True):
                found.append(_rate(pool, 2, run, given) / _rate(pool, 1, run, given))
    return Scaling(*(statistics.median(found) for found in ratios))


def _rate(
    pool: Executor, count: int, run: Callable[..., int], given: tuple[Any, ...], lead_s: float = _LEAD_S
) -> float:
    """Runs of all together in one round, which begins after `lead_s` seconds."""
    start = time.monotonic() + lead_s
    tasks = [pool.submit(run, *given, start, start + _ROUND_S) for _ in range(count)]
    return float(sum(task.result() for task in tasks))


def _load(file: str, sample: Sample) -> None:
    keep_freed_memory(os.environ)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="torchere-aoti-") as folder:
        _LOADED.update(model=load_package(file, folder, "cpu"), sample=sample)


def _run_loaded(start: float, end: float) -> int:
    return _run(_LOADED["model"], _LOADED["sample"], start, end)


def _run(model: Callable[..., Any], sample: Sample, start: float, end: float) -> int:
    """Runs from `start` to `end`, both on the clock that all processes of a system share."""
    torch.set_num_threads(1)  # a setting of the calling thread
    count = 0
    with torch.inference_mode():
        model(*sample)
        time.sleep(max(0.0, start - time.monotonic()))
        while time.monotonic() < end:
            model(*sample)
            count += 1
    return count
