"""How executors share the cores and the GPUs."""

from __future__ import annotations

import asyncio
import itertools
import os
from datetime import datetime, timezone
from typing import Any

import pytest
from pools import pool_in_service

from torchere.serving.workers import devices
from torchere.serving.workers.devices import CoreShares, chosen_threads, gpu_count, new_places
from torchere.serving.workers.executor import ExecutorState, ExecutorStatus, LoadSpec


@pytest.mark.parametrize(
    ("cores", "executors", "expected"), [(8, 2, 4), (8, 3, 2), (2, 8, 1), (4, 0, 4), (1, 1, 1)]
)
def test_all_executors_together_fit_the_cores(cores: int, executors: int, expected: int) -> None:
    assert CoreShares(cores).with_more(executors) == expected


def test_the_cores_are_divided_over_the_executors_of_all_pools_as_they_come_and_go() -> None:
    cores = CoreShares(8)
    assert (cores.threads, cores.with_more(2)) == (8, 4)
    cores.take("a", 2)
    cores.take("b", 1)
    assert (cores.threads, cores.with_more(1)) == (2, 2)
    cores.take("a", 0)
    assert cores.threads == 8
    for number in range(20):
        cores.take(number, 1)
    assert cores.threads == 1


@pytest.mark.parametrize(
    ("mkl", "openmp", "expected"),
    [
        ("", "1", 1),
        ("", " 3, 2", 3),
        ("2", "1", 2),
        ("many", "1", 1),
        ("0", "1", 1),
        ("", "9", 4),
        ("", "0", 4),
        ("", "many", 4),
        ("", "1000", 4),
    ],
)
def test_threads_that_the_operator_has_chosen_are_those_of_each_executor(
    mkl: str, openmp: str, expected: int
) -> None:
    cores = CoreShares(4, chosen_threads({"MKL_NUM_THREADS": mkl, "OMP_NUM_THREADS": openmp}))
    assert (cores.threads, cores.with_more(1)) == (expected, expected)
    assert cores.with_more(4) == (1 if openmp in ("0", "many", "1000") else expected)


@pytest.mark.parametrize(("most", "expected"), [(None, 4), (2, 2), (9, 4), (0, 0)])
def test_no_more_gpus_are_used_than_there_are_and_the_operator_says(
    most: int | None, expected: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 4)
    assert gpu_count(most) == expected
    assert ("number_of_gpu=9, and CUDA shows 4 GPUs" in caplog.text) is (most == 9)


def test_tests_use_no_gpu_of_the_machine_unless_it_is_asked_for() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert gpu_count(None) == 0


@pytest.mark.parametrize(
    ("library", "given", "expected"),
    [
        ("libc10_cuda.so", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        ("libc10_cuda.so", {"HIP_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("libc10_hip.so", {}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("libc10_hip.so", {"HIP_VISIBLE_DEVICES": "4,5,6,7"}, {"HIP_VISIBLE_DEVICES": "6,7"}),
    ],
)
def test_a_worker_sees_its_gpus_of_those_that_the_operator_shows(
    library: str, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(devices, "_torch_libraries", lambda: ["libc10.so", library])
    spec = LoadSpec("demo", "1.0", "", "handler.py", gpu_ids=(0, 1, 2, 3), devices=2)
    devices.show_devices(spec, 2, "")
    assert os.environ == {**given, **expected}


def on(*gpu_ids: int | None) -> list[ExecutorStatus]:
    """A version's executors, by their GPUs."""
    began = datetime.now(timezone.utc)
    return [ExecutorStatus(9000, ExecutorState.READY, began, 1, gpu_id=gpu_id) for gpu_id in gpu_ids]


@pytest.mark.parametrize(
    ("first_id", "count", "gpu_ids", "others", "expected"),
    [
        pytest.param(9000, 4, (0, 1), (), [0, 1, 0, 1], id="in turn"),
        pytest.param(9001, 2, (0, 1, 2), (), [1, 2], id="versions of one executor begin at different GPUs"),
        pytest.param(9002, 1, (0, 1), (0,), [1], id="an executor of another version came between"),
        pytest.param(9008, 2, (0, 1, 2, 3), (0, 1), [2, 3], id="up again after it was scaled down"),
        pytest.param(9000, 3, (0, 0, 1), (), [0, 1, 0], id="named twice it is used twice as much"),
        pytest.param(9000, 2, (), (None,), [None, None], id="without GPUs"),
        pytest.param(9000, -1, (0,), (0, 0), [], id="none is new"),
    ],
)
def test_the_executors_of_a_version_are_spread_evenly_over_its_gpus(
    first_id: int, count: int, gpu_ids: tuple[int, ...], others: tuple[int | None, ...], expected: list[Any]
) -> None:
    next_id = itertools.count(first_id).__next__
    places = list(new_places(count, next_id, gpu_ids, on(*others)))
    assert places == list(zip(itertools.count(first_id), expected, strict=False))


@pytest.mark.parametrize("shares_weights", [True, False])
def test_a_version_that_is_scaled_up_takes_the_gpu_that_it_does_not_use_yet(
    make_spec: Any, shares_weights: bool
) -> None:
    async def main() -> None:
        ids = itertools.count(9000, 2)  # with the executors of another version between
        spec = make_spec(gpu_ids=(0, 1), shares_weights=shares_weights)
        async with pool_in_service(spec, next_id=ids.__next__) as pool:
            await pool.resize(2)
            await pool.warm_up()
            assert [status.gpu_id for status in pool.statuses()] == [0, 1]

    asyncio.run(main())
