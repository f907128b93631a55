"""`torchserve --start` and `--stop` with a supervisor in between: nobody sees the difference."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

TORCHSERVE = str(Path(sys.executable).with_name("torchserve"))
PROPERTIES = """
inference_address=http://127.0.0.1:0
management_address=http://127.0.0.1:0
metrics_address=http://127.0.0.1:0
grpc_inference_port=0
grpc_management_port=0
supervise=true
"""


@pytest.fixture
def torchserve(tmp_path: Path, store: Path) -> Any:
    """Runs the command in a folder of its own; a server it leaves behind writes to `server.log`."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "config.properties").write_text(PROPERTIES)
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}

    def run(*options: str) -> int:
        with (tmp_path / "server.log").open("a") as log:
            command = [TORCHSERVE, *options]
            return subprocess.run(
                command, cwd=tmp_path, env=environ, stdout=log, stderr=log, timeout=120, check=False
            ).returncode

    return run


def test_the_pid_file_names_the_supervisor_and_stop_ends_both(
    torchserve: Any, tmp_path: Path, store: Path
) -> None:
    start = ("--start", "--ncs", "--disable-token-auth", "--model-store", str(store))
    assert torchserve(*start) == 0
    log, pid_file = tmp_path / "server.log", tmp_path / "tmp" / ".model_server.pid"
    supervisor = psutil.Process(int(pid_file.read_text()))
    deadline_s = time.monotonic() + 120
    while "Model server started." not in log.read_text():
        assert supervisor.is_running(), log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
    (server,) = supervisor.children()
    # SageMaker's toolkit looks for the word, and refuses two processes with it.
    assert "org.pytorch.serve.ModelServer" in supervisor.cmdline()
    assert "org.pytorch.serve.ModelServer" not in server.cmdline()
    assert torchserve(*start) == 1
    assert "already running" in log.read_text()
    assert torchserve("--stop", "--foreground") == 0
    assert "TorchServe has stopped." in log.read_text()
    assert not pid_file.exists()
    assert not server.is_running()
    assert "0 predictions accepted, 0 answered" in log.read_text()
