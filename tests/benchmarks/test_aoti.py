"""The document of `benchmarks/aoti.py`, and what counts the runs of executors."""

import time
from dataclasses import replace

import torch
from quantised.compiled import Pair
from quantised.compiled_document import executors, optimized_table, slower, table, verdict
from quantised.scaling import Scaling, _run

PAIR = Pair(
    "net",
    "oneDNN",
    torchscript_ms={1: 2.0, 8: 12.0},
    optimized_ms={1: 0.5, 8: 8.0},
    aoti_ms={1: 1.0, 8: 10.0},
    drift=1e-7,
)


def test_the_table_shows_both_times_and_what_computes_the_layers() -> None:
    assert table([PAIR])[1] == ["net", "oneDNN", "2 → 1 ms", "12 → 10 ms", "2.00 ×, 1.20 ×", "1e-07"]


def test_torchscript_optimised_at_load_stands_between_both() -> None:
    assert optimized_table([PAIR])[1:] == [
        ["net", "2 → 0.5 ms", "12 → 8 ms", "4.00 ×, 1.50 ×", "0.50 ×, 0.80 ×"]
    ]


def test_a_model_counts_by_the_slower_of_its_batches() -> None:
    mixed = replace(PAIR, title="mixed", aoti_ms={1: 1.0, 8: 16.0})

    text = verdict([PAIR, mixed])

    assert slower([PAIR, mixed]) == ["mixed at batch 8 (0.75 ×)"]
    assert "Slower than TorchScript: mixed at batch 8 (0.75 ×)." in text
    assert "1.15 × as fast at every batch: net (goal" in text
    assert "None is slower than TorchScript" in verdict([PAIR])


def test_what_two_executors_do_stands_beside_what_the_machine_allows() -> None:
    text = executors(Scaling(aoti_threads=1.8, aoti_processes=1.75, torchscript_threads=1.7))

    assert "do 1.80 × the runs of one by AOTInductor (goal 1.9 ×: missed)" in text
    assert "share nothing do 1.75 ×" in text
    assert "1.70 × by TorchScript" in text


def test_a_round_that_is_over_before_it_begins_counts_no_runs() -> None:
    calls: list[torch.Tensor] = []

    count = _run(calls.append, (torch.zeros(1),), 0.0, time.monotonic() - 1.0)

    assert (count, len(calls)) == (0, 1)  # one to warm up
