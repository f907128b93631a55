"""TorchServe's prediction API: forms, requests and responses, without I/O."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torchere.client.exchange import JSON, Answer, Operation, Request, json_body, merged, path

OCTETS = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form: a file if the part has a `filename`, else a plain field.

    An empty `content_type` is guessed from the filename.
    """

    value: bytes
    filename: str = ""
    content_type: str = ""


PartLike = Part | bytes | str | PathLike[str]


def _encode_form(parts: Mapping[str, PartLike]) -> tuple[str, bytes]:
    """Encode a form of one or more parts and return its content type and its body.

    A `str` becomes a plain field; `bytes` become a file named after the field; a path stands for its file.
    """
    import httpx  # noqa: PLC0415 - `torchere bench` sends no forms, and goes without httpx

    fields = [(name, _field(_part(name, given))) for name, given in parts.items()]
    form = httpx.Request("POST", "http://form", files=fields)
    return form.headers["content-type"], form.read()


def _guessed_type(filename: str) -> str:
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


def _field(part: Part) -> tuple[str | None, bytes, str | None]:
    content_type = part.content_type or (_guessed_type(part.filename) if part.filename else None)
    if content_type and ("\r" in content_type or "\n" in content_type):  # httpx would send more headers
        raise ValueError(f"the content type is {content_type!r}; expected one line")
    return part.filename or None, part.value, content_type


class Prediction(Answer):
    """The response to a prediction request. Most handlers return JSON, with or without a content type.

    Attributes:
        body: the bytes that the handler returned.
        headers: those of the handler and of the server; names in lower case.
        status: the HTTP status, a 2xx.
    """

    __slots__ = ()

    @property
    def text(self) -> str:
        """The body decoded as UTF-8, with invalid bytes replaced."""
        return self.body.decode("utf-8", "replace")


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
    """Build a prediction request, or an explanation request with `verb="explanations"`. See `Client.predict`.

    A content type among the headers overrides the one of `data`, as `content_type` does.

    Raises:
        TypeError: both `data` and `files` are given, or `data` is not serialisable as JSON.
        OSError: a file can't be read.
    """
    if files is not None and data is not None:
        raise TypeError("found data and files; expected one of them")
    own_type, body = _encode_form(files) if files else encode_data(data)
    sent = merged({"content-type": own_type}, headers or {})
    if content_type:
        sent = merged(sent, {"content-type": content_type})
    return Operation(Request("POST", path(verb, model, version), headers=sent, body=body), _prediction)


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
        return _guessed_type(file.name), file.read_bytes()
    return JSON, json_body(data)


def _prediction(answer: Answer) -> Prediction:
    return Prediction(answer.body, answer.headers, answer.status)
