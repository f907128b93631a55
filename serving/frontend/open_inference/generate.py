"""Triton's generate extension: inputs and outputs as plain members of a JSON object. Pure.

`{"text_input": "Once upon", "parameters": {"temperature": 0.2}}` is a request with the input `text_input`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from torchere.archiver.signature import Signature
from torchere.handlers.encode import parse_json
from torchere.handlers.tensors import BYTES, DATATYPES, Datatype, TensorError, shown
from torchere.handlers.tensors.codec import (
    NO_JSON,
    array_from_json,
    bytes_from_tensor,
)
from torchere.handlers.tensors.list_text import ListText
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.open_inference.json_request import (
    decoded,
    decoded_or_quoted,
    parameter_values,
)
from torchere.serving.frontend.open_inference.tensor_answer import no_tensors
from torchere.serving.frontend.open_inference.tensor_request import (
    InputTensor,
    ParameterValue,
    TensorRequest,
    check_names,
)

Members = dict[str, Any]
_Plain = bool | int | float | str | None
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    dict[str, _Plain | list[_Plain] | dict[str, _Plain | list[_Plain]]]
)
_long_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_plain_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Plain)
NAMED_BYTES = 65_536  # for a longer body the error does not name the invalid member
_RESERVED = frozenset({"id", "parameters"})
_IDENTITY = ("id", "model_name", "model_version")
# Datatype of a value that has no signature. bool comes first, because bool is a subclass of int.
_OF_TYPE = ((bool, DATATYPES["BOOL"]), (int, DATATYPES["INT64"]), (float, DATATYPES["FP32"]), (str, BYTES))


def generate_request(body: bytes | memoryview, signature: Signature | None) -> TensorRequest:
    """Parse a request body. A value that is no input of the signature is a parameter, as in Triton.

    A member of `parameters` is an input if the signature has one of its name; without a signature, if it is a
    list, which no parameter can be.

    Raises:
        InvalidRequest: the body is invalid; the text names the field.
    """
    said = decoded_or_quoted(_decoded, body)
    if not isinstance(said, dict):
        raise InvalidRequest("the request: found no object, expected one with the inputs as members")
    parameters, request_id = said.get("parameters"), said.get("id")
    if not isinstance(parameters, dict | None):
        raise InvalidRequest(f"parameters: found {shown(parameters)}, expected an object")
    if isinstance(request_id, dict | list | ListText):
        raise InvalidRequest(f"id: found {shown(request_id)}, expected a text")
    specs = {spec.name: spec for spec in signature.inputs} if signature else None
    members, parameters = _inputs_and_parameters(said, parameters or {}, specs)
    check_names("inputs", list(members))  # before each becomes a tensor
    inputs = []
    for name, value in members.items():
        spec = specs.get(name) if specs else None
        datatype = DATATYPES[spec.datatype] if spec else _datatype(name, value)
        inputs.append(_input(name, value, datatype, len(spec.shape) if spec else 1))
    request_id = "" if request_id is None else str(request_id)
    return TensorRequest(tuple(inputs), request_id, parameter_values(parameters))


def _inputs_and_parameters(
    said: Members, parameters: Members, specs: Container[str] | None
) -> tuple[Members, Members]:
    """Return the inputs of a request, and its parameters; `specs` has the names of the signature's inputs."""
    members = {name: value for name, value in said.items() if name not in _RESERVED}
    lifted = {
        name: value
        for name, value in parameters.items()
        if name not in said and (isinstance(value, list | ListText) if specs is None else name in specs)
    }
    rest = {name: value for name, value in parameters.items() if name not in lifted}
    if specs is None:
        return members | lifted, rest
    # A list can't be a parameter: its name is refused, as that of an input that does not exist.
    others = {
        name: value
        for name, value in members.items()
        if name not in specs and isinstance(value, ParameterValue)
    }
    return {name: value for name, value in members.items() if name not in others} | lifted, others | rest


