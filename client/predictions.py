"""TorchServe's prediction API: forms, requests and responses, without I/O."""

from __future__ import annotations

import mimetypes
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torchere.client.exchange import JSON, REQUEST_ID, Answer, Operation, Request, json_body, merged, path

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


@dataclass(frozen=True, slots=True)
class Prediction:
    """The response to a prediction request.

    Attributes:
        body: the bytes that the handler returned.
        headers: those of the handler and of the server; names in lower case.
        status: the HTTP status, a 2xx.
    """

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200

    @property
    def request_id(self) -> str:
        """The request id in the server's logs; "" without one."""
        return self.headers.get(REQUEST_ID, "")

    @property
    def text(self) -> str:
        """The body decoded as UTF-8, with invalid bytes replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body as JSON. Most handlers return JSON, with or without a content type.

        Raises:
            UnreadableAnswer: the body is not JSON.
        """
        return Answer(self.status, self.headers, self.body).json()


def predict(
    model: str,
    data: object = None,
    *,
    version: str | None = None,
    content_type: str | None = None,
    files: Mapping[str, PartLike] | None = None,
    headers: Mapping[str, str] | None = None,
    verb: str = "predictions",
) -> Operation[Prediction]:
    """Build a prediction request, or an explanation request with `verb="explanations"`.

    Args:
        model: the name of the model.
        data: `bytes` are sent unchanged, `str` as text, a path as the content of its file, any other value
            as JSON.
        version: None is the model's default version.
        content_type: overrides the content type derived from `data`.
        files: the parts of a multipart form, sent instead of `data`.
        headers: reach the handler in the spelling given here; a content type among them overrides the
            derived one, as `content_type` does.
        verb: the first segment of the path.

    Raises:
        TypeError: both `data` and `files` are given, or `data` is not serialisable as JSON.
        OSError: a file can't be read.
    """
    if files is not None and data is not None:
        raise TypeError("found data and files; expected one of them")
    own_type, body = encode_form(files) if files is not None else encode_data(data)
    sent = merged({"content-type": own_type}, headers or {})
    if content_type:
        sent = merged(sent, {"content-type": content_type})
    return Operation(Request("POST", path(verb, model, version or ""), headers=sent, body=body), _prediction)


def encode_data(data: object) -> tuple[str, bytes]:
    """Encode request data and return its content type and its bytes."""
    if data is None:
        return OCTETS, b""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return OCTETS, bytes(data)
    if isinstance(data, str):
        return "text/plain; charset=utf-8", data.encode()
    if isinstance(data, PathLike):
        file = Path(data)
        return guessed_type(file.name), file.read_bytes()
    return JSON, json_body(data)


def _prediction(answer: Answer) -> Prediction:
    return Prediction(answer.body, answer.headers, answer.status)
