"""The envelope of the KServe v2 (Open Inference) protocol."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from torchere.handlers.envelopes import BaseEnvelope, json_body
from torchere.handlers.errors import PredictionException
from torchere.handlers.tensors import Array, datatype_of_array, shown

# Limits on the nested lists of a shape: models take fewer than ten dimensions; a 0 yields empty lists.
_LISTS_PER_ELEMENT = 10
_LISTS_OF_NOTHING = 65_536


class KServev2Envelope(BaseEnvelope):
    """`{"inputs": [...]}` in, `{"outputs": [...]}` out; the handler gets the tensors as a list of dicts.

    Only the first request of a batch is read, so the model needs batchSize 1.
    """

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._request_id: str | None = None
        self._names: list[str] = []

    def parse_input(self, data: Any) -> Any:
        """Return the inputs of the first request: numbers nested by their shape, `BYTES` as its first item.

        Raises:
            PredictionException: 400, it has no list of inputs, or data that does not fit its shape.
        """
        body = json_body(data[0])
        inputs = body.get("inputs")
        if not isinstance(inputs, list) or not all(isinstance(item, dict) for item in inputs):
            raise PredictionException('The request has no list of tensors: expected {"inputs": [...]}', 400)
        request_id = body.get("id")
        self._request_id = request_id if isinstance(request_id, str) and request_id.strip() else None
        self._names = [str(item.get("name", "")) for item in inputs]
        return [{**item, "data": _shaped(item)} for item in inputs]

    def format_output(self, data: Any) -> Any:
        """Return one answer with all outputs; output i has the name of input i."""
        model = (self.context.manifest or {}).get("model") or {}
        return [
            {
                "id": self._request_id or self.context.get_request_id(0),
                "model_name": model.get("modelName") or self.context.model_name,
                "model_version": model.get("modelVersion"),
                "outputs": [_output(self._name(index), item) for index, item in enumerate(data)],
            }
        ]

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else f"output-{index}"


def _shaped(tensor: dict[str, Any]) -> Any:
    name, shape = shown(tensor.get("name")), tensor.get("shape", [-1])
    values = tensor.get("data")
    if not isinstance(values, list):
        raise PredictionException(f"The input {name} has no list of data", 400)
    if tensor.get("datatype") == "BYTES":
        return values[0] if values else values
    try:
        array = _elements(values).reshape(shape)
        _check_lists(array)
    except (ValueError, TypeError) as err:
        raise PredictionException(
            f"The data of input {name} does not fit its shape {shown(shape)}: {err}", 400
        ) from err
    return array.tolist()


def _elements(values: list[Any]) -> Array:
    """Return the values as an array of objects: in an array of texts each takes as much as the longest."""
    array = np.array(values, dtype=object)
    if list in set(map(type, array.flat)):
        raise ValueError("its lists are not of one length, or not of one depth")
    return array


def _check_lists(array: Array) -> None:
    lists = sum(accumulate(array.shape[:-1], mul))
    if lists > _LISTS_PER_ELEMENT * array.size + _LISTS_OF_NOTHING:
        raise ValueError(f"that would be {lists} lists for {array.size} elements")


def _output(name: str, item: Any) -> dict[str, Any]:
    array = np.array(item)
    datatype = datatype_of_array(array.dtype)
    if datatype is None:
        raise TypeError(
            f"output {name!r} has the numpy type {array.dtype}, which the protocol has no name for"
        )
    flat = array.flatten()
    return {"name": name, "datatype": datatype.name, "data": flat.tolist(), "shape": [flat.size]}
