"""How long models take when nothing else gets in the way: the quick end of many runs, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchere.archiver.models.verify_timing import one_thread

_WARM_UPS = 3  # the first runs of TorchScript profile and compile
_LEAST, _ENOUGH = 10, 400  # runs of each
_QUICK = 0.1  # what is said is slower than this share of the runs; the least alone is luck


def quick_ms(
    models: Sequence[Callable[..., Any]], arguments: Sequence[torch.Tensor], budget_s: float
) -> list[float]:
    """The tenth percentile of each model's processor time for a run on one thread, in milliseconds.

    Processor time, which is the time on the clock when nothing else runs, leaves out the moments in which
    others had the core; the quick end leaves out the runs that found the cache full of what others put there.
    """
    times: list[list[float]] = [[] for _ in models]
    with torch.inference_mode(), one_thread():
        for model in models:
            for _ in range(_WARM_UPS):
                model(*arguments)
        end = time.perf_counter() + budget_s
        while len(times[0]) < _LEAST or (len(times[0]) < _ENOUGH and time.perf_counter() < end):
            for model, found in zip(models, times, strict=True):
                started = time.thread_time()
                model(*arguments)
                found.append(time.thread_time() - started)
    return [1e3 * sorted(found)[int(_QUICK * len(found))] for found in times]
