"""Servers replaced one after the other behind real proxies: no request is lost.

The benchmark is the test, with fewer requests; `python benchmarks/rolling_restart.py` is the long run.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "rolling_restart.py"
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


@pytest.fixture(autouse=True)
def _proxies() -> None:
    for name in ("nginx", "haproxy"):
        if shutil.which(name, path=SBIN) is None:
            pytest.skip(f"{name} is not installed: apt-get install nginx-light haproxy")


def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    numbers = ("--rest", "500", "--grpc", "200", "--restarts", "2")
    done = subprocess.run(
        [sys.executable, SCRIPT, *numbers, "--json", result],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    ways = json.loads(result.read_text())
    assert len(ways) == 4
    assert all(each["answered"] >= each["wanted"] and each["failed"] == 0 for each in ways)
