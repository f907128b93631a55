"""TorchServe's console lines, for scripts that read its metrics there."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import servers

HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Echo(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.initialized = True
    def preprocess(self, data):
        return [bytes(row["body"]) for row in data]
    def inference(self, data):
        return data
    def postprocess(self, data):
        return data
"""


def scraped(line: str) -> float:
    """The value of a metric as TorchServe's benchmark script finds it in a line of the console."""
    return float(line.split("|", 1)[0].split(":")[3])


def test_the_metrics_are_in_the_console_as_torchserves_benchmark_reads_them(
    start_server: Callable[..., Any], pack: Callable[..., str], store: Path
) -> None:
    pack("echo", {"h.py": HANDLER}, handler="h.py")
    server = start_server(
        *("--disable-token-auth", "--models", "echo.mar", "--log-format", "torchserve"),
        properties="metrics_mode=log\n",
    )
    server.follow("echo:1.0 is ready")
    for _ in range(3):
        assert server.call("POST", "/predictions/echo", b"x").body == b"x"
    assert server.stop() == 0
    lines = server.log().splitlines()
    for label in (
        "Torchserve version: 0.12.0",
        f"Model Store: {store}",
        "Initial Models: echo.mar",
        "Metrics mode: LOG",
        "Model API enabled: false",
    ):
        assert sum(line.endswith(f" - {label}") for line in lines) == 1, label
    for metric in ("PredictionTime", "HandlerTime", "QueueTime", "WorkerThreadTime", "CPUUtilization"):
        values = [scraped(line) for line in lines if metric in line]
        assert len(values) >= (1 if metric == "CPUUtilization" else 3), metric
        assert all(value >= 0 for value in values)


def test_on_a_terminal_the_start_ends_with_a_summary_whose_lines_can_be_pasted(
    store: Path, tmp_path: Path, pack: Callable[..., str]
) -> None:
    pack(
        "echo",
        {
            "h.py": "def handle(data, context):\n    return data and [data[0]['body']]\n",
            "c.yaml": "exampleRequest: [1, 2, 3]\n",
        },
        handler="h.py",
        configFile="c.yaml",
    )
    pack("bad", {"h.py": "def handle(data, context)\n    return data\n"}, handler="h.py")
    (tmp_path / "config.properties").write_text(servers.PROPERTIES + "default_workers_per_model=2\n")
    command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--model-store", str(store)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*command, "--models", "echo.mar", "bad.mar"],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        seen = ""
        while "Ctrl+C stops the server" not in seen:
            seen += os.read(ours, 65536).decode()
        lines = [line.rstrip() for line in seen.splitlines()]
        (line,) = [line for line in lines if "torchere predict echo" in line]

        def run(command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
            )

        pasted = run(line)
        unknown, failed, in_v2 = (
            run(line.replace("predict echo --json '[1, 2, 3]'", f"predict {words}"))
            for words in (
                "ecko --text x",
                "bad --text x",
                "bad --v2 --json '{\"x\": [1]}'",
            )
        )
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # of a terminal that nothing writes to any more
            while chunk := os.read(ours, 65536):
                seen += chunk.decode()
        os.close(ours)
    assert (pasted.returncode, pasted.stdout.split()) == (0, ["[", "1,", "2,", "3", "]"]), pasted.stderr
    assert unknown.stderr.splitlines()[-1] == "torchere predict: the server has bad, echo; did you mean echo?"
    assert 'Model "bad" has no worker' in failed.stderr  # TorchServe's text
    assert "torchere predict: bad failed: the server's log and its describe say why" in failed.stderr
    assert "Model bad version 1.0 has failed, and no worker serves it" in in_v2.stderr
    assert seen.count("h.py is not valid Python: expected ':' in line 1") == 2  # when it failed, and here
    assert "failed  bad 1.0" in seen
    assert "{" not in seen.split("Ctrl+C")[0]  # no JSON
    assert process.returncode == 0
