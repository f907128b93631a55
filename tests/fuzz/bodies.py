"""Fuzz targets for request bodies: tensors, JSON, forms and multipart; and for tensors of handlers."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from contextlib import suppress
from typing import Any
from urllib.parse import unquote_to_bytes

from torchere.handlers.context import RequestProcessor
from torchere.handlers.encode import indented_json, one_line_json, parse_json
from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.answer import AnswerEncoder, Wish, wish_header
from torchere.handlers.tensors.codec import array_from_bytes
from torchere.serving.errors import InvalidRequest, ServingError
from torchere.serving.frontend.open_inference.generate import generate_request
from torchere.serving.frontend.open_inference.json_request import (
    begins_like_request,
    looks_like_request,
    parse_request,
)
from torchere.serving.frontend.open_inference.tensor_answer import read_framed
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest, infer_request
from torchere.serving.frontend.rest.codec import (
    MAX_FIELDS,
    MAX_PARTS,
    body_parameters,
    form_parameters,
    multipart_parameters,
    text_values,
)
from torchere.serving.frontend.rest.wire import inflate
from torchere.serving.types import Parameter

WHOLE = 0xFFFF  # in the first two bytes of an input: the whole body is JSON
FORM = "application/x-www-form-urlencoded"
BOUNDARY = "xXxXxXxX-of-the-round-trip"


def tensors(data: bytes) -> None:
    """A request of the Open Inference Protocol, or InvalidRequest; sent as binary, it is read as the same."""
    said, body = int.from_bytes(data[:2], "little"), data[2:]
    looks_like_request(body)
    begins_like_request(body)
    try:
        request = parse_request(body, None if said == WHOLE else said)
        infer_request(request)
    except InvalidRequest:
        return
    assert all(len(tensor.raw) <= max(1, len(body)) * 8 for tensor in request.inputs)
    for tensor in request.inputs:
        try:
            array = array_from_bytes(tensor.raw, tensor.datatype, tensor.shape)
        except TensorError:
            assert tensor.datatype.name in ("BOOL", "BYTES"), "only their elements can be wrong"
        else:
            assert array.shape == tensor.shape
    again = parse_request(*_as_binary(request))
    assert _identity(again) == _identity(request)


def _as_binary(request: TensorRequest) -> tuple[bytes, int]:
    head = {
        "id": request.id,
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype.name,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": len(tensor.raw)},
            }
            for tensor in request.inputs
        ],
        "outputs": [
            {"name": each.name, "parameters": {"binary_data": each.binary, "classification": each.classes}}
            for each in request.outputs
        ],
        "parameters": {**request.parameters, "binary_data_output": request.binary},
    }
    text = json.dumps(head).encode()
    return text + b"".join(bytes(tensor.raw) for tensor in request.inputs), len(text)


def _identity(request: TensorRequest) -> object:
    return (
        [(each.name, each.datatype.name, each.shape, bytes(each.raw)) for each in request.inputs],
        (request.id, request.binary, request.outputs, repr(sorted(request.parameters.items()))),
    )


def tensors_seeds() -> list[bytes]:
    """Requests in JSON, in binary, and in both, with each member that the protocol has."""
    plain = {
        "id": "one",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2e3]},
            {"name": "y", "datatype": "BYTES", "shape": [2], "data": ["a", "é"]},
            {"name": "z", "datatype": "BOOL", "shape": [1, 1], "data": [[True]]},
            {"name": "n", "datatype": "UINT64", "shape": [1], "data": [2**64 - 1]},
        ],
        "outputs": [{"name": "o", "parameters": {"classification": 2, "binary_data": True}}],
        "parameters": {"sequence_id": 5, "sequence_start": True, "timeout": 10, "binary_data_output": False},
    }
    datatypes = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "FP16", "BF16", "FP64"]
    every = {"inputs": [{"name": d, "datatype": d, "shape": [1], "data": [1]} for d in datatypes]}
    binary = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
            {"name": "y", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
        ]
    }
    text = json.dumps(binary).encode()
    whole = b"\xff\xff"
    return [
        whole + json.dumps(plain).encode(),
        whole + json.dumps(every).encode(),
        struct.pack("<H", len(text)) + text + struct.pack("<ffI", 1, 2, 2) + b"hi",
        whole + b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [0], "data": []}]}',
    ]


def generate(data: bytes) -> None:
    """A request of the generate extension, or InvalidRequest."""
    try:
        request = generate_request(data, None)
        infer_request(request)
    except InvalidRequest:
        return
    assert all(len(tensor.raw) <= 8 * len(data) for tensor in request.inputs)


def generate_seeds() -> list[bytes]:
    """Texts, numbers and lists, with parameters."""
    return [
        b'{"text_input": "Once", "parameters": {"temperature": 0.2, "stop": "x", "stream": true}, "id": 5}',
        b'{"a": [1, 2], "b": [1.5], "c": true, "d": ["x", "y"]}',
    ]


def tensor_answer(data: bytes) -> None:
    """An answer of a worker, framed, or of a handler, in JSON: tensors or an error."""
    with suppress(ServingError):
        read_framed(data)
    for wish in (Wish(json_bytes_as="text"), Wish(binary=True, json_bytes_as="base64")):
        request = RequestProcessor(dict([wish_header(wish)]))
        with suppress(UnsupportedOutput):
            AnswerEncoder("m", "1", "/nowhere").encode(data, request)


def tensor_answer_seeds() -> list[bytes]:
    """A framed answer with a binary output, and answers in JSON."""
    output = {"name": "o", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
    head = json.dumps({"model_name": "m", "model_version": "1", "id": "x", "outputs": [output]}).encode()
    plain = {"name": "o", "datatype": "BYTES", "shape": [2], "data": ["a", 1]}
    return [
        struct.pack("<I", len(head)) + head + struct.pack("<f", 1),
        struct.pack(">I", len(head)) + head + struct.pack("<f", 1),
        json.dumps({"model_name": "m", "outputs": [plain]}).encode(),
    ]


def plain_json(data: bytes) -> None:
    """JSON as Python's `json` reads and writes it, where it does; for values without floats to the byte."""
    try:
        expected = json.loads(data.decode())
    except (ValueError, RecursionError) as err:
        expected = err
    try:
        found = parse_json(data, utf8_only=True)
    except (ValueError, RecursionError):
        assert isinstance(expected, Exception), "json reads it"
        return
    assert not isinstance(expected, Exception), "json refuses it"
    assert repr(found) == repr(expected)
    for written, reference in (
        (indented_json(found), json.dumps(expected, indent=2)),
        (one_line_json(found).encode(), json.dumps(expected)),
    ):
        if written != reference.encode():
            assert _has_float(found), "written otherwise than by json"
            assert repr(json.loads(written)) == repr(expected)


