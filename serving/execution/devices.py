"""What this process may use, and how executors share it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torchere.serving.execution.executor import ExecutorStatus
from torchere.serving.execution.gpus import visible_gpus

logger = logging.getLogger(__name__)


def gpu_count(most: int | None) -> int:
    """How many GPUs executors may use: those that CUDA shows, at most `most` (None: all). Blocks."""
    there = visible_gpus()
    if most is None or most <= there:
        return there if most is None else most
    logger.warning("number_of_gpu=%d, and CUDA shows %d GPUs", most, there)
    return there


def new_places(
    count: int, next_id: Callable[[], int], gpu_ids: tuple[int, ...], others: Iterable[ExecutorStatus]
) -> Iterator[tuple[int, int | None]]:
    """The id and the GPU of each new executor of a version: the GPU with fewest of them, in turn if several.

    Args:
        count: How many are new; none when it is below 1.
        next_id: Gives ids.
        gpu_ids: The GPUs the version may use; one that stands there twice gets twice as many. Empty: the CPU.
        others: The executors that the version has already.
    """
    taken = Counter(status.gpu_id for status in others)
    for _ in range(count):
        executor_id = next_id()
        first = executor_id % max(1, len(gpu_ids))
        in_turn = gpu_ids[first:] + gpu_ids[:first]
        gpu_id = min(in_turn, key=lambda one: taken[one] / gpu_ids.count(one), default=None)
        taken[gpu_id] += 1
        yield executor_id, gpu_id


def intra_op_threads(cores: int, executors: int) -> int:
    """How many threads one executor may use for one operator, so that all of them together fit the cores."""
    return max(1, cores // max(1, executors))
