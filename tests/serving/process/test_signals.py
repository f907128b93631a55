"""A signal during the imports of a start is neither lost nor deadly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import psutil
import pytest

from torchere.serving.process.signals import SignalsKept

MANIFEST = '{"runtime": "python", "model": {"modelName": "m", "modelVersion": "1.0", "handler": "h.py"}}'
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted:
    """Python drops what is raised while it deletes an object, as in callbacks of the import system."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_where_python_drops_exceptions_is_kept() -> None:
    with SignalsKept() as kept:
        Interrupted()
        assert kept.let_go() == signal.SIGINT


def test_afterwards_the_handlers_are_those_from_before() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with SignalsKept() as kept:
        assert [signal.getsignal(number) for number in ENDING] != before
        assert kept.let_go() == 0
        assert [signal.getsignal(number) for number in ENDING] == before
    with SignalsKept():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in ENDING] == before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalsKept() as kept:
            signal.raise_signal(signal.SIGHUP)
            assert kept.let_go() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_nothing_is_kept() -> None:
    found: list[int] = []

    def enter() -> None:
        with SignalsKept() as kept:
            found.append(kept.let_go())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [0]


def test_the_second_signal_ends_at_once() -> None:
    code = """
import signal
from torchere.serving.process.signals import SignalsKept
with SignalsKept():
    signal.raise_signal(signal.SIGINT)
    print("first", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("second", flush=True)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (-signal.SIGTERM, "first\n")


@pytest.mark.parametrize("number", ENDING)
def test_a_server_that_is_told_while_it_imports_ends_in_order(tmp_path: Path, number: int) -> None:
    for name in ("store", "temp"):
        (tmp_path / name).mkdir()
    with zipfile.ZipFile(tmp_path / "store" / "m.mar", "w") as archive:
        archive.writestr("h.py", "")
        archive.writestr("MAR-INF/MANIFEST.json", MANIFEST)
    command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--log-format", "json"]
    with subprocess.Popen(
        [*command, "--model-store", "store", "--models", "all"],
        cwd=tmp_path,
        env={**os.environ, "TEMP": str(tmp_path / "temp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "Config file" in process.stdout.readline()
        while not psutil.Process(process.pid).children():  # the fork server; then the imports begin
            assert process.poll() is None
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "stopped before the start was over" in rest
    assert list((tmp_path / "temp").iterdir()) == []
