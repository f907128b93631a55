"""TorchServe's prediction API: what to send, and what came back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torchere.client.exchange import JSON, REQUEST_ID, Answer, Operation, Request, json_body, merged, path
from torchere.client.multipart import OCTETS, PartLike, encode_form, guessed_type


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer of a model.

    Attributes:
        body: the bytes the handler answered.
        headers: what it set and what the server added; names in lower case.
        status: the HTTP status, a 2xx.
    """

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200

    @property
    def request_id(self) -> str:
        """The server's id of the call, to be found in its logs."""
        return self.headers.get(REQUEST_ID, "")

    @property
    def text(self) -> str:
        """The body as text; what is not UTF-8 is replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON, which most handlers answer, with a content type or without.

        Raises:
            UnreadableAnswer: it is none.
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
    """A prediction, or with `verb="explanations"` an explanation.

    Args:
        model: its name.
        data: `bytes` go as they are, `str` as text, a path as the file it names, everything else as JSON.
        version: None is the model's default version.
        content_type: instead of the one that belongs to `data`.
        files: a form of several parts, instead of `data`.
        headers: reach the handler in the spelling given here; a content type among them counts like
            `content_type`.
        verb: the first segment of the path.

    Raises:
        TypeError: both `data` and `files` are given, or `data` has no form in JSON.
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
    """The content type and the bytes of what a caller wants to send."""
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
