"""Envelopes: formats in which an orchestrator wraps inputs, and expects answers.

An envelope unwraps the inputs before a handler runs, and wraps its answers. The setting `service_envelope`
chooses one for the whole server. One envelope object belongs to one handler instance and processes one batch
at a time.
"""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from itertools import accumulate, chain, count
from operator import mul
from typing import Any

import numpy as np

from torchere.handlers.encode import one_line_json, parse_json
from torchere.handlers.errors import PredictionException, bad_request
from torchere.handlers.rows import fields_of
from torchere.handlers.tensors import Array, datatype_of_array, shown
from torchere.handlers.tensors.answer import OPEN_INFERENCE
from torchere.handlers.tensors.codec import begins_with_text


class BaseEnvelope(ABC):
    """An envelope around the entry point `handle_fn(data, context)`, which may return a coroutine.

    An envelope remembers its batch, so batches that run concurrently each have a copy of it.
    """

    context: Any = None
    keeps_rows = False  # True: the handler gets one row for each request

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn

    def handle(self, data: Any, context: Any) -> Any:
        """Answer one batch: unwrap, run the handler, wrap.

        A `describe` request bypasses the envelope, and so do tensors that the handler reads itself.
        """
        self.context = context
        if data and (context.get_request_header(0, "describe") == "True" or self._are_tensors()):
            return self._handle_fn(data, context)
        if data:
            data = self.parse_input(data)
            context.rows_are_requests = self.keeps_rows
        results = self._handle_fn(data, context)
        if isawaitable(results):
            return self._formatted_later(results)
        return self.format_output(results) if results else results

    def _are_tensors(self) -> bool:
        """Return whether the requests came as tensors; raise if only some did, so that each runs alone."""
        requests = getattr(self.context, "request_processor", None)
        if not isinstance(requests, (list, tuple)):  # the context of a handler's own tests, usually a Mock
            return False
        came = {request.get_request_property(OPEN_INFERENCE) is not None for request in requests}
        if len(came) > 1:
            raise PredictionException("The batch has tensors beside what an envelope unwraps", 500)
        return came == {True}

    async def _formatted_later(self, results: Awaitable[Any]) -> Any:
        found = await results
        return self.format_output(found) if found else found

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """Convert the rows of the requests to the rows that the handler takes."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """Convert the handler's answers to one answer per request."""


class BodyEnvelope(BaseEnvelope):
    """An envelope whose handler gets the bodies themselves instead of dicts."""

    keeps_rows = True

    def parse_input(self, data: Any) -> Any:
        """Take `data` or `body` out of each row."""
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: Any) -> Any:
        """Return the answers unchanged."""
        return data


class JSONEnvelope(BaseEnvelope):
    """TensorFlow Serving's REST format: `{"instances": [...]}` in, `{"predictions": [...]}` out."""

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(handle_fn)
        self._lengths: list[int] = []

    def parse_input(self, data: Any) -> Any:
        """Return all instances of all requests in one list, and remember how many each request had.

        Raises:
            PredictionException: 400, a request has no list of instances, or invalid base64.
        """
        batches = [instances_of(row) for row in data]
        self._lengths = [len(batch) for batch in batches]
        return [_decoded(one) if isinstance(one, dict) else one for batch in batches for one in batch]

    def format_output(self, data: Any) -> Any:
        """Return the answers of each request as one line of JSON.

        Raises:
            ValueError: the batch has several requests, and not one answer per instance.
        """
        if len(self._lengths) > 1 and len(data) != sum(self._lengths):
            raise ValueError(
                f"the handler gave {len(data)} answers for {sum(self._lengths)} instances of "
                f"{len(self._lengths)} requests, so it can't be told whose they are"
            )
        answers = []
        start = 0
        for length in self._lengths:
            answers.append(data[start : start + length])
            start += length
        return [f'{{"predictions": {one_line_json(answer)}}}' for answer in answers]


class KServeEnvelope(BaseEnvelope):
    """KServe v1; only the first request of a batch is read, so the model needs batchSize 1."""

    def parse_input(self, data: Any) -> Any:
        """Return `instances` of the first request unchanged, of any type.

        Raises:
            PredictionException: 400, it has no `instances`, or null.
        """
        body = json_body(data[0])
        if body.get("instances") is None:
            raise _no_instances(body)
        return body["instances"]

    def format_output(self, data: Any) -> Any:
        """Wrap the answers as `{"predictions": ...}`, or as `{"explanations": ...}` for an explanation."""
        explained = self.context.get_request_header(0, "explain") == "True"
        return [{"explanations" if explained else "predictions": data}]


def json_body(row: Any) -> Any:
    """Return the JSON object of a request, parsed if it is bytes or text.

    Raises:
        PredictionException: 400, it is not a JSON object.
    """
    body = (row.get("data") or row.get("body") or row) if isinstance(row, dict) else row
    if isinstance(body, (bytes, bytearray, str)):
        try:
            body = parse_json(body)
        except (ValueError, RecursionError) as err:
            raise bad_request(f"The request body is not valid JSON: {err}") from err
    if not isinstance(body, dict):
        raise bad_request(f"The request body is a JSON {type(body).__name__}; expected an object")
    return body


