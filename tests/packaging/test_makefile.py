"""What somebody sees whose first command is `make demo`."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_python_that_is_too_old_is_named_and_leaves_no_environment(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    pretend = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
    old.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{pretend}' \"$2\"\n")
    old.chmod(0o755)
    made = subprocess.run(
        ["make", "install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 2
    assert f"{old} is Python 3.9, expected 3.10 or newer" in made.stderr
    assert not (tmp_path / "venv").exists()


def test_the_tests_end_under_nohup_where_signals_are_ignored() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell without job control

    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *("-k", "told_while_it_imports and not 15"),  # servers that get the two signals
            "tests/serving/process/test_signals.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=ignore,
        timeout=500,
    )
    assert found.returncode == 0, found.stdout


def test_a_test_that_fails_does_not_wait_for_the_process_that_it_started() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with pytest.raises(ZeroDivisionError), subprocess.Popen(command) as process:
        raise ZeroDivisionError  # as the time limit of a test does
    assert process.returncode == -signal.SIGKILL


def test_a_tool_that_cannot_be_fetched_costs_none_of_the_others_and_all_such_are_named(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "deploy" / "tools.sh"
    copy.parent.mkdir()
    shutil.copy(ROOT / "deploy" / "tools.sh", copy)
    commands = tmp_path / "commands"
    commands.mkdir()
    fetched = tmp_path / "fetched"
    for name, script in (
        ("npm", "exit 1"),  # of helm
        ("awk", "exit 1"),  # of prometheus, which looks for a mirror
        ("python3", f'case "$*" in *programs.py*) sleep 0.5; touch {fetched};; *) exit 3;; esac'),
    ):
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    done = subprocess.run(
        [str(copy), "helm", "prometheus", "python", "programs"],
        env={"PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("not fetched: helm prometheus python (")
    assert fetched.exists()