def _has_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_float, value.values()))
    return isinstance(value, float) or (isinstance(value, list) and any(map(_has_float, value)))


def json_seeds() -> list[bytes]:
    """Values of all types, and the texts in which parsers differ."""
    return [
        b'{"instances": [[1, 2.5e-7, -0, -0.0, 1e22], "\\u00e9\\ud83d\\ude00", null, true], "a": {}}',
        b'[NaN, Infinity, -Infinity, 1e400, 123456789012345678901234567890, "\\ud800"]',
        b'\xef\xbb\xbf{"a": 1, "a": 2} ',
        '"é\u2028\x7f"'.encode(),
        b"[" * 30 + b"]" * 30,
    ]


def form(data: bytes) -> None:
    """Fields as the standard library decodes them, or InvalidRequest."""
    try:
        found = body_parameters(FORM, data)
    except InvalidRequest:
        assert data.count(b"&") >= MAX_FIELDS
        return
    fields = []
    for text in filter(None, data.split(b"&")):
        name, _, value = (unquote_to_bytes(each.replace(b"+", b" ")) for each in text.partition(b"="))
        fields.append((name, value))
    assert list(found) == [
        Parameter(name.strip().decode("utf-8", "replace"), value) for name, value in fields
    ]
    assert len(found) <= MAX_FIELDS
    query = form_parameters(data)
    assert list(query) == [Parameter(name.decode("utf-8", "replace"), value) for name, value in fields]
    assert text_values(data).keys() == {each.name for each in query}
    json_body = body_parameters(FORM, data, speaks_json=True)
    assert json_body == found or (len(json_body) == 1 and json_body[0].value == data)


