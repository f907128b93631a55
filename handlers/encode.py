"""Decode the values of requests for a handler, and encode a handler's answers as bytes."""

from __future__ import annotations

import codecs
import io
import json
import logging
import math
import sys
from json.encoder import encode_basestring_ascii
from typing import Any, Literal

import msgspec
import orjson

from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import TENSOR_TYPE, TensorError, parse_tensor_type
from torchere.handlers.tensors.codec import tensor_from_bytes

logger = logging.getLogger(__name__)

Lent = Literal["own", "write", "read"]
"""Memory of a tensor for a handler: a copy ("own"), or the request's, writable ("write") or not ("read")."""


def decode_input(value: bytes, content_type: str, decode: bool = True, lent: Lent = "own") -> object:
    """Return one value of a request in the form that a handler reads.

    Args:
        value: the bytes as received.
        content_type: without parameters; "" when the client named none; a frontend sets the type of tensors.
        decode: False returns every value except tensors as received.
        lent: for tensors, see `Lent`. A misaligned tensor is copied in any case; a tensor in `bytes`
            is read-only unless it is copied.

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
    it, and everything else as `json.dumps(value, indent=2)` does (`indented_json`).

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
            "expected bytes, str, a tensor, or a value for json.dumps: call .tolist() on tensors in it, on "
            "NumPy's arrays and on its numbers"
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


# JSON as Python's `json` writes it, by orjson and msgspec where the result is the same.
#
# Clients of TorchServe compare answers byte for byte, and TorchServe writes them with Python's `json`, which
# takes 49 µs to indent 64 floats where orjson takes 1.7 µs (`benchmarks/json_text.py`). orjson spells numbers
# below 1e-4 differently (`0.000013` for `1.3e-05`; releases up to 3.11.6 also those from 1e16 on); both
# spellings are read as the same doubles.

# Without these options orjson writes values that `json` refuses, and reorders the items of an OrderedDict.
_AS_PYTHON = (
    orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)
_INDENTED = _AS_PYTHON | orjson.OPT_INDENT_2
_ESCAPES = "torchere.json"  # name of an error handler of codecs
_N = ord("n")  # searching for an int takes a tenth of the time of searching for bytes
_DEL = 0x7F


def indented_json(value: object, *, ascii_only: bool = True) -> bytes:
    """Return `json.dumps(value, indent=2, ensure_ascii=ascii_only)` as UTF-8.

    Raises:
        TypeError, ValueError, RecursionError: as `json.dumps`.
        UnicodeEncodeError: there is a lone surrogate, and `ascii_only` is False.
    """
    text = _written(value, _INDENTED)
    if text is None:
        # `json.dumps` of Python 3.14 indents in C, without the recursion limit: 800 MB for 20,000 levels.
        encoder = json.JSONEncoder(indent=2, ensure_ascii=ascii_only)
        return "".join(encoder.iterencode(value)).encode()
    return _escaped(text) if ascii_only else text


def one_line_json(value: object) -> str:
    """Return `json.dumps(value)`, with a space after each comma and colon.

    Raises:
        TypeError, ValueError, RecursionError: as `json.dumps`.
    """
    text = _written(value, _AS_PYTHON)
    if text is None or b"\\" in text:  # an escaped quote would be taken for the end of a string
        return json.dumps(value)
    parts = text.split(b'"')  # every second part is outside of strings
    parts[::2] = [part.replace(b",", b", ").replace(b":", b": ") for part in parts[::2]]
    return _escaped(b'"'.join(parts)).decode()


def compact_json(value: object) -> bytes:
    """Return `json.dumps(value, separators=(",", ":"))`; letters beyond ASCII may be UTF-8 in it.

    Raises:
        TypeError, ValueError, RecursionError: as `json.dumps`.
    """
    text = _written(value, _AS_PYTHON)
    return json.dumps(value, separators=(",", ":")).encode() if text is None else text


def parse_json(text: bytes | bytearray | memoryview | str, *, utf8_only: bool = False) -> Any:
    """Return `json.loads(text)`; with `utf8_only`, `json.loads(text.decode())`.

    orjson is not used: it reads whole numbers of more than 64 bits as floats, and is at most a sixth faster
    than msgspec. Where msgspec fails, Python's parser reads NaN, 1e400, lone surrogates and other encodings.

    Raises:
        ValueError, RecursionError: as `json.loads`.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        if isinstance(text, str):
            return json.loads(text)
        return json.loads(bytes(text).decode() if utf8_only else bytes(text))


def _written(value: object, option: int) -> bytes | None:
    """Return orjson's text; None where `json` would write another value, or must raise the error itself."""
    try:
        text = orjson.dumps(value, option=option)
    except (
        TypeError
    ):  # subclasses, keys other than str, integers over 64 bits, lone surrogates, 255 levels, or other types
        return None
    # orjson writes NaN and infinities as null.
    return None if _N in text and b"null" in text and not _is_finite(value) else text


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(_is_finite, value))


def _escaped(text: bytes) -> bytes:
    if text.isascii() and _DEL not in text:
        return text
    return text.decode().replace("\x7f", r"\u007f").encode("ascii", _ESCAPES)


def _escape(err: UnicodeError) -> tuple[str, int]:
    assert isinstance(err, UnicodeEncodeError)
    return encode_basestring_ascii(err.object[err.start : err.end])[1:-1], err.end


codecs.register_error(_ESCAPES, _escape)
