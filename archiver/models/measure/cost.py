"""Measures the run time of models: in turns, on one thread, by the median or the tenth percentile."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Model = Callable[..., Any]
Samples = Sequence[tuple[torch.Tensor, ...]]
BATCH_SIZES = (1, 8)
_WARM_UPS = 3  # the first runs of TorchScript profile and compile
_ENOUGH = 200  # runs; more do not change the median
_LEAST, _MANY = 10, 400  # least and most runs for the tenth percentile
_QUICK = 0.1  # the percentile, as a share of the runs; the minimum alone is luck


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: executors share the cores, and one thread's time is steadier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def medians_ms(models: Sequence[Model], arguments: Sequence[torch.Tensor], budget_s: float) -> list[float]:
    """Return the median time of a run of each model, in milliseconds.

    The models run in turns, so that a busy moment of the machine hits all alike. Stops after 200 rounds or
    once the budget is spent; each model runs at least once after its warm-up.
    """
    times = _in_turns(models, arguments, time.perf_counter, range(1, _ENOUGH), budget_s)
    return [1e3 * statistics.median(found) for found in times]


def quick_ms(models: Sequence[Model], arguments: Sequence[torch.Tensor], budget_s: float) -> list[float]:
    """Return the tenth percentile of each model's processor time per run on one thread, in milliseconds.

    Processor time, which equals the wall time on an idle machine, leaves out the moments in which other
    programs had the core; the low percentile leaves out the runs that found the cache full of their data.
    """
    with one_thread():
        times = _in_turns(models, arguments, time.thread_time, range(_LEAST, _MANY), budget_s)
    return [1e3 * sorted(found)[int(_QUICK * len(found))] for found in times]


def _in_turns(
    models: Sequence[Model],
    arguments: Sequence[torch.Tensor],
    clock: Callable[[], float],
    rounds: range,
    budget_s: float,
) -> list[list[float]]:
    """Return the seconds by `clock` of each model's runs; `rounds` is the least and the most of them.

    More rounds than the least run only within the budget.
    """
    times: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for model in models:
            for _ in range(_WARM_UPS):
                model(*arguments)
        end = time.perf_counter() + budget_s
        while len(times[0]) < rounds.start or (len(times[0]) < rounds.stop and time.perf_counter() < end):
            for model, found in zip(models, times, strict=True):
                started = clock()
                model(*arguments)
                found.append(clock() - started)
    return times


def batches_of(samples: Samples, batched: bool) -> dict[int, tuple[torch.Tensor, ...]]:
    """Return the arguments to time models with, by batch size; only the first sample if not batched.

    The sizes of a batched model are `BATCH_SIZES`.
    """
    return {size: batch_of(samples, size) for size in BATCH_SIZES} if batched else {1: samples[0]}


def batch_of(samples: Samples, size: int) -> tuple[torch.Tensor, ...]:
    """Return one call's arguments of `size` rows, from the samples, repeated when they have fewer.

    Rows lie along the first dimension. Samples whose other dimensions differ from the first one's are left
    out.
    """
    first = samples[0]
    alike = [one for one in samples if [t.shape[1:] for t in one] == [t.shape[1:] for t in first]]
    joined = [torch.cat([one[index] for one in alike[:size]]) for index in range(len(first))]
    return tuple(
        tensor.repeat(-(-size // len(tensor)), *[1] * (tensor.dim() - 1))[:size] for tensor in joined
    )
