"""What a handler may answer or raise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from conformity.rest import Case

RESULTS = (
    "text",
    "empty_text",
    "unicode_text",
    "bytes",
    "bytearray",
    "empty_bytes",
    "none",
    "true",
    "integer",
    "float",
    "tiny",
    "nan",
    "infinity",
    "list",
    "empty_list",
    "tuple",
    "dict",
    "empty_dict",
    "number_keys",
    "set",
    "nested_bytes",
    "object",
    "large",
    "text",
)
STATUSES = (200, 201, 202, 206, 301, 304, 400, 404, 413, 418, 429, 500, 503, 507, 599)
CODES = (200, 204, 301, 400, 401, 404, 413, 418, 429, 499, 500, 503, 507, 513)
HEADERS: tuple[dict[str, str], ...] = (
    {"X-Own": "value"},
    {"x-answer": "42", "X-Answer": "43"},
    {"content-type": "application/vnd.own+json"},
    {"Content-Type": "application/vnd.own+json"},
    {"x-request-id": "mine"},
    {"Cache-Control": "max-age=60"},
    {"content-length": "3"},
    {"Connection": "close"},
    {"X-Latin": "caf\u00e9"},
    {"X-Own": "\u6f22, 5 \u20ac"},
)
RICH = (
    "text",
    "tensor",
    "wrong_length",
    "not_list",
    "none",
    "raise",
    "memory",
    "runtime_oom",
    "prediction_exception",
    "header",
    "status",
    "stream",
    "metric",
    "properties",
)


def handler_cases() -> Iterator[Case]:
    """Kinds of results, statuses, headers and failures, over the plain route."""
    for result in RESULTS:
        yield _wish(f"result {result}", {"result": result})
    for status in STATUSES:
        yield _wish(f"status {status}", {"status": status, "result": "text"})
    yield _wish("status with a phrase", {"status": 299, "phrase": "Own Words", "result": "text"})
    for number, headers in enumerate(HEADERS):
        yield _wish(f"headers {number}", {"headers": headers, "result": "text"})
    yield _wish("content type", {"type": "text/x-own; charset=utf-8", "result": "text"})
    yield _wish(
        "content type over a header",
        {"type": "text/a", "headers": {"content-type": "text/b"}, "result": "text"},
    )
    for code in CODES:
        yield _wish(f"raises {code}", {"raise": "prediction", "text": "own words", "code": code})
    yield _wish("raises without a code", {"raise": "prediction_plain", "text": "own words"})
    yield _wish("raises an empty text", {"raise": "prediction", "text": "", "code": 404})
    for kind, text in (
        ("memory", "m"),
        ("runtime", "CUDA out of memory"),
        ("runtime", "other"),
        ("key", "k"),
    ):
        yield _wish(f"raises {kind} {text}", {"raise": kind, "text": text})
    yield _wish("raises a Unicode error", {"raise": "unicode", "text": "u"})
    for mode in RICH:
        body = json.dumps({"mode": mode}).encode()
        json_type = {"Content-Type": "application/json"}
        yield Case(f"rich: {mode}", "POST", "/predictions/rich", headers=json_type, body=body)
        if mode in ("header", "status", "stream", "raise"):
            yield Case(f"rich: {mode}, explained", "POST", "/explanations/rich", headers=json_type, body=body)


def _wish(title: str, wish: dict[str, Any]) -> Case:
    body = json.dumps({"wish": wish}).encode()
    json_type = {"Content-Type": "application/json"}
    return Case(f"handler: {title}", "POST", "/predictions/probe", headers=json_type, body=body)
