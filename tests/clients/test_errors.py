"""tritonclient: what is refused, and how it is told."""

from typing import Any

import numpy as np
import pytest
from oip_suite.calls import module_of, one_input
from oip_suite.target import Target
from tritonclient.utils import InferenceServerException

ONES = np.ones((1, 4), "f4")
MISSING = ("400", "404", "StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE")
WRONG = ("400", "StatusCode.INVALID_ARGUMENT")


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()), caught.value.message()


def test_a_model_that_is_not_there(client: Any) -> None:
    given = [one_input(client, "x", ONES, "FP32")]
    status, message = refused(lambda: client.infer("nobody", given))
    assert status in MISSING
    assert "nobody" in message


def test_a_version_that_is_not_there(client: Any) -> None:
    given = [one_input(client, "x", np.ones((1, 1), "f4"), "FP32")]
    status, message = refused(lambda: client.infer("versioned", given, model_version="7"))
    assert status in MISSING
    assert "7" in message


def test_metadata_of_a_model_that_is_not_there(client: Any) -> None:
    assert refused(lambda: client.get_model_metadata("nobody"))[0] in MISSING
    assert refused(lambda: client.get_inference_statistics("nobody"))[0] in (*MISSING, *WRONG)


@pytest.mark.parametrize(
    ("name", "array", "datatype"),
    [
        ("unknown", ONES, "FP32"),
        ("x", ONES.astype("i4"), "INT32"),
        ("x", np.ones((1, 5), "f4"), "FP32"),
        ("x", np.ones((1, 4, 1), "f4"), "FP32"),
    ],
    ids=["name", "datatype", "size", "dimensions"],
)
def test_an_input_the_model_does_not_take(client: Any, name: str, array: Any, datatype: str) -> None:
    status, _ = refused(lambda: client.infer("identity_FP32", [one_input(client, name, array, datatype)]))
    assert status in WRONG


def test_an_input_that_is_missing(client: Any) -> None:
    status, message = refused(lambda: client.infer("two", [one_input(client, "a", ONES, "FP32")]))
    assert status in WRONG
    assert "b" in message


def test_an_output_the_model_does_not_give(client: Any) -> None:
    wanted = module_of(client).InferRequestedOutput("z")
    given = [one_input(client, "x", ONES, "FP32")]
    status, message = refused(lambda: client.infer("identity_FP32", given, outputs=[wanted]))
    assert status in WRONG
    assert "z" in message


def test_too_few_bytes(client: Any) -> None:
    given = one_input(client, "x", ONES, "FP32")
    given.set_shape([2, 4])
    assert refused(lambda: client.infer("identity_FP32", [given]))[0] in WRONG


def test_a_handler_that_fails(client: Any) -> None:
    given = [one_input(client, "x", np.ones((1, 1), "f4"), "FP32")]
    assert refused(lambda: client.infer("failing", given))[0] in ("500", "StatusCode.INTERNAL")


def test_after_all_this_the_model_still_answers(client: Any) -> None:
    assert np.array_equal(
        client.infer("identity_FP32", [one_input(client, "x", ONES, "FP32")]).as_numpy("y"), ONES
    )


def test_a_deadline_that_is_over(grpc: Any, target: Target) -> None:
    # gRPC rounds deadlines up to a millisecond, in which a small tensor may be there and back.
    given = [one_input(grpc, "x", np.ones((300_000, 4), "f4"), "FP32")]
    assert refused(lambda: grpc.infer("identity_FP32", given, client_timeout=1e-6))[0] in (
        "StatusCode.DEADLINE_EXCEEDED",
        "StatusCode.CANCELLED",
    )