def form_seeds() -> list[bytes]:
    """Fields with escapes, and a long one."""
    return [b"a=1&b=two+words&c=%C3%A9&d&=e&&f=%zz%4", b"text=" + b"%41b%" * 130, b' {"a": 1}']


def multipart(data: bytes) -> None:
    """Parts, or InvalidRequest; written again, they are read as the same. The first line is the type."""
    content_type, _, body = data.partition(b"\n")
    try:
        found = multipart_parameters(content_type.decode("latin-1"), body)
    except InvalidRequest:
        return
    assert len(found) <= MAX_PARTS
    assert sum(len(each.value) for each in found) <= len(body)
    if any(_unwritable(each) for each in found):
        return
    text = b"".join(_part(each) for each in found) + f"--{BOUNDARY}--\r\n".encode()
    assert multipart_parameters(f"multipart/form-data; boundary={BOUNDARY}", text) == found


def _unwritable(parameter: Parameter) -> bool:
    """Whether the plain way to write a part can't express it: its name or type would need escapes."""
    text = parameter.name + parameter.content_type
    return (
        any(char in '"\\;' or not char.isprintable() for char in text)
        or not parameter.content_type.isascii()
        or BOUNDARY.encode() in parameter.value
    )


def _part(parameter: Parameter) -> bytes:
    file = '; filename="f"' if parameter.content_type else ""
    lines = [f"--{BOUNDARY}", f'Content-Disposition: form-data; name="{parameter.name}"{file}']
    if parameter.content_type:
        lines.append(f"Content-Type: {parameter.content_type}")
    return "\r\n".join([*lines, "", ""]).encode() + parameter.value + b"\r\n"


def multipart_seeds() -> list[bytes]:
    """Fields, files, names in RFC 8187's form, and parts with many headers."""
    head = b'multipart/form-data; boundary="b"\n'
    return [
        head + b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b\r\nContent-Disposition: '
        b'form-data; name="f"; filename="../x"\r\nContent-Type: text/plain; charset=x\r\n\r\nhi\r\n--b--\r\n',
        head + b"--b\r\nContent-Disposition: form-data; name*=utf-8''%C3%A9; filename*=utf-8''%2e%2e\r\n"
        b"X: y\r\n\r\n\r\n--bx\r\n-\r\n--b--",
        b"multipart/form-data; boundary=-\n-----\r\n\r\n",
    ]


def content_coding(data: bytes) -> None:
    """A compressed body: inflated as `gzip` does, or InvalidRequest, and never beyond the limit."""
    limit = 100_000
    for coding in ("gzip", "deflate"):
        try:
            found = inflate(data, coding, limit)
        except ServingError:
            continue
        assert len(found) <= limit
        if coding == "gzip":
            assert found == gzip.decompress(data)


def coding_seeds() -> list[bytes]:
    """The three forms, two members of gzip, and a small bomb."""
    text = b"some text, " * 9
    bare = zlib.compressobj(9, wbits=-15)
    zipped = zlib.compressobj(9, wbits=31)
    bomb = zlib.compressobj(9, wbits=31)
    return [
        zlib.compress(text),
        gzip.compress(text, mtime=0) + gzip.compress(b"end", mtime=0),
        bare.compress(text) + bare.flush(),
        zipped.compress(text) + zipped.flush(),
        bomb.compress(bytes(2**20)) + bomb.flush(),
    ]
