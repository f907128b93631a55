"""tritonclient's sequences against a model with state: requests of one sequence meet the same state."""

import os
from typing import Any

import numpy as np
import pytest
from oip_suite.calls import one_input
from oip_suite.target import Target
from test_streams import Stream
from tritonclient.utils import InferenceServerException

IS_TRITON = os.environ.get("TORCHERE_CLIENTS_TARGET") == "triton"


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def given(client: Any, number: int) -> list[Any]:
    return [one_input(client, "x", np.array([[number]], "i4"), "INT32")]


def add(client: Any, number: int, sequence: int | str, start: bool = False, end: bool = False) -> int:
    """The sum of a sequence, after `number` was added."""
    result = client.infer(
        "summing", given(client, number), sequence_id=sequence, sequence_start=start, sequence_end=end
    )
    return int(result.as_numpy("y")[0, 0])


def test_sequences_side_by_side_have_their_own_state(client: Any) -> None:
    assert [add(client, 1, 11, start=True), add(client, 10, 12, start=True)] == [1, 10]
    assert [add(client, 2, 11), add(client, 20, 12), add(client, 3, 11)] == [3, 30, 6]
    assert [add(client, 4, 11, end=True), add(client, 30, 12, end=True)] == [10, 60]


def test_a_sequence_that_ended_may_be_started_anew(client: Any) -> None:
    assert [add(client, 5, 21, start=True), add(client, 5, 21, end=True)] == [5, 10]
    assert add(client, 1, 21, start=True, end=True) == 1


def test_a_sequence_may_be_one_request(client: Any) -> None:
    assert add(client, 7, 31, start=True, end=True) == 7


def test_a_sequence_goes_on_over_the_other_protocol(http: Any, grpc: Any) -> None:
    assert [add(http, 1, 41, start=True), add(grpc, 2, 41), add(http, 3, 41, end=True)] == [1, 3, 6]


def test_sequences_on_one_stream_are_answered_in_order(grpc: Any) -> None:
    stream = Stream(grpc)
    try:
        for step in range(6):
            for sequence in (51, 52):
                grpc.async_stream_infer(
                    "summing",
                    given(grpc, sequence - 50),
                    request_id=f"{sequence}-{step}",
                    sequence_id=sequence,
                    sequence_start=step == 0,
                    sequence_end=step == 5,
                )
        results = [stream.next() for _ in range(12)]
    finally:
        grpc.stop_stream()
    found = {one.get_response().id: int(one.as_numpy("y")[0, 0]) for one in results}
    assert found == {f"{50 + by}-{step}": by * (step + 1) for by in (1, 2) for step in range(6)}


@pytest.mark.skipif(not IS_TRITON, reason="here the first request of a sequence begins it")
def test_triton_wants_a_sequence_to_be_started(client: Any) -> None:
    with pytest.raises(InferenceServerException):
        add(client, 1, 61)


@pytest.mark.skipif(IS_TRITON, reason="Triton wants a sequence to be started")
def test_a_sequence_begins_with_its_first_request(client: Any) -> None:
    assert [add(client, 1, 61), add(client, 2, 61, end=True)] == [1, 3]


@pytest.mark.skipif(IS_TRITON, reason="a model of Triton's says whether its ids are numbers or texts")
def test_ids_may_be_texts(client: Any) -> None:
    assert [add(client, 1, "a text", start=True), add(client, 1, "a text", end=True)] == [1, 2]


def test_a_stateful_model_says_so(http: Any, target: Target) -> None:
    assert ("sequence_batching" in http.get_model_config("summing")) is (target.name == "triton")