def _decoded(body: bytes | memoryview) -> Any:
    """Decode the JSON of a body. JSON nested deeper than a valid request is refused while decoding.

    A body of at most `NAMED_BYTES` is decoded regardless, so that the caller can name the invalid member.
    """
    try:
        try:
            said = decoded(_decoder, _long_decoder, body)
            return {name: _member(value) for name, value in said.items()}
        except msgspec.ValidationError as err:
            if len(body) > NAMED_BYTES:
                raise InvalidRequest(f"the request: {err}") from err
            return msgspec.json.decode(body)  # the caller refuses it and names the member
    except NO_JSON as err:
        raise InvalidRequest(f"the request is no JSON: {err}") from err


def _member(value: Any) -> Any:
    if not isinstance(value, msgspec.Raw):
        return value
    text = bytes(value)
    if text.startswith(b"{"):
        return {name: _list_or_plain(bytes(one)) for name, one in _long_decoder.decode(text).items()}
    return _list_or_plain(text)


def _list_or_plain(text: bytes) -> Any:
    return ListText(text) if text.startswith(b"[") else _plain_decoder.decode(text)


def generated(part: bytes) -> Members:
    """Convert one JSON response of the protocol to members; an output of one element becomes a scalar.

    Raises:
        HandlerFailed: the response does not have the form of the protocol; a handler may send any bytes.
    """
    try:
        answer: Members = parse_json(part)  # it may hold NaN and infinities
        members: Members = {name: answer[name] for name in _IDENTITY if name in answer}
        for output in answer["outputs"]:
            data = output["data"]
            members[output["name"]] = data[0] if len(data) == 1 else data
        return members
    except (ValueError, LookupError, TypeError, RecursionError) as err:
        raise no_tensors(repr(err)) from err


def joined(parts: list[Members]) -> Members:
    """Join the parts of a streamed response: concatenate strings, keep the last of other values."""
    whole: Members = {}
    texts: dict[str, list[str]] = {}  # joined once at the end: to extend a text copies all of it
    for part in parts:
        for name, value in part.items():
            whole[name] = value
            if isinstance(value, str) and name not in _IDENTITY:
                texts.setdefault(name, []).append(value)
            else:
                texts.pop(name, None)
    return whole | {name: "".join(pieces) for name, pieces in texts.items()}


def _datatype(name: str, value: Any) -> Datatype:
    element = _typical(value)
    for kind, datatype in _OF_TYPE:
        if isinstance(element, kind):
            return datatype
    raise InvalidRequest(
        f"{shown(name)[1:-1]}: found {shown(value)}, "
        "expected a text, a number, true or false, or a list of them"
    )


def _typical(value: Any) -> Any:
    """Return an element of the datatype of a list: the first, or 0.5 for whole numbers among fractions.

    JavaScript writes 1.0 as `1`. A value that is no list, or an empty one, is returned unchanged.
    """
    if isinstance(value, ListText) and value.count:
        first = value.first
        has_fractions = type(first) is int and value.has_fractions
    elif isinstance(value, list) and value:
        first = value[0]
        has_fractions = type(first) is int and float in map(type, value)
    else:
        return value
    return 0.5 if has_fractions else first


def _input(name: str, value: Any, datatype: Datatype, rank: int) -> InputTensor:
    field = shown(name)[1:-1]
    before = [1] * (rank - 1)
    try:
        if isinstance(value, ListText):
            shape = (*before, value.count) if rank else ()
            raw = value.tensor_bytes(datatype, shape, field)
        else:
            data = value if isinstance(value, list) else [value]
            shape = (*before, len(data)) if rank else ()
            raw = bytes_from_tensor(array_from_json(data, datatype, shape, field), datatype)
    except TensorError as err:
        raise InvalidRequest(str(err)) from err
    except NO_JSON as err:
        raise InvalidRequest(f"{field}: {err}") from err
    return InputTensor(name, datatype, shape, raw)
