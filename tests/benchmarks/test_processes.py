"""Starting servers, waiting for them, ending them with all their children."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import harness
import psutil
import pytest
from harness.errors import Failed
from harness.processes import Probe, ask, free_ports, serving, until_answered

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = str(child.pid).encode() if body == b"child" else b"echo:" + body
        self.send_response(404 if self.path == "/nothing" else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_ended_with_its_children(tmp_path: Path):
    (port,) = free_ports(1)
    with serving([sys.executable, "-c", SERVER, str(port)], tmp_path, port) as endpoint:
        assert until_answered(endpoint, Probe("/", b"hello", b"echo:hello")) > 0
        child = int(ask(endpoint.url, Probe("/", b"child", b""))[1])
        assert psutil.pid_exists(child)
        assert ask(endpoint.url, Probe("/nothing", b"x", b"")) == (404, b"echo:x")
    assert endpoint.process.returncode is not None
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert ask(endpoint.url, Probe("/", b"hello", b"")) == (0, b"")


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path):
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        serving(command, tmp_path, port) as endpoint,
        pytest.raises(Failed, match="ended with 1: no such model"),
    ):
        until_answered(endpoint, Probe("/", b"", b""))


def test_free_ports_are_all_different():
    assert len(set(free_ports(5))) == 5


def test_sigterm_to_a_benchmark_ends_its_server(tmp_path: Path):
    code = (
        "import pathlib, sys, time\n"
        "from harness.processes import serving\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "with serving(sleep, pathlib.Path('.'), 1) as endpoint:\n"
        "    print(endpoint.process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    scripts = str(Path(harness.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": scripts},
        stdout=subprocess.PIPE,
    ) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not server.is_running()
