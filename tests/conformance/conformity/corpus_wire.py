"""What lies between a client and the handler: codings, chunks, sizes and odd request heads."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

from conformity.rest import BOUNDARY, Case

PREDICT = "/predictions/probe"
CHUNKED: dict[str, tuple[str, tuple[bytes, ...]]] = {
    "JSON": ("application/json", (b'{"a"', b": 1}")),
    "a form": ("application/x-www-form-urlencoded", (b"a=1", b"&b=2")),
    "parts": (
        f"multipart/form-data; boundary={BOUNDARY}",
        (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="data"; fil'.encode(),
            f'ename="a"\r\nContent-Type: text/plain\r\n\r\n1\r\n--{BOUNDARY}--\r\n'.encode(),
        ),
    ),
    "octets": ("application/octet-stream", (b"\x00\x01", b"\x02")),
    "more than may be": ("application/octet-stream", (b"x" * 700_000, b"x" * 700_000)),
}
HEADERS = {
    "gzip": {"Content-Encoding": "gzip", "Content-Type": "application/json"},
    "gzip asked for": {"Accept-Encoding": "gzip, deflate"},
    "expect": {"Expect": "100-continue"},
    "expect something else": {"Expect": "something"},
    "if none match": {"If-None-Match": "*"},
    "range": {"Range": "bytes=0-3"},
    "origin": {"Origin": "https://example.org"},
}
# Paths that HTTP libraries read in more than one way.
ODD_PATHS = ("/predictions/%zz", "/ping?a=%zz", "http://example.org/ping", "/ping#part", "/ping;a=b", "*")


def wire_cases() -> Iterator[Case]:
    """Bodies in chunks, packed and too large ones, and heads that ask for something."""
    for title, (content_type, pieces) in CHUNKED.items():
        headers = {"Content-Type": content_type}
        yield Case(f"chunks: {title}", "POST", PREDICT, headers=headers, body=pieces)
    packed = gzip.compress(b'{"a": 1}', mtime=0)
    for title, headers in HEADERS.items():
        body = packed if title == "gzip" else b"x"
        yield Case(f"asks for: {title}", "POST", PREDICT, headers=headers, body=body)
    yield Case("body: too large", "POST", PREDICT, body=b"x" * 2_000_000)
    yield Case("body: too large for nothing", "POST", "/predictions/none", body=b"x" * 2_000_000)
    for path in ODD_PATHS:
        yield Case(f"odd head: GET {path}", "GET", path)
    yield Case("odd head: BREW", "BREW", "/ping")
    yield Case("odd head: a long line", "GET", f"/ping?{'a' * 5000}")
    yield Case("odd head: long headers", "GET", "/ping", headers={"X-Long": "a" * 9000})
    yield Case("odd head: not so long", "GET", f"/ping?{'a' * 4000}", headers={"X-Long": "a" * 7000})
    yield Case("metrics: all", "GET", "/metrics", "metrics")
