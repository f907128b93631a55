"""Requests of the protocol as REST brings them; the bad ones of the test plan are refused by their field."""

import gc
import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.tensors import list_text
from torchere.handlers.tensors.answer import WantedOutput
from torchere.handlers.tensors.codec import array_from_elements
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.open_inference.json_request import (
    BEGINNING_BYTES,
    MAX_MEMBERS,
    begins_like_request,
    decoded,
    looks_like_request,
    parse_request,
    tensor_alone,
)
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest, infer_request

X = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
RAW = np.array([1, 2], np.float32).tobytes()
X_SPEC = TensorSpec("x", "FP32", (2,))


def body(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **members}).encode()


def checked(text: bytes, json_bytes: int | None = None) -> TensorRequest:
    request = parse_request(text, json_bytes)
    infer_request(request)
    return request


def binary(size: Any = 8, raw: bytes = RAW, **changes: Any) -> tuple[bytes, int]:
    tensor = {key: value for key, value in X.items() if key != "data"} | changes
    head = body({**tensor, "parameters": {"binary_data_size": size}})
    return head + raw, len(head)


@pytest.mark.usefixtures("items")
def test_a_request_is_read_with_all_it_says() -> None:
    outputs = [
        {"name": "a"},
        {"name": "b", "parameters": {"binary_data": False, "classification": 3}},
    ]
    parameters = {"binary_data_output": True, "sequence_id": 4, "k": 0.5}
    request = checked(body(X, id="7", outputs=outputs, parameters=parameters))
    assert (request.id, request.binary, dict(request.parameters)) == ("7", True, {"sequence_id": 4, "k": 0.5})
    assert request.outputs == (WantedOutput("a", True), WantedOutput("b", False, 3))
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype.name, tensor.shape, tensor.raw) == ("x", "FP32", (2,), RAW)


@pytest.mark.usefixtures("items")
def test_shared_memory_is_refused_in_words() -> None:
    shared = {"parameters": {"shared_memory_region": "region", "shared_memory_byte_size": 8}}
    tensor = {key: value for key, value in X.items() if key != "data"} | shared
    with pytest.raises(InvalidRequest, match=r"inputs\[0\].*there is no shared memory here"):
        checked(body(tensor))
    with pytest.raises(InvalidRequest, match=r"outputs\[1\].*there is no shared memory here"):
        checked(body(X, outputs=[{"name": "a"}, {"name": "b", **shared}]))


