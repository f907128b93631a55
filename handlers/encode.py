"""Bytes on the wire to what a handler reads, and what a handler answers back to bytes."""

from __future__ import annotations

import io
import logging
import sys
from typing import Literal

from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.json_text import indented_json, parse_json
from torchere.handlers.tensors import TENSOR_TYPE, TensorError, parse_tensor_type
from torchere.handlers.tensors_bytes import tensor_from_bytes

logger = logging.getLogger(__name__)

Lent = Literal["own", "write", "read"]
"""Memory of a tensor that a handler gets: its own, or the request's, which it may change, or may not."""


def decode_input(value: bytes, content_type: str, decode: bool = True, lent: Lent = "own") -> object:
    """What a handler reads for one value of a request.

    Args:
        value: the bytes as they came.
        content_type: without parameters; "" when the client named none; a frontend gives tensors theirs.
        decode: False hands every value on as it came, save tensors.
        lent: of tensors. One that lies askew is a copy in any case; one in `bytes` can never be changed
            where it is.

    Returns:
        Parsed JSON for exactly `application/json`, a `str` for types that begin with `text`, an array for a
        tensor of the Open Inference Protocol, a `bytearray` for everything else, and for what its content
        type does not describe: the handler decides about it.

    Raises:
        TensorError: elements of a tensor are none, as a length of BYTES that goes beyond the end.
    """
    try:
        if decode and content_type == "application/json":
            return parse_json(value, utf8_only=True)
        if decode and content_type.startswith("text"):
            return bytes(value).decode()
        if content_type.startswith(TENSOR_TYPE):
            raw = memoryview(value).toreadonly() if lent == "read" else value
            datatype, shape = parse_tensor_type(content_type)
            array: object = tensor_from_bytes(raw, datatype, shape, writable=lent == "own")
            return array
    except TensorError:
        raise
    except (ValueError, RecursionError) as err:
        logger.warning(
            "a value sent as %s can't be decoded (%s: %s); the handler gets its %d bytes as they are",
            content_type,
            type(err).__name__,
            err,
            len(value),
        )
    return bytearray(value)


def encode_answer(value: object) -> bytes:
    """The body of one answer.

    `bytes` and `bytearray` go out as they are, `str` as UTF-8 without quotes, a tensor as `torch.save` writes
    it, and everything else as `json.dumps(value, indent=2)` does (`json_text.py`).

    Raises:
        UnsupportedOutput: the value is none of these, or it is nested too deeply or in itself.
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    try:
        if isinstance(value, str):
            return value.encode()
        saved = _saved_tensor(value)
        return saved if saved is not None else indented_json(value)
    except (TypeError, ValueError, RecursionError) as err:
        raise UnsupportedOutput(
            f"an answer of type {type(value).__name__} can't be sent: {err}; "
            "expected bytes, str, a tensor, or what json.dumps takes"
        ) from err


def _saved_tensor(value: object) -> bytes | None:
    torch = sys.modules.get("torch")  # where nobody imported torch, nothing is a tensor
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()  # torch.save writes whole storages: a row would take its batch mates along
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
