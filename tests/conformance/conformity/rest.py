"""One REST request and its answer, as the recordings describe them; kept is what clients depend on."""

from __future__ import annotations

import base64
import http.client
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# The headers that are compared; those that differ by nature (dates, lengths) or by server are not.
WATCHED = (
    "content-type",
    "transfer-encoding",
    "connection",
    "cache-control",
    "pragma",
    "expires",
    "content-encoding",
    "access-control-allow-origin",
    "access-control-allow-methods",
    "access-control-allow-headers",
    "ts_stream_next",
    "ts_request_sequence_id",
    "ts_request_sequence_end",
    "x-answer",
    "x-own",
)
TIMEOUT_S = 60.0
BOUNDARY = "conformity-boundary"


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    `api` says which listener it goes to. A body of several pieces goes out in chunks.
    """

    name: str
    method: str
    path: str
    api: str = "inference"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `body` is the JSON value, else the text."""

    status: int
    headers: Mapping[str, str]  # the watched ones, names in lower case
    has_request_id: bool
    body: Any
    layout: tuple[str, ...] = ()  # the blanks and line ends of a JSON body, run by run
    chunks: tuple[int, ...] = ()  # the lengths of those the body came in, if it did


def send(case: Case, addresses: Mapping[str, str]) -> Answer:
    """Send a request on a connection of its own; OSError when there is no answer."""
    connection = http.client.HTTPConnection(addresses[case.api], timeout=TIMEOUT_S)
    try:
        # Refused before the body was out; the answer can still be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(case.method, case.path, case.body, dict(case.headers))
        reply = connection.getresponse()
        pieces = list(iter(reply.read1, b"")) if reply.chunked else [reply.read()]
    finally:
        connection.close()
    headers = {name.lower(): value for name, value in reply.getheaders()}
    kept = {name: headers[name] for name in WATCHED if name in headers}
    raw = b"".join(pieces)
    body = decoded(raw)
    layout = () if isinstance(body, str) else tuple(re.findall(r"\s+", raw.decode()))
    chunks = tuple(map(len, pieces)) if reply.chunked else ()
    return Answer(reply.status, kept, "x-request-id" in headers, body, layout, chunks)


def decoded(raw: bytes) -> Any:
    """JSON as its value, else text; bytes that are no text come as one character each."""
    try:
        return json.loads(raw, parse_constant=str)  # NaN as a word: it does not even equal itself
    except ValueError:
        pass
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def recorded_case(request: Mapping[str, Any]) -> Case:
    """The request of a recording."""
    body, content_type = _recorded_body(request)
    headers = dict(request.get("headers", {}))
    if content_type:
        headers["Content-Type"] = content_type
    api = request.get("port", "inference")
    return Case(request["name"], request["method"], request["path"], api, headers, body)


def _recorded_body(request: Mapping[str, Any]) -> tuple[bytes | None, str | None]:
    given = request.get("type")
    if "multipart" in request:
        return multipart([_recorded_part(part) for part in request["multipart"]])
    if "json" in request:
        return json.dumps(request["json"]).encode(), given or "application/json"
    if "text" in request:
        return request["text"].encode(), given
    if "base64" in request:
        return base64.b64decode(request["base64"]), given
    if "zeros" in request:
        return b"0" * request["zeros"], given or "application/octet-stream"
    return None, given


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form: a file when it has a file name."""

    name: str
    content: bytes
    file_name: str | None = None
    content_type: str | None = None


def _recorded_part(part: Mapping[str, str]) -> Part:
    content = base64.b64decode(part["base64"]) if "base64" in part else part["text"].encode()
    return Part(part["name"], content, part.get("filename"), part.get("type"))


def multipart(parts: list[Part]) -> tuple[bytes, str]:
    """The body of a form of several parts, and its content type."""
    lines: list[bytes] = []
    for part in parts:
        named = f'form-data; name="{part.name}"'
        if part.file_name is not None:
            named += f'; filename="{part.file_name}"'
        lines += [f"--{BOUNDARY}".encode(), f"Content-Disposition: {named}".encode()]
        if part.content_type is not None:
            lines.append(f"Content-Type: {part.content_type}".encode())
        lines += [b"", part.content]
    lines += [f"--{BOUNDARY}--".encode(), b""]
    return b"\r\n".join(lines), f"multipart/form-data; boundary={BOUNDARY}"


def recorded_answer(response: Mapping[str, Any]) -> Answer:
    """The answer of a recording; a `note` stands for an OpenAPI document, of which only that is compared."""
    body = response.get("json", response.get("text", ""))
    if "base64" in response:
        body = base64.b64decode(response["base64"]).decode("latin-1")
    if "note" in response:
        body = {"openapi": "3.0.1"}
    return Answer(response["status"], response["headers"], response["has_request_id"], body)