@pytest.mark.usefixtures("items")
def test_binary_tensors_stand_behind_the_json_in_order() -> None:
    strings = struct.pack("<I", 2) + b"ab"
    head = body(
        {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
        {"name": "y", "shape": [1], "datatype": "INT8", "data": [5]},
        {"name": "z", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
    )
    request = checked(head + RAW + strings, len(head))
    assert [tensor.raw for tensor in request.inputs] == [RAW, b"\x05", strings]


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize("data", [[[1], [2]], [[[1, 2]]]])
def test_data_may_be_nested_otherwise_than_the_shape(data: list[Any]) -> None:
    assert checked(body({**X, "data": data})).inputs[0] == checked(body(X)).inputs[0]


@pytest.mark.usefixtures("items")
def test_a_tensor_without_elements_is_a_tensor() -> None:
    assert checked(body({**X, "shape": [0, 3], "data": []})).inputs[0].raw == b""
    assert checked(*binary(0, b"", shape=[0])).inputs[0].shape == (0,)


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize("empty", ["[]", "[ ]", "null"])
def test_empty_data_beside_a_binary_tensor_is_no_data(empty: str) -> None:
    head = (
        '{"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}, '
        f'"data": {empty}}}]}}'
    ).encode()
    assert checked(head + RAW, len(head)).inputs[0].raw == RAW


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": [-1]}, r"inputs[0].shape[0]: found -1"),
        ({"shape": [2**63]}, r"inputs[0].shape[0]: found 9223372036854775808"),
        ({"shape": [2**32, 2**32]}, r"inputs[0].shape: found [4294967296, 4294967296]"),
        ({"shape": [1] * 1000}, r"inputs[0].shape: found 1000 dimensions"),
        ({"shape": [3]}, r"inputs[0].data: found 2 elements, expected 3"),
        ({"shape": []}, r"inputs[0].data: found 2 elements, expected 1"),
        ({"shape": [2.0]}, r"inputs[0].shape[0]: Expected `int`, got `float`"),
        ({"shape": [True]}, r"inputs[0].shape[0]: Expected `int`, got `bool`"),
        ({"shape": 2}, r"inputs[0].shape: Expected `array`, got `int`"),
        ({"datatype": "FP31"}, r"inputs[0].datatype: found 'FP31'"),
        ({"datatype": "fp32"}, r"inputs[0].datatype: found 'fp32'"),
        ({"datatype": None}, r"inputs[0].datatype: Expected `str`, got `null`"),
        ({"datatype": "BOOL", "data": [1, 7]}, r"inputs[0].data[1]: found 7, expected BOOL"),
        ({"datatype": "BYTES"}, r"inputs[0].data[0]: found 1, expected texts"),
        ({"datatype": "INT64", "data": [2**63, 0]}, r"inputs[0].data[0]: found 9223372036854775808"),
        ({"datatype": "FP16", "data": [1e9, 0]}, r"inputs[0].data[0]: found 1000000000.0"),
        ({"data": [[1], [2, 3]]}, r"inputs[0].data[1]: found 2 elements, expected a list of 1"),
        ({"data": "12"}, r"inputs[0].data: found '12'"),
        ({"name": 3}, r"inputs[0].name: Expected `str`, got `int`"),
        ({"name": ""}, r"inputs[0].name: found ''"),
        ({"name": "n" * 2000}, r"inputs[0].name: found a text of 2000 characters"),
        ({"parameters": []}, r"inputs[0].parameters: Expected `object | null`, got `array`"),
        ({"parameters": {"binary_data_size": 8}}, r"inputs[0]: found data and binary_data_size"),
    ],
)
def test_a_bad_input_is_refused_by_its_field(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(body({**X, **change}))
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"id": 7}, "id: Expected `str | null`, got `int`"),
        ({"id": "i" * 10**6}, "id: found a text of 1000000 characters"),
        ({"parameters": {"a": []}}, "parameters.a: found [], expected a text, a number"),
        ({"parameters": {"a": None}}, "parameters.a: found nothing"),
        (
            {"parameters": {str(i): 1 for i in range(10_000)}},
            "parameters: found 10000, expected at most 1000",
        ),
        ({"parameters": {"binary_data_output": 1}}, "parameters.binary_data_output: found 1"),
        ({"parameters": {"sequence_id": -1}}, "parameters.sequence_id: found -1"),
        ({"parameters": {"sequence_id": 1.5}}, "parameters.sequence_id: found 1.5"),
        ({"parameters": {"sequence_id": True}}, "parameters.sequence_id: found True"),
        ({"parameters": {"sequence_start": True}}, "parameters.sequence_id: found none"),
        ({"parameters": {"sequence_id": 0, "sequence_end": True}}, "parameters.sequence_id: found none"),
        ({"parameters": {"sequence_id": 1, "sequence_end": "yes"}}, "parameters.sequence_end: found 'yes'"),
        ({"parameters": {"sequence_id": "s" * 2000}}, "parameters.sequence_id: found a text of 2000"),
        (
            {"outputs": [{"name": "a"}, {"name": "a"}]},
            "outputs[1].name: found 'a', expected a name that outputs[0]",
        ),
        ({"outputs": [{"parameters": {}}]}, "outputs[0]: Object missing required field `name`"),
        (
            {"outputs": [{"name": "a", "parameters": {"classification": -1}}]},
            "outputs[0].parameters.classification",
        ),
        (
            {"outputs": [{"name": "a", "parameters": {"classification": "3"}}]},
            "outputs[0].parameters.classification",
        ),
        ({"outputs": [{"name": "a", "parameters": {"binary_data": 1}}]}, "outputs[0].parameters.binary_data"),
        ({"outputs": {}}, "outputs: Expected `array | null`, got `object`"),
    ],
)
def test_what_is_said_beside_the_inputs_is_refused_by_its_field(members: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(body(X, **members))
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 300


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([X, X], "inputs[1].name: found 'x', expected a name that inputs[0] does not have"),
        ([{**X, "name": str(i)} for i in range(10_000)], "inputs: found 10000, expected at most 1000"),
        (
            [{**X, "name": str(i), "data": 0} for i in range(1001)],
            "inputs: found 1001, expected at most 1000",
        ),
        ([{"name": "x"}], "inputs[0]: Object missing required field `datatype`"),
        ([{key: X[key] for key in ("name", "shape", "datatype")}], "inputs[0].data: found nothing"),
        ([7], "inputs[0]: Expected `object`, got `int`"),
    ],
)
def test_inputs_have_names_of_their_own_and_a_bound(inputs: list[Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(body(*inputs))
    assert str(caught.value).startswith(text)


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize(
    ("text", "json_bytes", "message"),
    [
        (*binary(16), "inputs[0].parameters.binary_data_size: found 16, expected 0 to 8"),
        (*binary(-1), "inputs[0].parameters.binary_data_size: found -1"),
        (*binary(2**70), "inputs[0].parameters.binary_data_size: found 1180591620717411303424"),
        (*binary("8"), "inputs[0].parameters.binary_data_size: found '8'"),
        (*binary(True), "inputs[0].parameters.binary_data_size: found True"),
        (*binary(4), "inputs[0]: found 4 bytes, expected 8 bytes for FP32 of shape [2]"),
        (*binary(8, RAW + b"x"), "the body: found 1 bytes behind the last tensor"),
        (*binary(4, b"abcd", datatype="BYTES", shape=[2]), "inputs[0]: found 4 bytes, expected a length"),
        (body(X), 10**9, "Inference-Header-Content-Length: found 1000000000, expected at most"),
        (body(X), 5, "the request is no JSON"),
        (body(X), 0, "the request is no JSON"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(text: bytes, json_bytes: int, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(text, json_bytes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b"{}",
        b"'a'",
        b"\xef\xbb\xbf{}",
        b"[" * 1_000_000,
        b'{"inputs":' + b"[" * 100_000,
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 100_000,
        b'{"inputs": []} trailing',
        b'{"inputs": [] /* comment */}',
        b'{"a":"' + b"x" * 1_000_000,
        *(
            b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP64","data":[%b]}]}' % number
            for number in (b"nan", b"+Infinity", b"1e400", b"1" * 10_000, b'"\\ud800"', b"01", b".5")
        ),
    ],
)
def test_what_is_no_json_of_the_protocol_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("length", "name"), [(3, b"NaN"), (3, b'of \\"-Infinity\\"'), (200_003, b"x")])
def test_numbers_that_json_lacks_are_read_as_they_are_written(length: int, name: bytes) -> None:
    data = b"[NaN,-Infinity,%b]" % b",".join([b"Infinity"] * (length - 2))
    tensor = b'{"name":"%b","shape":[%d],"datatype":"FP32","data":%b}' % (name, length, data)
    (found,) = checked(b'{"inputs":[%b]}' % tensor).inputs
    assert found.name == json.loads(b'"%b"' % name)
    values = np.frombuffer(found.raw, "<f4")
    assert np.isnan(values[0])
    assert values[1] == -np.inf
    assert (values[2:] == np.inf).all()


@pytest.mark.parametrize(
    ("number", "datatype"), [(b"NaN", b"INT8"), (b"NaN", b"BOOL"), (b"null", b"FP32"), (b'"none"', b"FP32")]
)
def test_only_floats_have_numbers_that_json_lacks(number: bytes, datatype: bytes) -> None:
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"%b","data":[%b]}]}' % (datatype, number)
    with pytest.raises(InvalidRequest, match=r"^inputs\[0\]\.data\[0\]: found "):
        checked(body)


@pytest.mark.parametrize("text", [b'{"inputs":[{"name":"\xe9"}]}', b'{"id":"\xff","inputs":[]}'])
def test_what_is_no_utf8_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the request is no JSON: .*byte 0x"):
        checked(text)
    assert not looks_like_request(text)


def test_many_items_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def counted(elements: list[Any], *arguments: Any) -> Any:
        sizes.append(len(elements))
        return array_from_elements(elements, *arguments)

    monkeypatch.setattr(list_text, "array_from_elements", counted)
    rows = 300_000
    text = body({**X, "shape": [rows, 1], "data": []}).replace(b"[]", b"[%b[9]]" % (b"[1]," * (rows - 1)))
    (tensor,) = checked(text).inputs
    assert np.frombuffer(tensor.raw, np.float32).tolist() == [1.0] * (rows - 1) + [9.0]
    assert sum(sizes) == rows
    assert max(sizes) == list_text.SLICE_ELEMENTS


def test_lists_in_parameters_are_refused_before_they_are_made() -> None:
    long = X | {"shape": [300_000], "data": [1] * 300_000}
    with pytest.raises(InvalidRequest, match=r"^parameters\[\.\.\.\]: Expected `.*`, got `array`"):
        checked(body(long, parameters={"a": [[]]}))


def test_many_members_are_refused_before_they_are_made() -> None:
    members: dict[str, list[int]] = {str(number): [] for number in range(200_000)}
    with pytest.raises(InvalidRequest, match=f"found 2000.. members, expected at most {MAX_MEMBERS}"):
        checked(body(X, parameters=members))


def test_what_may_be_left_out_may_be_null() -> None:
    tensor = {**X, "parameters": None}
    output = {"name": "y", "parameters": None}
    request = checked(body(tensor, id=None, parameters=None, outputs=[output]))
    assert request == checked(body(X, outputs=[{"name": "y"}]))
    assert checked(body(tensor, outputs=None)) == checked(body(X))


def test_the_collector_does_not_walk_over_a_long_text_as_it_is_read() -> None:
    text = body({**X, "data": [[]] * 100_000})
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    said = decoded(msgspec.json.Decoder(), msgspec.json.Decoder(), text)
    assert gc.get_stats()[0]["collections"] - before <= 1  # behind it
    assert len(said["inputs"]) == 1
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        checked(body(X) + b" " * 100_000)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_of_two_equal_keys_counts_and_odd_numbers_are_numbers() -> None:
    text = b'{"inputs":[],"inputs":[{"name":"x","shape":[2],"datatype":"FP64","data":[-0,1E2]}]}'
    assert np.frombuffer(checked(text).inputs[0].raw).tolist() == [0.0, 100.0]


def test_many_small_keys_are_read_in_bounded_time() -> None:
    text = b'{"inputs":[],' + b",".join(b'"k%d":0' % i for i in range(200_000)) + b"}"
    assert checked(text).inputs == ()


@given(st.binary(max_size=200), st.integers(0, 220))
def test_any_bytes_are_read_or_refused(text: bytes, json_bytes: int) -> None:
    for length in (None, json_bytes):
        try:
            checked(text, length)
        except InvalidRequest as err:
            assert str(err)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (body(X), True),
        (body({"name": "x", "shape": "bad"}), True),
        (body({"name": "x"}), False),
        (body({"data": [1]}), False),
        (body(), False),
        (b'{"inputs": "text"}', False),
        (b'{"instances": []}', False),
        (b"[1]", False),
        (b"{", False),
        (b"[" * 10**6, False),
    ],
)
def test_a_request_is_told_from_a_body_of_a_handlers_own(text: bytes, wanted: bool) -> None:
    assert looks_like_request(text) is wanted
    assert begins_like_request(text) is wanted


