"""Encoder of a request to the JSON that TorchServe passes to an envelope, for models behind one.

TorchServe's gRPC service writes BYTES elements in base64; its REST service passes on the text that the client
sent.
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec

from torchere.handlers.tensors import BYTES, TensorError
from torchere.handlers.tensors.codec import array_from_bytes, json_from_tensor, split_elements
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.open_inference.tensor_request import InputTensor, TensorRequest

BytesAs = Literal["text", "base64"]


def request_json(model: str, request: TensorRequest, bytes_as: BytesAs) -> bytes:
    """Return the body `{"id", "model_name", "inputs": [{"name", "shape", "datatype", "data"}]}`.

    Raises:
        InvalidRequest: BYTES are not valid text, with `bytes_as="text"`, or have an invalid layout.
    """
    inputs = [_input(tensor, index, bytes_as) for index, tensor in enumerate(request.inputs)]
    return msgspec.json.encode({"id": request.id, "model_name": model, "inputs": inputs})


def _input(tensor: InputTensor, index: int, bytes_as: BytesAs) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype.name,
        "data": _data(tensor, f"inputs[{index}]", bytes_as),
    }


def _data(tensor: InputTensor, where: str, bytes_as: BytesAs) -> Any:
    try:
        if tensor.datatype is BYTES and bytes_as == "base64":
            return [base64.b64encode(element).decode() for element in split_elements(tensor.raw, where)]
        array = array_from_bytes(tensor.raw, tensor.datatype, tensor.shape, where)
        return json_from_tensor(array, tensor.datatype, where)
    except TensorError as err:
        raise InvalidRequest(str(err)) from err