def instances_of(row: Any) -> list[Any]:
    """Return the list `instances` of a request.

    Raises:
        PredictionException: 400, there is none.
    """
    body = json_body(row)
    instances = body.get("instances")
    if not isinstance(instances, list):
        raise _no_instances(body, "list of instances")
    return instances


def _no_instances(body: dict[str, Any], lacks: str = "instances") -> PredictionException:
    found = fields_of(body) if body else "an empty object"
    return bad_request(f'The request has no {lacks}: found {found}; expected {{"instances": [...]}}')


def _decoded(instance: dict[Any, Any]) -> Any:
    if list(instance) == ["b64"]:
        return _from_base64(instance["b64"])
    return {
        key: _from_base64(value["b64"]) if isinstance(value, dict) and list(value) == ["b64"] else value
        for key, value in instance.items()
    }


def _from_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError, TypeError) as err:
        raise bad_request(f"A value under 'b64' is not base64: {err}") from err


# Limits on the nested lists that a shape makes: for each element (models take fewer than ten dimensions), and
# for shapes with a 0, which make empty lists.
_LISTS_PER_ELEMENT = 10
_LISTS_OF_NOTHING = 65_536


class KServev2Envelope(BaseEnvelope):
    """`{"inputs": [...]}` in, `{"outputs": [...]}` out; the handler gets the tensors as a list of dicts.

    Only the first request of a batch is read, so the model needs batchSize 1. While the handler runs, the
    context has `input_names`, which it may replace by the names of its outputs, and `input_request_id`, if
    the client sent an id.
    """

    def parse_input(self, data: Any) -> Any:
        """Return the inputs of the first request: numbers nested by their shape; of `BYTES`, the first item.

        `data` may be one value without a list around it.

        Raises:
            PredictionException: 400, it has no list of inputs, or data that does not fit its shape.
        """
        self._forget()  # a request that failed may have left them
        body = json_body(data[0])
        inputs = body.get("inputs")
        if not isinstance(inputs, list) or not all(isinstance(item, dict) for item in inputs):
            raise bad_request('The request has no list of tensors: expected {"inputs": [...]}')
        rows = [{**item, "data": _shaped(item)} for item in inputs]
        request_id = body.get("id")
        if isinstance(request_id, str) and request_id.strip():
            self.context.input_request_id = request_id
        self.context.input_names = [str(item.get("name", "")) for item in inputs]
        return rows

    def format_output(self, data: Any) -> Any:
        """Return one answer with all outputs; output i has the name at i of `context.input_names`."""
        model = (self.context.manifest or {}).get("model") or {}
        request_id = getattr(self.context, "input_request_id", None) or self.context.get_request_id(0)
        names = list(map(str, getattr(self.context, "input_names", None) or ()))
        further = (f"output-{index}" for index in count(len(names)))
        self._forget()
        return [
            {
                "id": request_id,
                "model_name": model.get("modelName") or getattr(self.context, "model_name", None),
                "model_version": model.get("modelVersion"),
                "outputs": [_output(*named) for named in zip(chain(names, further), data, strict=False)],
            }
        ]

    def _forget(self) -> None:
        for name in ("input_names", "input_request_id"):
            if hasattr(self.context, name):
                delattr(self.context, name)


def _shaped(tensor: dict[str, Any]) -> Any:
    name, shape = shown(tensor.get("name")), tensor.get("shape", [-1])
    values = tensor.get("data")
    if values is None:
        raise bad_request(f"The input {name} has no data")
    if tensor.get("datatype") == "BYTES":
        return values[0] if values and isinstance(values, list) else values
    try:
        array = _elements(values).reshape(shape)
        _check_lists(array)
    except (ValueError, TypeError, OverflowError) as err:
        raise bad_request(f"The data of input {name} does not fit its shape {shown(shape)}: {err}") from err
    return array.tolist()


def _elements(values: Any) -> Array:
    """Return the values as an array of objects: in an array of texts each takes the memory of the longest.

    If one number is a float, all become floats, as in TorchServe: JavaScript writes 2.0 as `2`, and a handler
    that makes a tensor of the row `[2]` would get whole numbers.
    """
    array = np.array(values, dtype=object)
    kinds = set(map(type, array.flat))
    if list in kinds:
        raise ValueError("its lists are not of one length, or not of one depth")
    return array.astype(np.float64) if float in kinds and kinds <= {float, int, bool} else array


def _check_lists(array: Array) -> None:
    lists = sum(accumulate(array.shape[:-1], mul))
    if lists > _LISTS_PER_ELEMENT * array.size + _LISTS_OF_NOTHING:
        raise ValueError(f"that would be {lists} lists for {array.size} elements")


def _array(item: Any) -> Array:
    if begins_with_text(item):
        texts = np.array(item, dtype=object)
        if set(map(type, texts.flat)) in ({str}, {bytes}):
            return texts
    return np.array(item)  # numbers among texts become texts, as in TorchServe


def _output(name: str, item: Any) -> dict[str, Any]:
    array = _array(item)
    datatype = datatype_of_array(array.dtype)
    if datatype is None:
        raise TypeError(
            f"output {name!r} has the numpy type {array.dtype}, which the protocol has no name for"
        )
    flat = array.flatten()
    return {"name": name, "datatype": datatype.name, "data": flat.tolist(), "shape": [flat.size]}
