"""Decode the values of requests for a handler, and encode a handler's answers as bytes."""

from __future__ import annotations

import io
import logging
import sys
from typing import Literal

from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.json_text import indented_json, parse_json
from torchere.handlers.tensors import TENSOR_TYPE, TensorError, parse_tensor_type
from torchere.handlers.tensors.codec import tensor_from_bytes

logger = logging.getLogger(__name__)

Lent = Literal["own", "write", "read"]
"""Memory of a tensor that a handler gets: its own, or the request's, which it may change, or may not."""


def decode_input(value: bytes, content_type: str, decode: bool = True, lent: Lent = "own") -> object:
    """Return one value of a request in the form that a handler reads.

    Args:
        value: the bytes as received.
        content_type: without parameters; "" when the client named none; a frontend sets the type of tensors.
        decode: False returns every value except tensors as received.
        lent: for tensors, see `Lent`. A misaligned tensor is copied in any case; one in `bytes` is always
            read-only unless it is copied.

    Returns:
        Parsed JSON for exactly `application/json`, a `str` for types that begin with `text`, an array for a
        tensor of the Open Inference Protocol, and a `bytearray` for everything else. A value that can't be
        decoded as its content type is a `bytearray` too: the handler decides about it.

    Raises:
        TensorError: the elements of a tensor are invalid, e.g. a length of BYTES goes beyond the end.
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
    """Return the body of one answer.

    `bytes` and `bytearray` are sent unchanged, `str` as UTF-8 without quotes, a tensor as `torch.save` writes
    it, and everything else as `json.dumps(value, indent=2)` does (`json_text.py`).

    Raises:
        UnsupportedOutput: the value is none of these, is nested too deeply, or contains itself.
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
            "expected bytes, str, a tensor, or a value for json.dumps"
        ) from err


def _saved_tensor(value: object) -> bytes | None:
    torch = sys.modules.get("torch")  # while torch is not imported, no value is a tensor
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()  # torch.save writes whole storages: a row would include its whole batch
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
