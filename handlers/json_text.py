"""Read and write JSON like Python's `json`, by orjson and msgspec where the result is the same.

Clients of TorchServe compare answers byte for byte, and TorchServe writes them with Python's `json`, which
takes 49 µs to indent 64 floats where orjson takes 1.7 µs (`benchmarks/json_text.py`). orjson spells numbers
below 1e-4 differently (`0.000013` for `1.3e-05`; releases up to 3.11.6 also those from 1e16 on); both
spellings are read as the same doubles.
"""

from __future__ import annotations

import codecs
import json
import math
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec
import orjson

# Without these orjson writes values that `json` refuses, and reorders the items of an OrderedDict.
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
        return json.dumps(value, indent=2, ensure_ascii=ascii_only).encode()
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


def parse_json(text: bytes | bytearray | memoryview | str, *, utf8_only: bool = False) -> Any:
    """Return `json.loads(text)`; with `utf8_only`, `json.loads(text.decode())`.

    orjson is not used: it reads whole numbers of more than 64 bits as floats, and is at most a sixth faster
    than msgspec. Python's parser then handles NaN, 1e400, lone surrogates and other encodings.

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
    ):  # subclasses, keys other than str, integers over 64 bits, lone surrogates, 255 levels, or no JSON type
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
