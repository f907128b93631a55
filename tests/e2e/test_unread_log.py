"""A server whose standard output is a pipe that nobody empties."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

PROPERTIES = """
inference_address=http://127.0.0.1:0
management_address=http://127.0.0.1:0
enable_metrics_api=false
grpc_inference_port=0
grpc_management_port=0
default_workers_per_model=1
"""
LOUD = """
def handle(data, context):
    if data is None:
        return None
    print("x" * 5000, flush=True)
    return ["heard"] * len(data)
"""


@pytest.fixture
def process(store: Path, pack: Any, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    pack("loud", {"h.py": LOUD}, handler="h.py")
    (tmp_path / "config.properties").write_text(PROPERTIES)
    command = [
        *(sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--disable-token-auth"),
        *("--model-store", str(store), "--models", "loud.mar", "--ts-config", "config.properties"),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


def read_to(output: IO[str] | None, text: str) -> str:
    """All lines up to one that has the text."""
    assert output is not None
    seen = ""
    while text not in seen:
        line = output.readline()
        assert line, f"the server ended:\n{seen}"
        seen += line
    return seen


def test_a_log_that_nobody_reads_holds_up_neither_answers_nor_the_end(
    process: subprocess.Popen[str],
) -> None:
    said = read_to(process.stdout, "Model server started.")
    address = next(line for line in said.splitlines() if "Inference API" in line).split("http://")[1]
    address = address.rstrip('"}')
    url = f"http://{address}/predictions/loud"
    for _ in range(200):  # a megabyte of log; a pipe holds 64 KiB
        with urllib.request.urlopen(url, b"x", timeout=30) as answer:
            assert answer.read() == b"heard"
    process.terminate()
    assert process.wait(60) == 0
