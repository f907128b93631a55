"""An encoder for `multipart/form-data` (RFC 7578)."""

from __future__ import annotations

import mimetypes
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

OCTETS = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form: a file if it has a `filename`, else a plain field.

    An empty `content_type` is guessed from the filename.
    """

    value: bytes
    filename: str = ""
    content_type: str = ""


PartLike = Part | bytes | str | PathLike[str]


def encode_form(parts: Mapping[str, PartLike]) -> tuple[str, bytes]:
    """Encode a form and return its content type and its body.

    A `str` becomes a plain field, `bytes` a file with the name of the field, a path the file at that path.

    Raises:
        OSError: a file can't be read.
    """
    boundary = secrets.token_hex(16)
    chunks: list[bytes] = []
    for name, given in parts.items():
        part = _part(name, given)
        chunks += [f"--{boundary}\r\n".encode(), _head(name, part), b"\r\n", part.value, b"\r\n"]
    chunks.append(f"--{boundary}--\r\n".encode())
    return f"multipart/form-data; boundary={boundary}", b"".join(chunks)


def guessed_type(filename: str) -> str:
    """Guess the content type of a file from its name."""
    return mimetypes.guess_type(filename)[0] or OCTETS


def _part(name: str, given: PartLike) -> Part:
    if isinstance(given, Part):
        return given
    if isinstance(given, str):
        return Part(given.encode())
    if isinstance(given, bytes):
        return Part(given, filename=name)
    path = Path(given)
    return Part(path.read_bytes(), filename=path.name)


def _head(name: str, part: Part) -> bytes:
    lines = f'Content-Disposition: form-data; name="{_quoted(name)}"'
    if part.filename:
        content_type = part.content_type or guessed_type(part.filename)
        lines += f'; filename="{_quoted(part.filename)}"\r\nContent-Type: {_one_line(content_type)}'
    elif part.content_type:
        lines += f"\r\nContent-Type: {_one_line(part.content_type)}"
    return f"{lines}\r\n".encode()


def _quoted(text: str) -> str:
    # As in browsers (WHATWG, multipart/form-data encoding): these three would end the value or the line.
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _one_line(text: str) -> str:
    if "\r" in text or "\n" in text:
        raise ValueError(f"the content type is {text!r}; expected one line")
    return text
