"""signature.json: what is written is read back, and whatever else is refused by the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.archiver.signature import DATATYPES, Limit, Signature, SignatureError, TensorSpec, Values, parse

SPEC = {"name": "x", "datatype": "FP32", "shape": [-1, 8]}
specs = st.builds(
    TensorSpec,
    name=st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=9),
    datatype=st.sampled_from(DATATYPES),
    shape=st.lists(st.integers(-1, 2**40), max_size=5).map(tuple),
    values=st.none() | st.integers(-9, 9).map(lambda least: Values(least, least + 5)),
)
tensors = st.lists(specs, min_size=1, max_size=4, unique_by=lambda spec: spec.name).map(tuple)


@given(tensors, tensors)
def test_what_is_written_is_read_back(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    signature = Signature(inputs, outputs)
    signature.check()
    assert parse(signature.to_json()) == signature


def test_a_size_that_inputs_share_is_written_under_its_name() -> None:
    spec = TensorSpec("ids", "INT64", (-1, -1), (Limit(1, most=40, name="tokens"),), Values(0, 99))
    signature = Signature((spec,), (TensorSpec("y", "FP32", (-1,)),))
    (written,) = json.loads(signature.to_json())["inputs"]
    assert written["limits"] == [{"dimension": 1, "least": 1, "most": 40, "multiple": 1, "name": "tokens"}]
    assert written["values"] == {"least": 0, "most": 99}
    assert parse(signature.to_json()) == signature


@pytest.mark.parametrize(
    ("shapes", "batched"),
    [(((-1, 8), (-1, 3)), True), (((-1, 8), (3,)), False), (((2, 8), (-1,)), False), (((), (-1,)), False)],
)
def test_a_model_takes_batches_when_every_tensor_has_one(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], batched: bool
) -> None:
    signature = Signature((TensorSpec("x", "FP32", shapes[0]),), (TensorSpec("y", "FP32", shapes[1]),))
    assert signature.batched is batched


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 3}, "version is 3; expected 1 or 2"),
        ({"version": True}, "version is True"),
        ({"inputs": []}, r"inputs is \[\]; expected a list of at least one tensor"),
        ({"outputs": None}, "outputs is None"),
        ({"inputs": [3]}, r"inputs\[0\] is 3; expected an object"),
        ({"inputs": [{**SPEC, "name": ""}]}, r"inputs\[0\]\.name is ''"),
        ({"inputs": [{**SPEC, "name": "a\nb"}]}, r"inputs\[0\]\.name"),
        (
            {"inputs": [{**SPEC, "datatype": "FLOAT"}]},
            r"inputs\[0\]\.datatype is 'FLOAT'; expected one of BOOL",
        ),
        ({"outputs": [SPEC, {**SPEC, "name": "y", "shape": [-2]}]}, r"outputs\[1\]\.shape is \[-2\]"),
        ({"inputs": [{**SPEC, "shape": [True]}]}, r"inputs\[0\]\.shape"),
        ({"inputs": [{**SPEC, "values": 3}]}, r"inputs\[0\]\.values is 3; expected an object with the whole"),
        ({"inputs": [{**SPEC, "values": {"least": 2, "most": 1}}]}, r"inputs\[0\]\.values"),
        (
            {"inputs": [{**SPEC, "limits": [{"dimension": 0, "name": 3}]}]},
            r"inputs\[0\]\.limits.*expected a text as name",
        ),
        ({"inputs": [{**SPEC, "shape": 8}]}, r"inputs\[0\]\.shape is 8"),
        ({"inputs": [{**SPEC, "shape": [1] * 65}]}, "at most 64 sizes"),
        ({"inputs": [SPEC, SPEC]}, r"inputs\[1\]\.name is 'x'; expected a name that no other"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], said: str) -> None:
    whole = {"version": 1, "inputs": [SPEC], "outputs": [SPEC], **change}
    with pytest.raises(SignatureError, match=said):
        parse(json.dumps(whole))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(SignatureError, match=r"signature\.json"):
        parse(text)
