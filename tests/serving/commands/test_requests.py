"""The request that the options of `torchere predict` and `torchere bench` give, and advice on its error."""

from __future__ import annotations

import json
import socket
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from torchere.client.key_file import FoundKey
from torchere.serving.commands.cli import main
from torchere.serving.commands.requests import advice, body_of, parsed


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my request.json").write_text("[1]")
    return "my request.json"


@pytest.mark.parametrize("prefix", ["", "@"])
def test_a_file_in_the_place_of_json_is_told_its_own_option(file: str, prefix: str) -> None:
    with pytest.raises(ValueError) as refusal:
        body_of(Namespace(json=prefix + file))
    assert str(refusal.value) == (
        f"--json {prefix}{file}: found the name of a file, expected JSON; did you mean "
        "--file 'my request.json'?"
    )
    with pytest.raises(ValueError, match=r"""did you mean --json "\$\(cat 'my request\.json'\)"\?$"""):
        parsed(prefix + file, arrays=True)


@pytest.mark.parametrize("text", ["other.json", "@", "", ".", "{" * 5000, "\0"])
def test_other_text_in_the_place_of_json_is_said_to_be_none(file: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"^--json is no JSON: "):
        parsed(text)
    assert parsed("[1]") == [1]


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and a server at every address that answers with the key of the request."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHERE_TOKEN", "TORCHERE_MANAGEMENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def answer(_transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=request.headers.get("authorization", "none"))

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)


@pytest.mark.parametrize(
    "more", [(), ("--token-file", "key_file.json", "--address", "http://example.invalid")]
)
@pytest.mark.parametrize("text", ['{"inference": {"key": "i1"}}', "i1"])
def test_a_key_file_with_the_inference_key_alone_will_do(
    echo: None, more: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("key_file.json").write_text(text)
    assert main(["predict", "net", "--json", "1", *more]) == 0
    assert capsys.readouterr().out == "Bearer i1\n"


def test_variables_of_a_proxy_that_httpx_refuses_are_named(
    echo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:1")
    assert main(["predict", "net", "--json", "1"]) == 0
    assert main(["predict", "net", "--json", "1", "--address", "http://example.invalid"]) == 2
    assert "torchere predict: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY: found" in capsys.readouterr().err


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
