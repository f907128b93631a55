"""A log whose reader takes a break: real pipes, and a process that has to end all the same."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchere.serving.logs import output as outlet
from torchere.serving.logs.output import Outlet, may_stand_still

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


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_at_the_end_of_the_process_a_slow_reader_gets_all_without_a_thread(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for, has_room = threading.Event(), outlet.has_room

    def tell(descriptor: int, timeout_ms: int | None) -> bool:
        if timeout_ms:
            waited_for.set()
        return has_room(descriptor, timeout_ms)

    def read() -> str:
        waited_for.wait(LONG_S)  # until then the pipe is full
        with open(pipe.read_end, closefd=False) as reading:
            return reading.read()

    with ThreadPoolExecutor(1) as reader:
        seen = reader.submit(read)
        monkeypatch.setattr(outlet, "has_room", tell)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        pipe.outlet.put(more_than_it_holds(1))
        pipe.outlet.put("end\n")
        os.close(pipe.write_end)
        assert seen.result() == more_than_it_holds(1) + "end\n"
    assert pipe.outlet.dropped == 0


def test_at_the_end_of_the_process_a_reader_that_stands_is_waited_for_once(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(outlet, "LAST_WAIT_MS", 10)
    pipe.outlet.put("x" * 200_000, lines=2)
    monkeypatch.setattr(outlet, "LAST_WAIT_MS", None)  # it would wait for ever
    pipe.outlet.put("y" * 200_000, lines=3)
    assert pipe.outlet.dropped == 5


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
    assert pipe.outlet.dropped == 2
    pipe.read_end = os.open(os.devnull, os.O_RDONLY)  # for the end of the test


def test_lines_that_wait_for_a_reader_that_goes_away_are_counted_and_reported_by_no_later_line() -> None:
    pipe = Pipe()
    pipe.outlet.put(more_than_it_holds(1))  # the rest of it waits
    pipe.outlet.put("x\n" * 3, lines=3)
    os.close(pipe.read_end)
    assert pipe.failures.acquire(timeout=LONG_S)
    assert pipe.outlet.flush(LONG_S)
    pipe.outlet.close()
    assert pipe.outlet.dropped == 4
    assert pipe.outlet._written([]) == 0


def test_a_descriptor_that_does_not_wait_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_end, False)
    for _ in range(300):
        pipe.outlet.put("x" * 999 + "\n")
    pipe.outlet.put("end\n")
    assert pipe.read("end\n").count("x\n") == 300


def more_than_it_holds(number: int) -> str:
    return f"{number}" * 100_000 + "\n"


def test_its_thread_ends_and_comes_back(pipe: Pipe) -> None:
    before = set(threading.enumerate())
    pipe.outlet.put(more_than_it_holds(1))
    (writer,) = set(threading.enumerate()) - before
    pipe.read("\n")
    pipe.outlet.close()
    writer.join(LONG_S)
    assert not writer.is_alive()
    pipe.outlet.put(more_than_it_holds(2))
    pipe.outlet.put("end\n")
    assert pipe.read("end\n") == more_than_it_holds(2) + "end\n"


def test_what_the_reader_has_room_for_is_written_before_put_returns_and_by_no_thread(pipe: Pipe) -> None:
    before = set(threading.enumerate())
    pipe.outlet.put("last words\n")
    assert os.read(pipe.read_end, 100) == b"last words\n"
    assert set(threading.enumerate()) <= before


def test_an_error_of_any_kind_in_the_thread_that_writes_holds_nothing_up(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_end, False)
    pipe.outlet.put(more_than_it_holds(1))

    def fail(*_: object) -> None:
        raise KeyError("anything")

    pipe.outlet._failed = fail  # nor may what it is told to
    pipe.outlet._write = fail  # type: ignore[method-assign, assignment]
    pipe.read("1" * 1000)
    pipe.outlet.put(more_than_it_holds(2))
    assert pipe.outlet.flush(LONG_S)


def test_a_terminal_has_a_record_before_what_is_printed_after_it() -> None:
    reader, terminal = os.openpty()
    outlet = Outlet(terminal, "ascii", say_lost=str, failed=lambda: None)
    seen = b""
    for number in range(50):
        outlet.put(f"logged {number}\n")
        os.write(terminal, b"printed %d\n" % number)
        seen += os.read(reader, 4096)
    while b"printed 49\r\n" not in seen:
        seen += os.read(reader, 4096)
    outlet.close()
    expected = [f"{how} {number}" for number in range(50) for how in ("logged", "printed")]
    assert seen.decode().split("\r\n") == [*expected, ""]
    os.close(terminal)
    os.close(reader)


def test_a_terminal_that_nobody_reads_holds_up_nobody_for_long() -> None:
    reader, terminal = os.openpty()
    outlet = Outlet(terminal, "ascii", say_lost=str, failed=lambda: None)
    began_s = time.monotonic()
    for _ in range(3000):
        outlet.put("x" * 99 + "\n")
    assert time.monotonic() - began_s < 5
    assert not outlet.flush(0)
    os.close(reader)  # who writes gets an error then
    assert outlet.flush(LONG_S)
    outlet.close()
    os.close(terminal)


def test_files_are_written_at_once() -> None:
    with tempfile.TemporaryFile("w") as file:
        assert may_stand_still(file) is None


SCRIPT = """
import logging, sys, time
from torchere.serving.logs.lines import configure, lost_lines
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


