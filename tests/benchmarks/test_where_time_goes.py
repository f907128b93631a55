"""Whose samples `benchmarks/where_time_goes.py` counts."""

from where_time_goes import LOOP, Found, part_of, shares, table

_LOOP = "<module> (torchere:8);serve (serving/server.py:230);Runner.run (asyncio/runners.py:118)"
_BATCHER = f"{_LOOP};Batcher.pump (serving/batching/batcher.py:91)"


def test_a_sample_belongs_to_the_innermost_part() -> None:
    assert part_of(_LOOP) == LOOP
    assert part_of(_BATCHER) == "batching"
    assert (
        part_of(f"{_BATCHER};Thing.handle (handlers/base.py:3);forward (torch/nn/linear.py:9)") == "the model"
    )
    assert part_of(f"{_BATCHER};loads (json/decoder.py:1)") == "batching"


def test_other_threads_do_not_count() -> None:
    assert (
        part_of("Thread.run (threading.py:1);Thread._serve (serving/workers/executor_thread.py:99)") is None
    )


def test_shares_add_up() -> None:
    found = shares([f"{_LOOP} 30", f"{_BATCHER} 10", "Thread.run (threading.py:1) 99"])

    assert found[LOOP] == 0.75
    assert found["batching"] == 0.25
    assert sum(found.values()) == 1.0


def test_nothing_sampled_is_no_share() -> None:
    assert shares([]) == {}


def test_the_table_has_a_sum_and_a_rate() -> None:
    lines = table({"tiny": Found(7000.4, {LOOP: 30.0, "batching": 10.0})})

    assert lines[1] == [LOOP, "30"]
    assert lines[-2:] == [["in all", "40"], ["requests a second", "7,000"]]


def test_each_part_is_told_once() -> None:
    parts = [line[0] for line in table({"a": Found(10, {LOOP: 1.0})})]
    assert len(parts) == len(set(parts))
