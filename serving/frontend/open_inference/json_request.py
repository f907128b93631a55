"""Parser for REST request bodies of the protocol: JSON, optionally followed by binary tensors. Pure."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from torchere.archiver.signature import ANY, Signature
from torchere.handlers.tensors import BYTES, DATATYPES, Datatype, TensorError, datatype_named, shown
from torchere.handlers.tensors.answer import WantedOutput
from torchere.handlers.tensors.codec import (
    NO_JSON,
    array_from_json,
    bytes_from_tensor,
    join_elements,
    quoted_non_finite,
)
from torchere.handlers.tensors.list_text import ListText, count_members, has_many_items
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.open_inference.tensor_request import (
    InputTensor,
    ParameterValue,
    TensorRequest,
    check_names,
    flag,
    input_tensor,
    refuse_shared_memory,
)

_LENGTH = "Inference-Header-Content-Length"
_AT = re.compile(r" - at `\$\.?([^`]*)`$")  # the end of msgspec's error texts: path of the invalid member
BEGINNING_BYTES = 4096
_LONG_BYTES = 65_536  # a shorter text has too few lists for the garbage collector to matter
# Members of all objects in a request with many items; MAX_TENSORS inputs and outputs have a tenth of these.
MAX_MEMBERS = 65_536
_OWN = frozenset({"binary_data_output"})  # parameters that are not passed on to the model
T = TypeVar("T")
P = TypeVar("P")  # of the value of a parameter
D = TypeVar("D")  # of the data of an input


# Optional members may be null: clients that serialize a record write null for unset fields.
class _Input(msgspec.Struct, Generic[P, D]):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, P] | None = None
    data: D | msgspec.UnsetType = msgspec.UNSET


class _Output(msgspec.Struct, Generic[P]):
    name: str
    parameters: dict[str, P] | None = None


class _Body(msgspec.Struct, Generic[P, D]):
    inputs: list[_Input[P, D]]
    id: str | None = None
    parameters: dict[str, P] | None = None
    outputs: list[_Output[P]] | None = None


AnyBody: TypeAlias = _Body[Any, Any]


_decoder = msgspec.json.Decoder(AnyBody)
# Creates no objects for the items of data, and refuses lists in parameters.
_long_decoder = msgspec.json.Decoder(_Body[ParameterValue | None, msgspec.Raw])


def parse_request(body: bytes | memoryview, json_bytes: int | None) -> TensorRequest:
    """Parse a request body.

    Args:
        body: the whole body; binary tensors of the result are views of it.
        json_bytes: value of `Inference-Header-Content-Length`; None: the whole body is JSON.

    Raises:
        InvalidRequest: the body is invalid. The text names the field, as `inputs[0].data[3]`, the value found
            and the value expected.
    """
    if json_bytes is not None and json_bytes > len(body):
        raise InvalidRequest(
            f"{_LENGTH}: found {json_bytes}, expected at most the {len(body)} bytes of the body"
        )
    head = decoded_or_quoted(_decoded_body, body if json_bytes is None else memoryview(body)[:json_bytes])
    check_names("inputs", [item.name for item in head.inputs])  # before each becomes a tensor
    check_names("outputs", [item.name for item in head.outputs or ()])
    start = len(body) if json_bytes is None else json_bytes
    inputs = []
    for index, item in enumerate(head.inputs):
        tensor, start = _input(item, f"inputs[{index}]", body, start)
        inputs.append(tensor)
    if start < len(body):
        raise InvalidRequest(
            f"the body: found {len(body) - start} bytes behind the last tensor, expected none: "
            "the binary_data_size of the inputs adds up to less"
        )
    parameters = head.parameters or {}
    binary = flag(parameters, "binary_data_output")
    return TensorRequest(
        inputs=tuple(inputs),
        id=head.id or "",
        parameters=parameter_values({k: v for k, v in parameters.items() if k not in _OWN}),
        outputs=tuple([_output(item, f"outputs[{i}]", binary) for i, item in enumerate(head.outputs or ())]),
        binary=binary,
    )


def tensor_alone(body: bytes | memoryview, signature: Signature | None) -> TensorRequest:
    """Return the request whose body is its only tensor, as `Inference-Header-Content-Length: 0` says.

    Name and datatype come from the signature. One dimension of the shape may be free, besides that of the
    batch, which is 1 then; the number of bytes gives its size. BYTES are one element, without a length before
    it. All outputs are binary.

    Raises:
        InvalidRequest: the model has no signature, several inputs or several free dimensions, or the number
            of bytes does not match its shape.
    """
    found = f"{_LENGTH}: found 0, which is for models of one input;"
    if signature is None:
        raise InvalidRequest(f"{found} expected JSON: the model does not tell its inputs")
    if len(signature.inputs) != 1:
        raise InvalidRequest(f"{found} expected JSON: the model has {len(signature.inputs)} inputs")
    (spec,) = signature.inputs
    datatype, shape = DATATYPES[spec.datatype], list(spec.shape)
    free = [place for place, size in enumerate(shape) if size == ANY]
    if len(free) > 1 and signature.batched:
        shape[free.pop(0)] = 1
    if len(free) > 1:
        raise InvalidRequest(f"{found} expected JSON with a shape: {shape} has {len(free)} free dimensions")
    if free:
        size = datatype.item_bytes * math.prod(size for size in shape if size != ANY)
        shape[free[0]] = -(-len(body) // max(1, size)) if datatype is not BYTES else 1
    if datatype is BYTES and math.prod(shape) != 1:
        raise InvalidRequest(f"{found} expected JSON: its shape {shape} is more than one element of BYTES")
    raw = join_elements([bytes(body)]) if datatype is BYTES else memoryview(body)
    return TensorRequest((input_tensor(spec.name, datatype, shape, raw, "the body"),), binary=True)


def looks_like_request(body: bytes | memoryview) -> bool:
    """Tell whether a body is meant as a request of the protocol: an object with tensors in its `inputs`.

    Other JSON is for handlers that parse bodies themselves, as TorchServe's handlers do.
    """
    try:
        said: Any = msgspec.json.decode(body)
    except NO_JSON:
        return False
    inputs = said.get("inputs") if isinstance(said, dict) else None
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    return isinstance(first, dict) and "name" in first and bool({"datatype", "shape"} & first.keys())


def begins_like_request(body: bytes | memoryview) -> bool:
    """As `looks_like_request`, but by the first `BEGINNING_BYTES`, because parsing a long body takes long."""
    text = bytes(body[:BEGINNING_BYTES])
    _, found, inputs = text.partition(b'"inputs"')
    has_tensor = b'"name"' in inputs and (b'"datatype"' in inputs or b'"shape"' in inputs)
    return bool(found) and has_tensor and text.lstrip().startswith(b"{")


def decoded_or_quoted(decode: Callable[[bytes | memoryview], T], text: bytes | memoryview) -> T:
    """Return `decode(text)`; if it refuses the text, decode it again with `NaN` and `Infinity` as texts."""
    try:
        return decode(text)
    except InvalidRequest:
        quoted = quoted_non_finite(text)
        if quoted is None:
            raise
        return decode(quoted)


def _decoded_body(text: bytes | memoryview) -> AnyBody:
    try:
        return decoded(_decoder, _long_decoder, text)
    except msgspec.ValidationError as err:
        said = str(err)
        place = _AT.search(said)
        field = place.group(1) if place and place.group(1) else "the request"
        raise InvalidRequest(f"{field}: {_AT.sub('', said)}") from err
    except RecursionError as err:
        raise InvalidRequest(
            "the request is nested too deeply; expected lists as deep as their shape"
        ) from err
    except NO_JSON as err:
        raise InvalidRequest(f"the request is no JSON: {err}") from err


def decoded(
    decoder: msgspec.json.Decoder[T], long_decoder: msgspec.json.Decoder[T], text: bytes | memoryview
) -> T:
    """Decode a JSON text, with the garbage collector paused for a long one. Thread-safe.

    `long_decoder` decodes a text with many items, without creating objects for them.

    Raises:
        NO_JSON: the text is not JSON, or does not match the decoder's type.
        InvalidRequest: it has more than `MAX_MEMBERS` members.
    """
    if has_many_items(text):
        members = count_members(text)
        if members > MAX_MEMBERS:
            raise InvalidRequest(f"the request: found {members} members, expected at most {MAX_MEMBERS}")
        return long_decoder.decode(text)
    if len(text) <= _LONG_BYTES or not gc.isenabled():
        return decoder.decode(text)
    # Decoding holds the GIL. Before Python 3.12 the collector would traverse the lists of a long text again
    # and again while they are created, which takes seven times as long as creating them.
    gc.disable()
    try:
        return decoder.decode(text)
    finally:
        gc.enable()


def _input(
    item: _Input[Any, Any], where: str, body: bytes | memoryview, start: int
) -> tuple[InputTensor, int]:
    """Return one input, and the offset of the next binary input."""
    parameters = item.parameters or {}
    refuse_shared_memory(parameters, where)
    size = parameters.get("binary_data_size")
    try:
        datatype = datatype_named(item.datatype, f"{where}.datatype")
        if size is None:
            if item.data is msgspec.UNSET:
                raise TensorError(f"{where}.data", "nothing", "a list, or parameters.binary_data_size")
            raw = _bytes_of(item.data, datatype, item.shape, where)
            return InputTensor(item.name, datatype, tuple(item.shape), raw), start
    except TensorError as err:
        raise InvalidRequest(str(err)) from err
    field = f"{where}.parameters.binary_data_size"
    if not _is_empty(item.data):  # KServe's client sends [] with a tensor of no bytes
        raise InvalidRequest(f"{where}: found data and binary_data_size, expected one of them")
    if type(size) is not int or not 0 <= size <= len(body) - start:
        raise InvalidRequest(
            f"{field}: found {shown(size)}, expected 0 to {len(body) - start}, the bytes that are left"
        )
    view = memoryview(body)[start : start + size]
    return input_tensor(item.name, datatype, item.shape, view, where), start + size


def _is_empty(data: Any) -> bool:
    if isinstance(data, msgspec.Raw):
        return bytes(memoryview(data)[:8]).translate(None, b" \t\r\n") in (b"[]", b"null")
    return data is msgspec.UNSET or data is None or data == []


def _bytes_of(data: Any, datatype: Datatype, shape: list[int], where: str) -> bytes:
    """Return the elements of an input as raw bytes; `data` is parsed JSON, or the text of a long list."""
    if isinstance(data, msgspec.Raw):
        text = bytes(data)
        try:
            if text.startswith(b"["):
                return ListText(text).tensor_bytes(datatype, shape, where)
            data = {} if text.startswith(b"{") else msgspec.json.decode(text)
        except NO_JSON as err:
            raise InvalidRequest(f"{where}.data: {_AT.sub('', str(err))}") from err
    return bytes_from_tensor(array_from_json(data, datatype, shape, where), datatype)


def _output(item: _Output[Any], where: str, binary: bool) -> WantedOutput:
    field = f"{where}.parameters"
    parameters = item.parameters or {}
    refuse_shared_memory(parameters, where)
    classes = parameters.get("classification", 0)
    if type(classes) is not int or classes < 0:
        raise InvalidRequest(
            f"{field}.classification: found {shown(classes)}, expected a whole number of 0 or more"
        )
    is_binary = flag(parameters, "binary_data", field, binary)
    return WantedOutput(item.name, is_binary, min(classes, 2**31))


def parameter_values(parameters: dict[str, Any]) -> dict[str, ParameterValue]:
    """Return the parameters of a request, after checking that the protocol allows their types.

    Raises:
        InvalidRequest: a parameter is not a string, a number or a boolean; the text names it.
    """
    for name, value in parameters.items():
        if not isinstance(value, (bool, int, float, str)):
            raise InvalidRequest(
                f"parameters.{shown(name)[1:-1]}: found {'nothing' if value is None else shown(value)}, "
                "expected a text, a number, true or false"
            )
    return parameters
