"""`torchere bench` against tiny real servers on the loopback interface."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from torchere.serving.commands import load_client
from torchere.serving.commands.cli import main
from torchere.serving.commands.load_client import Target, request_bytes


class Model(BaseHTTPRequestHandler):
    """Answers `/predictions/echo` and notes what it got; all else is a 404 that closes the connection.

    Every third request with the note `moody` fails.
    """

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, bytes, str | None]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.path, body, self.headers["X-Note"]))
        known = self.path == "/predictions/echo"
        if self.headers["X-Note"] == "moody" and len(self.seen) % 3 == 0:
            known, body = False, b'{"code": 404, "message": "in no mood"}'
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        if not known:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


class Garbage(Model):
    """Answers with something that is not HTTP."""

    def do_POST(self) -> None:
        self.wfile.write(b"no such protocol\r\n\r\n")
        self.close_connection = True


class Keyed(Model):
    """Notes the key and the content type of each request, in the place of its path and its note."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((str(self.headers["Authorization"]), body, self.headers["Content-Type"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def running(kind: type[Model]) -> Iterator[tuple[str, list[tuple[str, bytes, str | None]]]]:
    seen: list[tuple[str, bytes, str | None]] = []
    handler = type("Handler", (kind,), {"seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


def bench(url: str, model: str, *arguments: str) -> int:
    return main(["bench", model, "--address", url, "--seconds", "0.3", "--clients", "2", *arguments])


def test_it_sends_the_body_and_headers_and_prints_rate_and_latencies(capsys, tmp_path: Path):
    (tmp_path / "body").write_bytes(b"\x00payload")
    with running(Model) as (url, seen):
        assert bench(url, "echo", "--file", str(tmp_path / "body"), "--header", "X-Note: a note") == 0
    printed = capsys.readouterr()
    rate, latencies = printed.out.splitlines()
    assert float(rate.split()[0]) > 0
    assert f"({len(seen)} answers in " in rate
    assert latencies.startswith("p50 ")
    assert set(seen) == {("/predictions/echo", b"\x00payload", "a note")}
    # No progress bar where there is no terminal: one line that says what to wait for.
    assert printed.err == f"2 clients for 0.3 s: {url}/predictions/echo\n"


def test_the_key_is_found_as_by_predict_and_stands_on_no_command_line(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHERE_TOKEN", raising=False)
    with running(Keyed) as (url, seen):
        bench(url, "m", "--json", "[1]")
        assert seen[-1] == ("None", b"[1]", "application/json")
        Path("key_file.json").write_text('{"inference": {"key": "of-the-file"}}')
        bench(url, "m", "--text", "hello")
        assert seen[-1] == ("Bearer of-the-file", b"hello", "text/plain; charset=utf-8")
        Path("own").write_text("own")
        bench(url, "m", "--token-file", "own", "--json", "[1]", "--header", "content-type: x/y")
        assert seen[-1] == ("Bearer own", b"[1]", "x/y")
        monkeypatch.setenv("TORCHERE_TOKEN", "of-the-variable")
        bench(url, "m")
        assert seen[-1] == ("Bearer of-the-variable", b"", None)


def test_error_statuses_are_counted_and_the_exit_status_tells(capsys):
    with running(Model) as (url, seen):
        assert bench(url, "nobody/2.0") == 1
    assert f"{len(seen)} x status 404" in capsys.readouterr().out
    assert seen[0][0] == "/predictions/nobody/2.0"


def test_a_request_that_fails_among_others_is_shown_and_the_exit_status_tells(capsys):
    with running(Model) as (url, _seen):
        assert bench(url, "echo", "--header", "X-Note: moody") == 1
    _rate, latencies, failures = capsys.readouterr().out.splitlines()
    assert latencies.startswith("p50 ")
    assert failures.endswith(" x status 404: in no mood")


def test_answers_that_are_not_http_are_lost_connections(capsys):
    with running(Garbage) as (url, _seen):
        assert bench(url, "echo") == 1
    assert "no answer (connection lost): the answer is not HTTP: " in capsys.readouterr().out


def test_what_has_no_answer_long_after_the_end_is_lost(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert bench(f"http://127.0.0.1:{silent.getsockname()[1]}", "echo", "--timeout", "0.1") == 1
    assert "2 x no answer (connection lost): given up" in capsys.readouterr().out


def test_ctrl_c_prints_what_was_measured_until_then():
    with running(Model) as (url, seen):
        arguments = ("bench", "echo", "--address", url, "--seconds", "600")
        command = [sys.executable, "-m", "torchere.serving", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not seen:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate(timeout=60)
    assert (process.returncode, error.count("\n")) == (130, 1)  # the line of the start, and no traceback
    assert "8 clients)\n" in printed


def test_a_host_that_is_none_is_a_lost_connection(capsys):
    assert bench("http://a..b", "echo") == 1
    assert "x no answer (connection lost)" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_lost_connections(capsys):
    with running(Model) as (url, _seen):
        pass
    assert bench(url, "echo") == 1
    assert "x no answer (connection lost): Connection refused\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--address", "localhost:8080"], "expected http://host:port"),
        (["--address", "http://[::1"], "the address is 'http://[::1/predictions/echo'; expected"),
        (["--address", "http://h:99999"], "the address is 'http://h:99999/predictions/echo'; expected"),
        (["--header", "no colon"], "expected 'Name: value'"),
        (["--file", "/no/such/file"], "torchere bench: /no/such/file: No such file or directory\n"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_words(capsys, arguments: list[str], said: str):
    assert main(["bench", "echo", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--clients", "0"], ["--seconds", "-1"], ["--seconds", "soon"]])
def test_numbers_out_of_range_are_wrong_usage(capsys, arguments: list[str]):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "echo", *arguments])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_header_with_a_line_break_is_refused():
    target = Target.parse("http://[::1]:80/predictions/echo")
    assert b"\r\nHost: [::1]:80\r\n" in request_bytes(target, b"", {})
    with pytest.raises(ValueError, match="line break"):
        request_bytes(target, b"", {"X-Note": "a\r\nForged: b"})


def test_a_lost_connection_is_not_used_again_if_its_transport_does_not_tell() -> None:
    """As TLS of Python 3.10 does not."""
    connection = load_client._Connection()
    connection.connection_made(Mock(is_closing=lambda: False))
    assert connection.usable
    connection.connection_lost(None)
    assert not connection.usable
