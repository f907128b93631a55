"""tritonclient's streams: many requests on one, answers in parts, errors in their place."""

import queue
from typing import Any

import numpy as np
import pytest
from oip_suite.calls import one_input
from tritonclient.utils import InferenceServerException


class Stream:
    """Collects what comes on the stream of a client."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._came.put((result, error)))

    def next(self) -> Any:
        """The next part; raises the error that came instead."""
        result, error = self._came.get(timeout=30)
        if error is not None:
            raise error
        return result


@pytest.fixture
def stream(grpc: Any) -> Any:
    made = Stream(grpc)
    yield made
    grpc.stop_stream()


def test_answers_come_in_the_order_of_their_requests(grpc: Any, stream: Stream) -> None:
    for number in range(50):
        given = one_input(grpc, "x", np.full((1, 4), number, "f4"), "FP32")
        grpc.async_stream_infer("identity_FP32", [given], request_id=str(number))
    for number in range(50):
        result = stream.next()
        assert result.get_response().id == str(number)
        assert np.array_equal(result.as_numpy("y"), np.full((1, 4), number, "f4"))


def test_the_timeout_of_a_request_does_not_end_it(grpc: Any, stream: Stream) -> None:
    given = one_input(grpc, "x", np.ones((1, 4), "f4"), "FP32")
    grpc.async_stream_infer("identity_FP32", [given], timeout=1)  # a microsecond
    assert np.array_equal(stream.next().as_numpy("y"), np.ones((1, 4)))


def test_an_answer_in_parts(grpc: Any, stream: Stream) -> None:
    given = one_input(grpc, "x", np.array([5], "i4"), "INT32")
    grpc.async_stream_infer("streaming", [given], request_id="count")
    parts = [stream.next() for _ in range(5)]
    assert [int(part.as_numpy("y")[0]) for part in parts] == [0, 1, 2, 3, 4]
    assert {part.get_response().id for part in parts} == {"count"}


def test_an_empty_part_ends_an_answer_on_request(grpc: Any, stream: Stream) -> None:
    given = one_input(grpc, "x", np.array([2], "i4"), "INT32")
    grpc.async_stream_infer("streaming", [given], enable_empty_final_response=True)
    responses = [stream.next().get_response() for _ in range(3)]
    assert [one.parameters["triton_final_response"].bool_param for one in responses] == [False, False, True]
    assert [len(one.outputs) for one in responses] == [1, 1, 0]


def test_a_request_that_fails_leaves_the_stream_open(grpc: Any, stream: Stream) -> None:
    good = one_input(grpc, "x", np.ones((1, 4), "f4"), "FP32")
    grpc.async_stream_infer("identity_FP32", [one_input(grpc, "x", np.ones((1, 5), "f4"), "FP32")])
    grpc.async_stream_infer("identity_FP32", [good], request_id="after")
    with pytest.raises(InferenceServerException, match="5"):
        stream.next()
    assert stream.next().get_response().id == "after"


def test_one_answer_is_not_taken_for_many(grpc: Any) -> None:
    given = one_input(grpc, "x", np.array([3], "i4"), "INT32")
    with pytest.raises(InferenceServerException):
        grpc.infer("streaming", [given])
