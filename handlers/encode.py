"""Bytes on the wire to what a handler reads, and what a handler answers back to bytes.

Clients of TorchServe compare JSON answers byte for byte, so ours equal `json.dumps(value, indent=2)`. That
function is slow, because CPython's C encoder refuses to indent. `_layout` walks the containers itself and
gives every container of plain scalars to the C encoder in one call, with the line break and the indentation
hidden in its item separator.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from json.encoder import encode_basestring_ascii
from typing import Any, Literal

import msgspec

from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import TENSOR_TYPE, TensorError, parse_tensor_type
from torchere.handlers.tensors_bytes import tensor_from_bytes

logger = logging.getLogger(__name__)

_INDENT = "  "
_SCALARS = frozenset({str, int, float, bool, type(None)})
_FLOATS = frozenset({float})
_LISTS = frozenset({list})
# From this many floats on, printing them all at once pays for its checks (measured on CPython 3.11).
_MANY_FLOATS = 8
_print_fast = msgspec.json.Encoder().encode


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
            return _parse_json(value)
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


def _parse_json(value: bytes) -> object:
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError:
        # NaN, 1e400, lone surrogates: Python's parser takes some texts that the fast one refuses.
        return json.loads(bytes(value).decode())


def encode_answer(value: object) -> bytes:
    """The body of one answer.

    `bytes` and `bytearray` go out as they are, `str` as UTF-8 without quotes, a tensor as `torch.save` writes
    it, and everything else as JSON with the bytes of `json.dumps(value, indent=2)`.

    Raises:
        UnsupportedOutput: the value is none of these, or it is nested too deeply or in itself.
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    try:
        if isinstance(value, str):
            return value.encode()
        saved = _saved_tensor(value)
        return saved if saved is not None else _encode_json(value)
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


def _encode_json(value: object) -> bytes:
    try:
        text = _layout(value, "\n" + _INDENT)
    except RecursionError:
        # The standard encoder tells "too deep" from "contains itself".
        text = json.dumps(value, indent=2)
    return text.encode("ascii")


def json_texts(values: Sequence[object]) -> list[str]:
    """The text of `json.dumps(value)` for each, to the letter; faster where there are many floats.

    Raises:
        TypeError, ValueError: as `json.dumps`.
    """
    texts = _texts_of_rows(values)
    return texts if texts is not None else list(map(_json_text, values))


def _texts_of_rows(values: Sequence[Any]) -> list[str] | None:
    """Of lists of rows of numbers, which are printed all at once; None where a value is something else."""
    if not all(type(value) is list and value for value in values):
        return None
    rows = list(chain.from_iterable(values))
    if set(map(type, rows)) != _LISTS:
        return None
    try:
        for row in rows:
            array("d", row)  # takes numbers only, in a third of the time it takes to look at each type
        printed = _print_fast(values)
    except (TypeError, ValueError, OverflowError, RecursionError):  # the standard encoder says it better
        return None
    if b'"' in printed:  # decimals
        return None
    texts = printed[3:-3].replace(b",", b", ").decode("ascii").split("]], [[")
    return [
        _json_text(value) if _notation_differs(text) else f"[[{text}]]"
        for text, value in zip(texts, values, strict=True)
    ]


def _json_text(value: object) -> str:
    try:
        return _compact(value)
    except RecursionError:
        return json.dumps(value)  # tells "too deep" from "contains itself"


def _compact(value: object) -> str:
    if type(value) is list and value:
        kinds = set(map(type, value))
        if kinds == _FLOATS:
            return f"[{_join_floats(value, ' ')}]"
        if kinds == _LISTS:
            return f"[{', '.join([_compact(item) for item in value])}]"
    if type(value) is dict and value:
        return "{" + ", ".join([f"{_key(key)}: {_compact(item)}" for key, item in value.items()]) + "}"
    return json.dumps(value)


def _layout(value: object, gap: str) -> str:
    """`json.dumps(value, indent=2)`, where `gap` is the line break and indentation before a child."""
    if isinstance(value, (list, tuple)):
        return _layout_list(value, gap) if value else "[]"
    if isinstance(value, dict):
        return _layout_dict(value, gap) if value else "{}"
    return json.dumps(value)


def _layout_list(items: Sequence[object], gap: str) -> str:
    kinds = set(map(type, items))
    rows = _join_rows(items, gap) if kinds == _LISTS else None
    if rows is not None:
        inner = rows
    elif kinds == _FLOATS:
        inner = _join_floats(items, gap)
    elif kinds <= _SCALARS:
        inner = _flat_encoder(gap)(items)[1:-1]
    else:
        parts = []
        for item in items:
            parts.append(_layout(item, gap + _INDENT))
        inner = ("," + gap).join(parts)
    return f"[{gap}{inner}{gap[: -len(_INDENT)]}]"


def _layout_dict(items: dict[object, object], gap: str) -> str:
    if _SCALARS.issuperset(map(type, items.values())):
        inner = _flat_encoder(gap)(items)[1:-1]
    else:
        parts = []
        for key, item in items.items():
            parts.append(f"{_key(key)}: {_layout(item, gap + _INDENT)}")
        inner = ("," + gap).join(parts)
    return f"{{{gap}{inner}{gap[: -len(_INDENT)]}}}"


def _key(key: object) -> str:
    if type(key) is str:
        return encode_basestring_ascii(key)
    # Without the braces and ": 0": numbers and None have rules of their own.
    return json.dumps({key: 0})[1:-4]


@functools.lru_cache(maxsize=64)
def _flat_encoder(gap: str) -> Callable[[object], str]:
    """CPython's C encoder, for a container without containers in it whose items stand after `gap`."""
    return json.JSONEncoder(separators=("," + gap, ": "), check_circular=False).encode


def _join_floats(items: Sequence[Any], gap: str) -> str:
    """Floats, and nothing else, side by side.

    Many are printed at once by msgspec: the shortest digits that read back equal are the same for every
    correct printer. Only the notation differs: it writes 1e16 for 1e+16, 0.00001 for 1e-05 and null for nan.
    An item that may be such a one is printed by Python instead.
    """
    separator = "," + gap
    if len(items) < _MANY_FLOATS:
        text = separator.join(map(float.__repr__, items))
        return text if "n" not in text else separator.join(map(json.dumps, items))  # nan and inf
    text = _print_fast(items)[1:-1].decode("ascii")
    if not _notation_differs(text):
        return text.replace(",", separator)
    tokens = text.split(",")
    for index, token in enumerate(tokens):
        if _notation_differs(token):
            tokens[index] = json.dumps(items[index]) if token == "null" else float.__repr__(items[index])
    return separator.join(tokens)


def _join_rows(rows: Sequence[Any], gap: str) -> str | None:
    """Lists of floats side by side, printed all at once; None where that would not give the same bytes."""
    if not all(rows) or set(map(type, chain.from_iterable(rows))) != _FLOATS:
        return None
    text = _print_fast(rows)[2:-2].decode("ascii")
    if _notation_differs(text):
        return None
    inner = gap + _INDENT
    text = text.replace(",", "," + inner).replace(f"],{inner}[", f"{gap}],{gap}[{inner}")
    return f"[{inner}{text}{gap}]"


def _notation_differs(text: str) -> bool:
    return "e" in text or "n" in text or "0.0000" in text
