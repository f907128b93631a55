from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.base import BaseHandler
from torchere.handlers.context import RequestProcessor
from torchere.handlers.errors import PredictionException
from torchere.handlers.micro_batching import STAGES, MicroBatching
from torchere.handlers.tensor_handler import TensorHandler
from torchere.handlers.tensors.answer import OPEN_INFERENCE
from torchere.handlers.tensors.npy import NPY_TYPE, read_npy
from torchere.handlers.ts_compat.legacy import Metric, emit_metrics


class Tracing(BaseHandler):
    """Adds 1, doubles, and formats; keeps which parts it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[list[int]] = []

    def preprocess(self, data: Any) -> Any:
        self.parts.append(data)
        return [item + 1 for item in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if 13 in data:
            raise ValueError("unlucky")
        return [item * 2 for item in data]

    def postprocess(self, data: Any) -> Any:
        return [str(item) for item in data]


@pytest.fixture
def handler() -> Tracing:
    return Tracing()


@pytest.fixture
def batching(handler: Tracing) -> Iterator[MicroBatching]:
    made = MicroBatching(handler, 2)
    yield made
    made.shutdown()


@pytest.mark.parametrize("threads", [1, 4])
def test_answers_keep_the_order_of_the_requests(
    batching: MicroBatching, handler: Tracing, threads: int
) -> None:
    batching.parallelism = dict.fromkeys(("preprocess", "inference", "postprocess"), threads)
    assert batching.handle([0, 1, 2, 3, 4]) == ["2", "4", "6", "8", "10"]
    assert sorted(handler.parts) == [[0, 1], [2, 3], [4]]
    assert batching.handle([]) == []


def test_one_value_of_an_envelope_is_not_cut_into_parts(batching: MicroBatching) -> None:
    with pytest.raises(PredictionException, match="expected a list"):
        batching.handle("some text")


def test_stages_of_different_parts_overlap(handler: Tracing, batching: MicroBatching) -> None:
    batching.micro_batch_size = 1
    both_inside = threading.Barrier(2, timeout=30)  # breaks unless two stages are inside at the same time

    def preprocess(data: Any) -> Any:
        if data == [2]:
            both_inside.wait()
        return data

    def inference(data: Any) -> Any:
        if data == [1]:
            both_inside.wait()
        return data

    handler.preprocess = preprocess  # type: ignore[method-assign]
    handler.inference = inference  # type: ignore[method-assign]
    assert batching.handle([1, 2]) == ["1", "2"]


def test_what_a_stage_raises_reaches_the_caller_and_the_next_batch_works(batching: MicroBatching) -> None:
    with pytest.raises(ValueError, match="unlucky"):
        batching.handle([1, 2, 12, 3])
    assert batching.handle([1]) == ["4"]


def test_it_stands_in_for_the_handlers_own_handle(
    handler: Tracing, batching: MicroBatching, make_context: Any, begin: Any, tmp_path: Path
) -> None:
    handler.handle = batching  # type: ignore[method-assign]
    context = make_context(tmp_path)
    begin(context, 3)
    assert handler.handle([1, 2, 3], context) == ["4", "6", "8"]
    assert [sample.name for sample in context.metrics.drain()] == ["HandlerTime"]
    begin(context, 1, describe="True")
    assert handler.handle([1], context) == [None]
    begin(context, 1, explain="True")
    handler.get_insights = lambda prepared, inputs, target: prepared  # type: ignore[attr-defined]
    assert handler.handle([1], context) == [2]


def test_a_stage_knows_its_part(handler: Tracing, batching: MicroBatching) -> None:
    handler.postprocess = lambda data: [batching.get_micro_batch_idx()] * len(data)  # type: ignore[method-assign]
    assert batching.handle([0, 0, 0, 0, 0]) == [0, 0, 1, 1, 2]
    assert batching.get_micro_batch_idx() is None


def test_values_that_a_stage_emits_belong_to_the_batch(
    handler: Tracing, batching: MicroBatching, make_context: Any, begin: Any, tmp_path: Path
) -> None:
    for stage in STAGES:

        def emitting(data: Any, stage: str = stage) -> Any:
            emit_metrics([Metric(stage, len(data), "count", [])])
            return data

        setattr(handler, stage, emitting)
    context = make_context(tmp_path)
    begin(context, 3)
    batching.handle([1, 2, 3])
    values = [(sample.name, sample.value) for sample in context.metrics.drain()]
    assert sorted(values) == sorted((stage, size) for stage in STAGES for size in (1, 2))


def test_parallelism_is_checked_and_read_back(batching: MicroBatching) -> None:
    batching.parallelism = {"inference": 3}
    batching.parallelism = {"preprocess": 2}
    assert batching.parallelism == {"inference": 3, "preprocess": 2}
    with pytest.raises(AssertionError, match="guess"):
        batching.parallelism = {"guess": 1}
    with pytest.raises(AssertionError):
        batching.parallelism = {"inference": 0}
    with pytest.raises(ValueError, match="expected 1 or more"):
        MicroBatching(Tracing(), 0)


def test_after_shutdown_a_batch_fails_instead_of_hanging(batching: MicroBatching) -> None:
    batching.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        batching.handle([1])


def test_its_threads_end_with_it() -> None:
    def use_one() -> None:
        made = MicroBatching(Tracing(), 1)
        assert made.handle([1, 2]) == ["4", "6"]

    def micro_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("micro-")]

    before = set(micro_threads())
    use_one()
    gc.collect()
    for thread in set(micro_threads()) - before:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_tensors_pass_through_the_stages_of_a_loaded_model(
    scripted_doubler: Path, make_context: Any, begin: Any
) -> None:
    handler = BaseHandler()
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    handler.initialize(context)
    batching = MicroBatching(handler, 2)
    begin(context, 3)
    assert batching([[1.0], [2.0], [3.0]], context) == [[2.0], [4.0], [6.0]]
    assert torch.is_inference_mode_enabled() is False
    batching.shutdown()


def test_status_and_format_are_those_of_the_request_in_its_part(make_context: Any, tmp_path: Path) -> None:
    x, y = TensorSpec("x", "FP32", (-1, 2)), TensorSpec("y", "FP32", (-1, 2))
    (tmp_path / "signature.json").write_text(Signature((x,), (y,)).to_json())
    doubler = torch.jit.trace(lambda x: x * 2, torch.ones(1, 2))
    torch.jit.save(doubler, str(tmp_path / "doubler.pt"))
    context = make_context(tmp_path, model={"serializedFile": "doubler.pt"})
    handler = TensorHandler()
    handler.initialize(context)
    as_npy = {"Accept": NPY_TYPE}
    requests = [RequestProcessor(one, "") for one in ({}, {}, {OPEN_INFERENCE: "{}"}, as_npy, {})]
    context.begin_batch(requests, None)
    batching = MicroBatching(handler, 2)
    answers = batching([{"body": [1.0, 2.0]} for _ in range(4)] + [{"body": "no"}], context)
    batching.shutdown()
    assert answers[:2] == [[2.0, 4.0]] * 2
    assert answers[2]["y"].tolist() == [[2.0, 4.0]]
    assert read_npy(answers[3], "y").tolist() == [2.0, 4.0]
    assert answers[4]["code"] == 400
    assert [one.status_code for one in requests] == [200, 200, 200, 200, 400]
    types = [one.response_headers.get("content-type") for one in requests]
    assert types == [None, None, None, NPY_TYPE, "application/json"]
