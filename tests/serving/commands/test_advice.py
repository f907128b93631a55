"""What the command line adds to the error texts of a server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from torchere.client.key_file import FoundKey
from torchere.serving.commands.advice import advice

NO_WORKER = 'Model "cat" has no worker to serve inference request. Please use scale workers API'


@contextmanager
def server(answers: dict[str, tuple[int, object]], asked: list[str] | None = None) -> Iterator[str]:
    paths = [] if asked is None else asked

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            status, value = answers.get(self.path, (404, {}))
            if self.path.startswith("/v1") and self.headers["Authorization"] != "Bearer k":
                status, value = 400, {"message": "Token Authorization failed"}
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 302:
                self.send_header("Location", str(value))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (["cat", "net"], "the server has cat, net; did you mean cat?"),
        (["\x1b[31mnet"], "the server has \\x1b[31mnet"),
        ([f"m{number}" for number in range(22)], "the server has m0, "),
        ([], "the server has no models"),
        ("cat", ""),
    ],
)
def test_of_an_unknown_model_the_others_are_named(models: object, said: str) -> None:
    with server({"/v1/models": (200, {"models": models})}) as url:
        told = advice("Model not found: cta", url, "cta/1.0", FoundKey("k", "a file"))
        assert told.startswith(said)
        assert bool(told) is bool(said)
        assert ("and 2 others" in told) is (len(str(models)) > 100)
        assert advice("Model not found: cta", url, "cta", None) == ""  # no key, no names
    assert advice("Model not found: cta", url, "cta", FoundKey("k", "a file")) == ""


def test_a_server_of_this_machine_is_asked_without_the_proxy(proxy: socket.socket) -> None:
    with server({"/v1/models": (200, {"models": ["cat"]})}) as url:
        assert advice("Model not found: cta", url, "cta", FoundKey("k", "a file")).endswith(
            "did you mean cat?"
        )
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_no_other_server_gets_the_key_by_a_redirect() -> None:
    asked: list[str] = []
    with server({}, asked) as other, server({"/v1/models": (302, f"{other}/v1/elsewhere")}) as url:
        assert advice("Model not found: cta", url, "cta", FoundKey("k", "a file")) == ""
    assert asked == []


def test_a_model_that_failed_is_told_from_one_without_workers() -> None:
    reasons = {"reasons": ["cat:1.0 is failed"]}, {"reasons": ["cat:1.0 is new"]}
    for said, is_failed in zip(reasons, (True, False), strict=True):
        with server({"/readyz/cat/1.0": (503, said)}) as url:
            told = advice(NO_WORKER, url, "cat/1.0", None)
            assert told.startswith("cat/1.0 failed: the server's log") is is_failed
    assert advice("Prediction failed", "http://127.0.0.1:9", "cat", None) == ""


@pytest.mark.parametrize(
    ("reason", "is_told"),
    [
        ("unable to get local issuer certificate (_ssl.c:1000)", True),
        ("self-signed certificate in certificate chain (_ssl.c:1000)", True),
        ("Hostname mismatch, certificate is not valid for 'here'. (_ssl.c:1000)", False),
        ("certificate has expired (_ssl.c:1000)", False),
    ],
)
def test_a_certificate_of_an_unknown_authority_is_told_how_to_trust_it(reason: str, is_told: bool) -> None:
    said = f"no connection to https://here:8443: [SSL: CERTIFICATE_VERIFY_FAILED] verify failed: {reason}"
    assert ("set SSL_CERT_FILE to the file" in advice(said, None, "cat", None)) is is_told


@pytest.mark.parametrize(
    ("message", "address", "is_told"),
    [
        ("the connection to {}/predictions/cat broke: Server disconnected without sending a resp", "", True),
        ("no connection to {}: failed to connect to all addresses; ipv4:127.0.0.1: Socket closed", "", True),
        ("the server closed the connection", "{}", True),
        ("no connection to {}: [Errno 111] Connection refused", "{}", False),
        ("503 ModelFailed: Socket closed", "{}", False),
        ("500 InternalServerException: connection to redis:6379 broke: Socket closed", "{}", False),
    ],
)
def test_a_port_that_closes_a_connection_without_tls_may_expect_it(
    message: str, address: str, is_told: bool
) -> None:
    plain, tls = "http://127.0.0.1:9", "https://127.0.0.1:9"
    told = advice(message.format(plain), address.format(plain) or None, "cat", None)
    assert ("the port may expect TLS" in told) is is_told
    assert advice(message.format(tls), address.format(tls) or None, "cat", None) == ""
