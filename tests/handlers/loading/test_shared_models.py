from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchere.handlers.loading.weights import SharedModels


def test_many_threads_at_once_load_a_model_once() -> None:
    shared = SharedModels()
    together = threading.Barrier(8)
    loads = []

    def load() -> object:
        loads.append(threading.get_ident())
        return object()

    def ask(_: int) -> object:
        together.wait()
        return shared.get_or_load("net", load)

    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(ask, range(8)))
    assert len(loads) == 1
    assert all(model is models[0] for model in models)


def test_another_key_is_another_model() -> None:
    shared = SharedModels()
    assert shared.get_or_load(("net", "cpu"), object) is not shared.get_or_load(("net", "cuda"), object)


def test_a_model_that_may_not_be_shared_is_loaded_for_each_caller() -> None:
    shared = SharedModels()
    one = shared.get_or_load("net", object, lambda _: False)
    assert shared.get_or_load("net", object, lambda _: False) is not one


def test_none_counts_as_loaded() -> None:
    shared = SharedModels()
    loads: list[int] = []
    for _ in range(2):
        shared.get_or_load("net", lambda: loads.append(1))
    assert loads == [1]


def test_a_failed_load_is_tried_again_by_the_next_caller() -> None:
    shared = SharedModels()

    def fail() -> str:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        shared.get_or_load("net", fail)
    assert shared.get_or_load("net", lambda: "loaded") == "loaded"


def test_a_slow_load_does_not_hold_up_other_models() -> None:
    shared = SharedModels()
    started, finish = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        finish.wait(timeout=30)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(shared.get_or_load, "slow", slow)
        started.wait(timeout=30)
        assert shared.get_or_load("fast", lambda: "fast") == "fast"
        finish.set()
        assert pending.result(timeout=30) == "slow"
