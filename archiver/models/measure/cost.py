"""Measures the processor time of models: on one thread, in interleaved rounds, by the tenth percentile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from torchere.archiver.models.inputs.examples import spread
from torchere.archiver.models.inputs.run import Run, copies
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.signature import Signature, common_limit

Samples = Sequence[Tensors]
BATCH_SIZES = (1, 8)
_WARM_UPS = 3  # the first runs of TorchScript profile and compile
_LEAST, _MOST = 5, 400  # minimum and maximum number of rounds
_QUICK = 0.1  # the percentile, as a share of the runs; the minimum would depend on luck
_TURN = 3  # runs of a model in a row in each round
_LONG_S = 0.05  # a run that takes longer works on more data than the caches hold
_BUSY = 1.5  # with more runnable programs per core, averaged over the last minute, the cores count as busy
_SHAPES = 3  # different shapes of samples that a model is timed on


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, because executors share the cores, and one thread's time varies less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def fewer_threads_when_busy() -> Iterator[None]:
    """Let torch use one thread if other programs keep the cores busy.

    OpenMP's threads spin while they wait for one another. With four runnable programs for each of two cores,
    a run of EfficientNet-Lite0 took 2.4 s on two threads and 74 ms on one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    is_busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > _BUSY * cores
    with one_thread() if is_busy else contextlib.nullcontext():
        yield


def processor_ms(models: Sequence[Run], arguments: Sequence[torch.Tensor], budget_s: float) -> list[float]:
    """Return the tenth percentile of each model's processor time per run on one thread, in milliseconds.

    Every decision between forms of a model is made on this clock. Wall time would count the moments in which
    other programs had the core, which on a shared machine was measured to be off by a factor of 9. The low
    percentile leaves out the runs that found the cache full of other programs' data. The models run in turns,
    so that a slow moment of the processor affects all of them. In its turn a model runs three times, and the
    first run does not count: it loads the weights into the caches again, where a server that runs one model
    finds them. If a run takes 50 ms or more, a turn is one run.

    There are 5 to 400 rounds; more than 5 only within the budget of processor seconds for all models.

    A model's speed depends on the shapes of its first runs: oneDNN's int8 layers pack their weights for the
    first shape, and were 10 times slower with others (EfficientNet-Lite0). So pass models that are freshly
    loaded, or whose first runs had these shapes. docs/decisions/0027 has the measurements.
    """
    times: list[list[float]] = [[] for _ in models]
    with one_thread(), torch.inference_mode():
        first = [min(_seconds(model, arguments) for _ in range(_WARM_UPS)) for model in models]
        end = time.process_time() + budget_s
        rounds = 0
        while rounds < _LEAST or (rounds < _MOST and time.process_time() < end):
            for model, one_s, found in zip(models, first, times, strict=True):
                runs = [_seconds(model, arguments) for _ in range(_TURN if one_s < _LONG_S else 1)]
                found.extend(runs[1:] or runs)
            rounds += 1
    return [1e3 * sorted(found)[int(_QUICK * len(found))] for found in times]


def _seconds(model: Run, arguments: Sequence[torch.Tensor]) -> float:
    """Return the processor time of a run over all threads, because onnxruntime computes in its own."""
    given = copies(arguments)
    started = time.process_time()
    model(*given)
    return time.process_time() - started


def gain(before_ms: Mapping[int, float], after_ms: Mapping[int, float]) -> float:
    """Return the speed-up, before / after: the geometric mean over the batch sizes that both have."""
    sizes = before_ms.keys() & after_ms.keys()
    product = 1.0
    for size in sizes:
        product *= before_ms[size] / after_ms[size] if after_ms[size] else 1.0
    return float(product ** (1 / max(1, len(sizes))))


def told_times(before_ms: Mapping[int, float], after_ms: Mapping[int, float]) -> str:
    """Return the times by batch size as text: `7.1 -> 3.2 ms for a batch of 1, ...`."""
    return ", ".join(
        f"{before_ms[size]:.3g} -> {after_ms[size]:.3g} ms for a batch of {size}"
        for size in sorted(before_ms)
    )


def batch_sizes(*signatures: Signature | None) -> tuple[int, ...]:
    """Return `BATCH_SIZES`, or the nearest sizes that all models support, the smallest first."""
    inputs = [spec for signature in signatures if signature for spec in signature.inputs]
    limit = common_limit([one for spec in inputs for one in spec.limits_of(0)])
    most, step = limit.most or max(limit.least, *BATCH_SIZES), limit.multiple
    sizes = (min(max(size, limit.least), most) for size in BATCH_SIZES)
    up = ((size, -(-size // step) * step) for size in sizes)
    return tuple(sorted({high if high <= most else size // step * step for size, high in up}))


def times_by_batch(
    models: Sequence[Run],
    samples: Samples,
    batched: bool,
    budget_s: float,
    sizes: Sequence[int] = BATCH_SIZES,
) -> list[dict[int, float]]:
    """Return the milliseconds per run by batch size for each model, as the mean over up to three shapes.

    A batched model is timed at each of `sizes`, the smallest first, because a server's first run has one row.

    Args:
        models: freshly loaded, see `processor_ms`.
        samples: at least one sample.
        batched: whether the first dimension of every input is a batch of any size.
        budget_s: processor seconds for each batch size, for all models and shapes together.
        sizes: see `batch_sizes`.
    """
    found: list[dict[int, float]] = [{} for _ in models]
    for size in sizes if batched else (1,):
        calls = shapes_of(samples, batched, size)
        times = [processor_ms(models, call, budget_s / len(calls)) for call in calls]
        for index, by_size in enumerate(found):
            by_size[size] = sum(one[index] for one in times) / len(times)
    return found


def _fits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether the rows of both samples can be combined into one batch."""
    return [tensor.shape[1:] for tensor in one] == [tensor.shape[1:] for tensor in other]


def batch_of(samples: Samples, size: int) -> Tensors:
    """Return the arguments of a call with `size` rows of the samples, which are repeated if they have fewer.

    Rows lie along the first dimension. Samples whose other dimensions differ from the first one's are left
    out.
    """
    first = samples[0]
    alike = [one for one in samples if _fits(one, first)]
    joined = [torch.cat([one[index] for one in alike[:size]]) for index in range(len(first))]
    return tuple(
        tensor.repeat(-(-size // len(tensor)), *[1] * (tensor.dim() - 1))[:size] for tensor in joined
    )


def shapes_of(samples: Samples, batched: bool, size: int = 1) -> list[Tensors]:
    """Return the arguments of one call for each of up to three different shapes among the samples.

    Calls have `size` rows if `batched`. The first sample's shape comes first.
    """
    rows = [tuple(tensor[:1] for tensor in one) for one in samples] if batched else list(samples)
    by_shape = {tuple(tensor.shape for tensor in row): row for row in reversed(rows)}
    first = tuple(tensor.shape for tensor in rows[0])
    others = [row for shape, row in by_shape.items() if shape != first]
    found = [rows[0], *spread(others, _SHAPES - 1)]
    if not batched:
        return found
    return [batch_of([one for one in samples if _fits(one, row)], size) for row in found]
