"""A stand-in for S3 over HTTP on loopback, which counts what each client reads."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

KEY_ID, SECRET = "the-key-id", "the-secret-key"


@dataclass(frozen=True)
class Asked:
    """A request."""

    client: str  # the id of its access key
    method: str
    target: str  # path and query as sent
    key: str  # "bucket/key"
    first: int | None = None  # the first byte of the range; None: the request has no range
    last: int | None = None

    @property
    def bytes(self) -> int:
        """The length of the range."""
        return 0 if self.first is None or self.last is None else self.last + 1 - self.first


@dataclass
class Buckets:
    """The objects of the stand-in for S3, and the requests that it has had."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)  # by "bucket/key"
    of_client: dict[tuple[str, str], bytes] = field(default_factory=dict)  # what one client gets for a key
    denied: set[str] = field(default_factory=set)  # keys
    unknown_headers: tuple[str, ...] = ()  # that this store does not know
    asked: list[Asked] = field(default_factory=list)
    # Called before an answer; it may change the objects. A number: break off after so many bytes of the body.
    before: Callable[[Asked], int | None] = lambda _: None

    def put(self, folder: Path, prefix: str) -> None:
        """Upload the files of a folder."""
        for file in folder.iterdir():
            self.objects[f"{prefix}/{file.name}"] = file.read_bytes()

    def ranges(self, client: str | None = None) -> list[Asked]:
        """Return the ranges that were read, of one client or of all."""
        return [each for each in self.asked if each.bytes and client in (None, each.client)]

    def read_twice(self, client: str) -> int:
        """Return how many bytes a client has read more than once."""
        total = 0
        ends: dict[str, int] = {}
        for each in sorted(self.ranges(client), key=lambda each: (each.key, each.first)):
            assert each.first is not None
            assert each.last is not None
            total += max(0, min(ends.get(each.key, 0), each.last + 1) - each.first)
            ends[each.key] = max(ends.get(each.key, 0), each.last + 1)
        return total


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    buckets: Buckets

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Refuse credentials, as the service that hands them out may."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._refuse(403, "AccessDenied")

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        for name in self.buckets.unknown_headers:
            del self.headers[name]
        range_of = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        key = unquote(parts.path).lstrip("/")
        signed = re.search(r"Credential=([^/&%]+)", self.headers.get("Authorization", "") or parts.query)
        first, last = map(int, range_of.groups()) if range_of else (None, None)
        client = signed.group(1) if signed else ""
        asked = Asked(client, self.command, self.path, key, first, last)
        self.buckets.asked.append(asked)
        breaks_off = self.buckets.before(asked)
        content = self.buckets.of_client.get((client, key), self.buckets.objects.get(key))
        if not client or key in self.buckets.denied:
            return self._refuse(403, "AccessDenied")
        if content is None:
            return self._refuse(404, "NoSuchKey")
        etag = _etag(content)
        if self.headers.get("If-Match", etag) != etag:
            return self._refuse(412, "PreconditionFailed")
        if first is None or last is None:
            return self._send(200, etag, content, breaks_off)
        if first >= len(content):
            return self._refuse(416, "InvalidRange")
        return self._send(206, etag, content[first : last + 1], breaks_off)

    def _send(self, status: int, etag: str, content: bytes, breaks_off: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", etag)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:breaks_off])
            self.close_connection = breaks_off is not None

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>said the stand-in</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@functools.cache  # bytes keep their hash
def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that have gone."""


@contextmanager
def serve_buckets(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Buckets]:
    """Serve buckets that botocore takes for S3, by the variables of AWS's tools.

    `folder` has no files of these tools.
    """
    buckets = Buckets()
    server = _Server(("127.0.0.1", 0), type("Here", (_Handler,), {"buckets": buckets}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    buckets.url = f"http://127.0.0.1:{server.server_port}"
    variables = {
        "AWS_ENDPOINT_URL": buckets.url,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield buckets
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
