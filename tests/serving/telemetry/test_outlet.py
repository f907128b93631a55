"""A log whose reader takes a break: real pipes, and a process that has to end all the same."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from torchere.serving.telemetry.outlet import Outlet, may_stand_still

LONG_S = 20.0


class Pipe:
    """A pipe that holds little, and an outlet into it."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.read_end, self.write_end = os.pipe()
        self.failures = threading.Semaphore(0)
        self.outlet = Outlet(
            self.write_end,
            "ascii",
            say_lost=lambda lines: f"lost {lines}\n",
            failed=self.failures.release,
            limit=limit,
        )

    def read(self, until: str) -> str:
        """All that comes up to this text."""
        seen = ""
        while until not in seen:
            seen += os.read(self.read_end, 1 << 16).decode()
        return seen


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.outlet.close()
    os.close(pipe.read_end)


def test_texts_come_out_in_their_order(pipe: Pipe) -> None:
    for number in range(3000):
        pipe.outlet.put(f"{number}\n")
    pipe.outlet.put("end\n")
    assert pipe.read("end\n").split() == [*map(str, range(3000)), "end"]
    assert pipe.outlet.flush(LONG_S)


def test_what_the_encoding_lacks_is_written_as_an_escape(pipe: Pipe) -> None:
    pipe.outlet.put("café\n")
    assert pipe.read("\n") == "caf\\xe9\n"


def test_who_logs_does_not_wait_for_a_reader_and_what_does_not_fit_is_counted_and_said(pipe: Pipe) -> None:
    for _ in range(3000):
        pipe.outlet.put("x" * 999 + "\n")  # three times what may wait
    assert not pipe.outlet.flush(0.01)
    lost = pipe.outlet.dropped
    assert 1000 < lost < 3000
    seen = pipe.read(f"lost {lost}\n")
    assert seen.count("x\n") == 3000 - lost
    pipe.outlet.put("after\n")
    assert pipe.read("after\n") == "after\n"
    assert pipe.outlet.flush(LONG_S)


def test_a_reader_that_went_away_is_no_end(pipe: Pipe) -> None:
    os.close(pipe.read_end)
    for _ in range(2):
        pipe.outlet.put("x\n")
        assert pipe.failures.acquire(timeout=LONG_S)
    assert pipe.outlet.flush(LONG_S)
    pipe.read_end = os.open(os.devnull, os.O_RDONLY)  # for the end of the test


def test_a_descriptor_that_does_not_wait_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_end, False)
    for _ in range(300):
        pipe.outlet.put("x" * 999 + "\n")
    pipe.outlet.put("end\n")
    assert pipe.read("end\n").count("x\n") == 300


def test_its_thread_ends_and_comes_back(pipe: Pipe) -> None:
    pipe.outlet.put("first\n")
    assert pipe.outlet.flush(LONG_S)
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "log"]
    pipe.outlet.close()
    writer.join(LONG_S)
    assert not writer.is_alive()
    pipe.outlet.put("second\n")
    assert pipe.read("second\n") == "first\nsecond\n"


def test_files_are_written_at_once() -> None:
    with tempfile.TemporaryFile("w") as file:
        assert may_stand_still(file) is None


SCRIPT = """
import logging, sys, time
from torchere.serving.telemetry.logging import configure, lost_lines
configure("INFO", False, sys.stdout)
began_s = time.monotonic()
for number in range(2000):
    logging.getLogger("loop").error("%d %s", number, "x" * 1000)
assert time.monotonic() - began_s < 5, "somebody waited"
assert lost_lines() == 0
sys.stderr.write("logged\\n")
sys.stderr.flush()
"""


def run_script() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "logged\n"  # though nobody has read a line
    return process


def test_a_process_whose_log_nobody_reads_goes_on_and_ends() -> None:
    with run_script() as process:
        began_s = time.monotonic()
        try:
            assert process.wait(LONG_S) == 0  # neither hung, nor aborted for a lock that its thread holds
        finally:
            process.send_signal(signal.SIGKILL)
        assert time.monotonic() - began_s < LONG_S


def test_a_process_whose_log_is_read_at_its_end_loses_nothing() -> None:
    with run_script() as process:
        output, errors = process.communicate(timeout=LONG_S)
        assert (process.returncode, errors) == (0, "")
        assert [line.split()[3] for line in output.splitlines()] == [str(number) for number in range(2000)]
