"""Tells what it was given, and does what the request's query says: statuses, headers, kinds of results."""

import json
import math

from ts.utils.util import PredictionException

VARYING = {"host", "user-agent", "authorization"}


class ProbeHandler:
    def initialize(self, context):
        self.context = context

    def describe_handle(self):
        return [{"probe": True, "nothing": None}]

    def handle(self, data, context):
        if context.get_request_header(0, "describe") == "True":
            return self.describe_handle()
        return [self.answer(row, index, context) for index, row in enumerate(data)]

    def answer(self, row, index, context):
        wish = wish_of(row)
        if "raise" in wish:
            raise_wished(wish)
        if "status" in wish:
            context.set_response_status(code=wish["status"], phrase=wish.get("phrase", ""), idx=index)
        for name, value in wish.get("headers", {}).items():
            context.set_response_header(index, name, value)
        if "type" in wish:
            context.set_response_content_type(index, wish["type"])
        if "result" in wish:
            return RESULTS[wish["result"]]()
        return {
            "values": {key: shown(value) for key, value in row.items()},
            "headers": {
                name: value
                for name, value in context.get_all_request_header(index).items()
                if name.lower() not in VARYING
            },
        }


def wish_of(row):
    value = row.get("body")
    if value is None:
        value = row.get("data")
    if isinstance(value, (bytes, bytearray)):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value.get("wish", {}) if isinstance(value, dict) else {}


def raise_wished(wish):
    kinds = {
        "prediction": lambda: PredictionException(wish["text"], wish["code"]),
        "prediction_plain": lambda: PredictionException(wish["text"]),
        "memory": lambda: MemoryError(wish["text"]),
        "runtime": lambda: RuntimeError(wish["text"]),
        "key": lambda: KeyError(wish["text"]),
        "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, wish["text"]),
    }
    raise kinds[wish["raise"]]()


def shown(value):
    if isinstance(value, (bytes, bytearray)):
        return {"kind": type(value).__name__, "length": len(value), "hex": bytes(value[:64]).hex()}
    return {"kind": type(value).__name__, "repr": repr(value)[:200]}


RESULTS = {
    "text": lambda: "plain",
    "empty_text": lambda: "",
    "unicode_text": lambda: "é漢\U0001f600",
    "bytes": lambda: b"\x00\xff",
    "bytearray": lambda: bytearray(b"array"),
    "empty_bytes": lambda: b"",
    "none": lambda: None,
    "true": lambda: True,
    "integer": lambda: 12345678901234567890,
    "float": lambda: 0.1 + 0.2,
    "tiny": lambda: 1e-300,
    "nan": lambda: math.nan,
    "infinity": lambda: -math.inf,
    "list": lambda: [1, "two", None, 3.5],
    "empty_list": lambda: [],
    "tuple": lambda: (1, 2),
    "dict": lambda: {"b": 1, "a": {"é": [True]}},
    "empty_dict": lambda: {},
    "number_keys": lambda: {1: "one", None: "none"},
    "set": lambda: {1, 2},
    "nested_bytes": lambda: {"a": b"bytes"},
    "object": lambda: object(),
    "large": lambda: "x" * 2_000_000,
}