def test_of_a_long_body_the_beginning_tells() -> None:
    long = body({"name": "x", "shape": [BEGINNING_BYTES], "data": [0] * BEGINNING_BYTES})
    assert begins_like_request(long)
    assert begins_like_request(long[:BEGINNING_BYTES])
    assert not begins_like_request(b"[" + b"[]," * BEGINNING_BYTES + b"[]]")


def of_one(*shape: int, datatype: str = "FP32", batched: bool = True) -> Signature:
    outputs = (TensorSpec("y", "FP32", (-1, 1) if batched else (1,)),)
    return Signature((TensorSpec("x", datatype, shape),), outputs)


@pytest.mark.parametrize(
    ("signature", "text", "shape"),
    [
        (of_one(-1, 2), RAW, (1, 2)),
        (of_one(-1, 1), RAW, (2, 1)),
        (of_one(-1, -1), RAW, (1, 2)),
        (of_one(-1, batched=False), RAW, (2,)),
        (of_one(2, 1, batched=False), RAW, (2, 1)),
        (of_one(batched=False), RAW[:4], ()),
        (of_one(-1, 2), b"", (0, 2)),
        (of_one(-1, 0, batched=False), b"", (0, 0)),
        (of_one(1, datatype="BYTES"), b"a picture", (1,)),
        (of_one(-1, 1, datatype="BYTES"), b"", (1, 1)),
    ],
)
def test_a_body_may_be_the_only_tensor(signature: Signature, text: bytes, shape: tuple[int, ...]) -> None:
    request = tensor_alone(text, signature)
    infer_request(request)
    (tensor,) = request.inputs
    is_text = tensor.datatype.name == "BYTES"
    assert (tensor.name, tensor.shape, request.binary) == ("x", shape, True)
    assert bytes(tensor.raw) == (struct.pack("<I", len(text)) + text if is_text else text)


@pytest.mark.parametrize(
    ("signature", "text", "why"),
    [
        (None, RAW, r"found 0, .* the model does not tell its inputs$"),
        (Signature((X_SPEC, TensorSpec("z", "FP32", (2,))), ()), RAW, r"found 0, .* the model has 2 inputs$"),
        (of_one(-1, -1, -1), RAW, r"found 0, .* \[1, -1, -1\] has 2 free dimensions$"),
        (of_one(-1, -1, batched=False), RAW, r"found 0, .* \[-1, -1\] has 2 free dimensions$"),
        (of_one(-1, 2), RAW + b"1", r"found 9 bytes, expected 16 "),
        (of_one(3, batched=False), RAW, r"found 8 bytes, expected 12 "),
        (of_one(2, datatype="BYTES"), RAW, r"found 0, .* its shape \[2\] is more than one element of BYTES$"),
    ],
)
def test_a_body_that_is_no_tensor_of_the_model_is_refused(
    signature: Signature | None, text: bytes, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        tensor_alone(text, signature)
