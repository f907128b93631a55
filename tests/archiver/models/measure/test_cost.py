"""The one clock: processor time, in turns, on one thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from torchere.archiver.models.measure import cost
from torchere.archiver.models.measure.cost import (
    batch_sizes,
    fewer_threads_when_busy,
    gain,
    processor_ms,
    shapes_of,
    times_by_batch,
)
from torchere.archiver.signature import Limit, Signature, TensorSpec


class Processor:
    """A processor whose time only models spend."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def costs(self, seconds: float) -> Callable[[torch.Tensor], None]:
        def model(_x: torch.Tensor) -> None:
            self.spent_s += seconds

        return model


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    """It has no other clock: a look at the wall clock raises."""
    made = Processor()
    monkeypatch.setattr(cost, "time", SimpleNamespace(process_time=lambda: made.spent_s))
    return made


def test_models_are_timed_by_what_they_take_of_the_processor_and_no_other_clock_is_read(
    processor: Processor,
) -> None:
    times = processor_ms([processor.costs(0.003), processor.costs(0.001)], (torch.zeros(1),), 0.1)

    assert times == pytest.approx([3.0, 1.0])


def test_a_model_that_writes_into_its_inputs_is_timed_on_the_sample_as_it_was() -> None:
    seen: list[float] = []

    def model(x: torch.Tensor) -> None:
        seen.append(float(x))
        x.mul_(2)

    sample = torch.ones(1)
    times_by_batch([model, model], [(sample,)], batched=False, budget_s=0.0)

    assert set(seen) == {float(sample)} == {1.0}


def test_models_run_in_turns_and_at_least_five_times(processor: Processor) -> None:
    order: list[str] = []
    models = [lambda _x, name=name: order.append(name) for name in ("one", "other")]

    processor_ms(models, (torch.zeros(1),), 0.0)

    assert order[-30:] == [*["one"] * 3, *["other"] * 3] * 5


class Caches:
    """The data of the model that ran last: another one takes ten times as long for its first run."""

    def __init__(self, processor: Processor) -> None:
        self.holds: object = None
        self._processor = processor

    def runs(self, seconds: float) -> Callable[[torch.Tensor], None]:
        def model(_x: torch.Tensor) -> None:
            self._processor.spent_s += seconds * (1 if self.holds is model else 10)
            self.holds = model

        return model


def test_weights_that_other_models_pushed_out_of_the_caches_are_back_before_a_run_counts(
    processor: Processor,
) -> None:
    caches = Caches(processor)

    times = processor_ms([caches.runs(0.003), caches.runs(0.001)], (torch.zeros(1),), 0.0)

    assert times == pytest.approx([3.0, 1.0])


def test_every_long_run_counts(processor: Processor) -> None:
    runs = 0

    def model(_x: torch.Tensor) -> None:
        nonlocal runs
        runs += 1
        processor.spent_s += 0.2

    assert processor_ms([model], (torch.zeros(1),), 0.0) == pytest.approx([200.0])
    assert runs == 3 + 5  # to warm up, and five rounds


def test_slow_runs_do_not_count(processor: Processor) -> None:
    runs = iter([0.9, *[0.002] * 17])

    def model(_x: torch.Tensor) -> None:
        processor.spent_s += next(runs)

    assert processor_ms([model], (torch.zeros(1),), 0.0) == pytest.approx([2.0])


def test_torch_has_one_thread_while_a_model_is_timed() -> None:
    seen: list[int] = []
    before = torch.get_num_threads()

    processor_ms([lambda _x: seen.append(torch.get_num_threads())], (torch.zeros(1),), 0.0)

    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_a_gain_is_the_geometric_mean_over_the_batches_that_both_have() -> None:
    assert gain({1: 8.0, 8: 4.0}, {1: 2.0, 8: 4.0}) == pytest.approx(2.0)
    assert gain({1: 8.0}, {1: 2.0, 8: 4.0}) == pytest.approx(4.0)


def test_a_model_is_timed_on_three_shapes_at_most_and_the_first_sample_comes_first() -> None:
    samples = [(torch.zeros(2, size),) for size in (9, 5, 9, 7, 3, 4, 6)]

    calls = shapes_of(samples, batched=True)

    assert calls[0][0].shape == (1, 9)
    assert len({tuple(call[0].shape) for call in calls}) == len(calls) == 3
    assert [tuple(call[0].shape) for call in shapes_of(samples[:1], batched=False)] == [(2, 9)]


@pytest.mark.parametrize(("load", "threads"), [(0.5, 2), (100.0, 1)])
def test_torch_has_one_thread_while_other_programs_keep_the_cores_busy(
    load: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    torch.set_num_threads(2)
    try:
        with fewer_threads_when_busy():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_times_are_the_mean_over_the_shapes_of_the_samples(processor: Processor) -> None:
    def model(x: torch.Tensor) -> None:
        processor.spent_s += x.numel() / 1000

    samples = [(torch.zeros(1, size),) for size in (2, 2, 6)]

    assert times_by_batch([model], samples, True, 0.1) == [pytest.approx({1: 4.0, 8: 32.0})]
    assert times_by_batch([model], samples, False, 0.1) == [pytest.approx({1: 4.0})]


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (None, (1, 8)),
        (Limit(0, 1, 64), (1, 8)),
        (Limit(0, 1, 4), (1, 4)),
        (Limit(0, 2, 64), (2, 8)),
        (Limit(0, 16), (16,)),
        (Limit(0, 3, 10, 3), (3, 9)),
        (Limit(1, 2, 4), (1, 8)),
    ],
)
def test_batches_are_timed_at_sizes_that_the_model_takes(limit: Limit | None, sizes: tuple[int, ...]) -> None:
    takes = TensorSpec("x", "FP32", (-1, -1), (limit,) if limit else ())
    assert batch_sizes(None, Signature((takes,), ())) == sizes