def output_of(script: str) -> tuple[int, list[str]]:
    """How a process ends, and what it wrote to a pipe for which Python has a buffer."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(
        command, check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return ended.returncode, [line.split(" ", 4)[-1].strip() for line in ended.stdout.decode().splitlines()]


BEGIN = """
import logging, os, signal, sys, threading
from torchere.serving.logs.lines import configure
configure("INFO", False, sys.stdout)
"""


def test_what_is_printed_stands_before_the_record_after_it_and_outlives_the_process() -> None:
    script = BEGIN + 'print("printed"); logging.info("logged"); print("last"); os.kill(os.getpid(), 9)'
    assert output_of(script) == (-signal.SIGKILL, ["printed", "root: logged", "last"])


def test_the_last_record_before_a_crash_is_written() -> None:
    script = BEGIN + 'logging.info("first"); logging.error("last words"); os.abort()'
    assert output_of(script) == (-signal.SIGABRT, ["root: first", "root: last words"])


def test_a_process_that_is_forked_off_loses_none_of_its_records_and_ends() -> None:
    child = """
if os.fork() == 0:
    for number in range(3):
        logging.info("of the child %d", number)
    os._exit(0)
os.wait()
"""
    code, lines = output_of(BEGIN + 'logging.info("before")' + child + 'logging.info("after")')
    of_child = [f"root: of the child {number}" for number in range(3)]
    assert (code, lines) == (0, ["root: before", *of_child, "root: after"])


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: as it is in a server
def test_a_process_that_is_forked_off_writes_nothing_of_its_parents_and_waits_for_nobody(pipe: Pipe) -> None:
    pipe.outlet.put(more_than_it_holds(1))
    pipe.outlet.put("of the parent\n")
    locked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with pipe.outlet._changed:
            locked.set()
            go_on.wait(LONG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(LONG_S)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LONG_S))  # the end of it, if it hangs
        try:
            pipe.outlet.put("of the child\n")
            pipe.outlet.flush(LONG_S)
        finally:
            os._exit(0)
    go_on.set()
    holder.join()
    seen = ""
    while "of the child\n" not in seen or "of the parent\n" not in seen:
        seen += pipe.read("\n")
    assert os.waitpid(child, 0)[1] == 0
    assert pipe.outlet.flush(LONG_S)
    os.set_blocking(pipe.read_end, False)
    pipe.outlet.put("end\n")
    seen += pipe.read("end\n")
    assert sorted(text.lstrip("1") for text in seen.split("\n")) == sorted(
        ["", "", "end", "of the child", "of the parent"]
    )
