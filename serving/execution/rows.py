"""What a handler is given of one request: its row of the batch, and its headers."""

from __future__ import annotations

from typing import Any

from torchere.handlers.encode import Lent, decode_input
from torchere.handlers.tensors import TensorError, shown
from torchere.serving.errors import InvalidRequest
from torchere.serving.types import InferRequest


def row_of(request: InferRequest, decode: bool, lent: Lent) -> dict[str, Any] | InvalidRequest:
    """The values of a request by name, as `decode_input` reads them; or what is wrong with a tensor of it."""
    row: dict[str, Any] = {}
    for parameter in request.parameters:
        try:
            row[parameter.name] = decode_input(parameter.value, parameter.content_type, decode, lent)
        except TensorError as err:
            return InvalidRequest(f"Input {shown(parameter.name)} is wrong: {err}")
    return row


def headers_of(request: InferRequest) -> dict[str, Any]:
    """What a handler finds as headers: the type of each value under the value's name, then the real ones.

    A handler learns of the type of an uploaded file in no other way.
    """
    headers: dict[str, Any] = {}
    for parameter in request.parameters:
        headers[parameter.name] = {"content-type": parameter.content_type}
    headers.update(request.headers)
    return headers
