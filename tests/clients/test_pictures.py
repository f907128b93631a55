"""tritonclient and the built-in handlers of pictures and texts: what a tensor of theirs may be."""

import base64
import io
import os
from typing import Any

import numpy as np
import pytest
from oip_suite.calls import one_input
from PIL import Image
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHERE_CLIENTS_TARGET") == "triton", reason="Triton has no such handlers"
)
PIXELS = np.stack([np.full((300, 400), level, np.uint8) for level in (200, 30, 10)], axis=-1)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def colours(client: Any, array: Any, datatype: str, name: str = "image") -> dict[str, float]:
    result = client.infer("picture", [one_input(client, name, array, datatype)])
    return {colour: float(result.as_numpy(colour)[0]) for colour in ("red", "green", "blue")}


def test_a_picture_is_the_same_in_each_form(client: Any) -> None:
    expected = colours(client, np.array([png()], object), "BYTES")
    assert max(expected, key=lambda colour: expected[colour]) == "red"
    assert sum(expected.values()) == pytest.approx(1)
    assert colours(client, PIXELS, "UINT8", "any name") == expected
    assert colours(client, PIXELS[None], "UINT8") == expected
    assert colours(client, np.array([[base64.b64encode(png())]], object), "BYTES") == expected


def test_floats_are_the_input_of_the_model(client: Any) -> None:
    sent = np.zeros((1, 3, 8, 8), "f4")
    sent[:, 1] = 2
    found = colours(client, sent, "FP32")
    weights = np.exp([0.0, 2.0, 0.0])
    assert list(found.values()) == pytest.approx(list(weights / weights.sum()), abs=1e-6)


def test_what_is_no_picture_is_refused_by_itself(client: Any) -> None:
    two = np.array([png(), png()], object)
    for array, datatype, text in (
        (PIXELS.astype("i4"), "INT32", "a tensor of int32 that is no image"),
        (two, "BYTES", "2 elements of BYTES"),
        (PIXELS.transpose(2, 0, 1), "UINT8", "expected UINT8 [height, width, 3]"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            colours(client, array, datatype)
        assert str(caught.value.status()) in ("400", "StatusCode.INVALID_ARGUMENT")
        assert text in caught.value.message()


def test_a_text_is_classified(client: Any) -> None:
    given = [one_input(client, "text", np.array([b"<p>good</p> GOOD"], object), "BYTES")]
    with pytest.raises(InferenceServerException):  # "good good" is not in the vocabulary
        client.infer("words", given)
    result = client.infer("words", [one_input(client, "text", np.array([b"<p>GOOD</p>"], object), "BYTES")])
    assert float(result.as_numpy("praise")[0]) == pytest.approx(0.7310586, abs=1e-5)
