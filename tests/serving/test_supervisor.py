"""The supervisor as a real process, over servers of a few lines."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from torchere.serving.crash_journal import ServerState
from torchere.serving.vitals import open_journal
journal = open_journal(sys.argv[-1].partition("=")[2])
starts = Path("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
start = len(starts.read_text())
def serve():
    journal.state = ServerState.SERVING
    print("serving", os.getpid(), flush=True)
def fill_pipe():
    os.set_blocking(1, False)
    try:
        while True:
            os.write(1, b"x")
    except BlockingIOError:
        os.set_blocking(1, True)
"""
# Times of a supervisor that tests can wait for.
SHORT = """
import sys
from torchere.serving import supervisor
supervisor._TICK_S, supervisor.HUNG_AFTER_S, supervisor.KILL_GRACE_S = 0.02, 0.3, 0.2
{changes}
sys.exit(supervisor.main(sys.argv[1:]))
"""

HELD = """
import os, time
open(f"born-{os.getpid()}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor over a server of this code; its output is a pipe."""
    started: list[subprocess.Popen[str]] = []

    def starter(code: str, changes: str = "", before: str = "", form: str = "text") -> subprocess.Popen[str]:
        (tmp_path / "server.py").write_text(before + PREAMBLE + textwrap.dedent(code))
        command = [sys.executable, "-c", SHORT.format(changes=changes), form, "--"]
        process = subprocess.Popen(
            [*command, sys.executable, str(tmp_path / "server.py")],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield starter
    for process in started:
        process.kill()
        process.communicate()


def until_serving(process: subprocess.Popen[str]) -> int:
    """Wait for a server; returns its process id."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if found := re.match(r"serving (\d+)", line):
            return int(found[1])
    raise AssertionError(f"the supervisor ended:\n{seen}")


def test_a_server_that_refuses_to_start_is_not_started_again(start: Start, tmp_path: Path) -> None:
    process = start("print('no such store'); sys.exit(3)")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, (tmp_path / "starts").read_text()) == (3, "x")
    assert output == "no such store\n"


def test_under_nohup_the_end_of_the_terminal_ends_neither_of_the_two(start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the processes we start inherit it
    try:
        process = start("""
            serve()
            while not Path("told").exists():
                time.sleep(0.01)
            journal.state = ServerState.ENDING
            sys.exit(5)
        """)
    finally:
        signal.signal(signal.SIGHUP, before)
    server = until_serving(process)
    for pid in (process.pid, server):
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.3)  # for one of them to end
    Path(f"/proc/{process.pid}/cwd").joinpath("told").touch()
    process.communicate(timeout=60)
    assert process.returncode == 5


def test_a_server_that_crashed_is_started_again_and_the_log_says_why(start: Start) -> None:
    process = start("""
        serve()
        if start == 1:
            journal.open_cell(1).begin(journal.number_of("net:1.0"))
            os.kill(os.getpid(), signal.SIGSEGV)
        print("after:", journal.history.crashes[0].models)
        journal.state = ServerState.ENDING
    """)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "the server crashed: killed by signal 11 (SIGSEGV), which ran net:1.0" in output
    assert "Fatal Python error: Segmentation fault" in output
    assert "after: ('net:1.0',)" in output


def test_as_json_each_line_has_the_fields_of_a_servers_at_a_full_second_as_well(start: Start) -> None:
    code = """
        serve()
        if start == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        journal.state = ServerState.ENDING
    """
    now = "classmethod(lambda cls, zone: cls(2030, 1, 1, tzinfo=zone))"
    changes = f"supervisor.datetime = type('Clock', (supervisor.datetime,), {{'now': {now}}})"
    output, _ = start(code, changes=changes, form="json").communicate(timeout=60)
    crash, again = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert "Segmentation fault" in crash.pop("exception")
    common = {"time": "2030-01-01T00:00:00.000000Z", "logger": "torchere.serving.supervisor"}
    text = "the server crashed: killed by signal 11 (SIGSEGV)"
    assert crash == {**common, "level": "ERROR", "message": text}
    assert again == {**common, "level": "WARNING", "message": "starting the server again in 0 s"}


def test_a_handlers_exit_is_a_crash_and_the_second_one_moves_its_model(start: Start) -> None:
    process = start("""
        print("isolated:", list(journal.history.isolated))
        serve()
        if start < 3:
            journal.open_cell(1).begin(journal.number_of("net:1.0"))
            os._exit(7)
        journal.state = ServerState.ENDING
    """)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.findall(r"isolated: (.*)", output) == ["[]", "[]", "['net:1.0']"]
    assert "net:1.0 runs in processes from now on: its executor threads crashed the server 2 times" in output


def test_a_server_that_keeps_crashing_is_given_up_with_its_exit_status(start: Start, tmp_path: Path) -> None:
    process = start("serve(); os._exit(9)", changes="supervisor.GIVE_UP_S = -1.0")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, (tmp_path / "starts").read_text()) == (9, "x")
    assert "giving up" in output


@pytest.mark.parametrize(("serves", "starts"), [("pass", "xx"), ("serve()", "xxx")])
def test_only_a_server_that_served_for_long_ends_the_row_of_crashes(
    serves: str, starts: str, start: Start, tmp_path: Path
) -> None:
    code = f"""
        if start < 3:
            {serves}
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start(code, changes="supervisor.STABLE_S = supervisor.GIVE_UP_S = 0.0")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, (tmp_path / "starts").read_text()) == (-signal.SIGKILL, starts)
    assert "giving up" in output


def test_a_server_whose_loop_stands_still_is_ended_with_a_trace_and_started_again(start: Start) -> None:
    process = start("""
        serve()
        if start == 1:
            time.sleep(1000)
        journal.state = ServerState.ENDING
    """)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "the server crashed: hung: its event loop stood still for 0.3 s" in output
    assert "Fatal Python error: Aborted" in output


WAITS = """
    got = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    serve()
    while not got:
        journal.beat()
        time.sleep(0.01)
    journal.state = ServerState.ENDING
    for _ in range(20):  # time for a second one to come
        time.sleep(0.01)
    sys.exit(40 + len(got))
"""


def test_a_signal_reaches_the_server_once_and_its_exit_status_comes_back(start: Start) -> None:
    process = start(WAITS)
    until_serving(process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 41


def test_the_server_is_in_a_group_of_its_own(start: Start) -> None:
    process = start(WAITS)
    server = until_serving(process)
    assert os.getpgid(server) == server
    assert os.getpgid(process.pid) != server


def test_a_server_that_a_signal_ended_ends_the_supervisor_likewise(start: Start) -> None:
    process = start("""
        serve()
        signal.pause()
    """)
    until_serving(process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_the_server_dies_with_its_supervisor(start: Start) -> None:
    process = start(WAITS)
    server = psutil.Process(until_serving(process))
    process.kill()
    process.wait(60)
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_starts_when_its_supervisor_has_ended_ends_likewise(
    start: Start, tmp_path: Path
) -> None:
    process = start(WAITS, before=HELD)
    while not (born := list(tmp_path.glob("born-*"))):
        assert process.poll() is None
    server = psutil.Process(int(born[0].name.partition("-")[2]))
    process.kill()
    process.wait(60)
    (tmp_path / "go").touch()
    try:
        psutil.wait_procs([server], timeout=30)
        assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    finally:
        with suppress(psutil.NoSuchProcess):
            server.kill()


def test_a_server_that_stood_still_together_with_its_supervisor_does_not_hang(
    start: Start, tmp_path: Path
) -> None:
    beats_each_second = WAITS.replace("journal.beat()", "time.sleep(1.0); journal.beat()")
    process = start(beats_each_second, changes="supervisor.HUNG_AFTER_S = 2.0")
    both = psutil.Process(until_serving(process)), psutil.Process(process.pid)
    os.kill(process.pid, signal.SIGTSTP)
    while {each.status() for each in both} != {psutil.STATUS_STOPPED}:
        assert process.poll() is None
    time.sleep(2.5)  # longer than a server may be silent
    os.kill(process.pid, signal.SIGCONT)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 41
    assert (tmp_path / "starts").read_text() == "x"


def test_a_signal_during_the_back_off_ends_it_all(start: Start, tmp_path: Path) -> None:
    changes = "supervisor.restart_delay_s = lambda *how: 1000.0"
    process = start("serve(); os._exit(9)", changes=changes)
    assert process.stdout is not None
    for line in process.stdout:
        if "starting the server again in 1000 s" in line:
            break
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 9
    assert (tmp_path / "starts").read_text() == "x"


def test_a_start_after_a_crash_that_lacks_something_is_tried_again(start: Start) -> None:
    process = start(
        """
        if start == 2:
            print("no disk", flush=True)
            sys.exit(1)
        serve()
        if start == 1:
            os._exit(7)
        journal.state = ServerState.ENDING
        """,
        changes="supervisor.restart_delay_s = lambda *how: 0.0",
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.findall(r"^(serving|no disk)", output, re.MULTILINE) == ["serving", "no disk", "serving"]


def test_a_system_that_can_not_start_the_server_again_is_asked_again(start: Start) -> None:
    changes = """
        starter, fails = supervisor.os.posix_spawn, iter((False, True, True, False))
        def spawn(*arguments, **options):
            if next(fails):
                raise BlockingIOError(11, "no process left")
            return starter(*arguments, **options)
        supervisor.os.posix_spawn = spawn
        supervisor.restart_delay_s = lambda *how: 0.0
    """
    process = start(
        """
        serve()
        if start == 1:
            os._exit(7)
        journal.state = ServerState.ENDING
        """,
        changes=textwrap.dedent(changes),
    )
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, len(re.findall(r"^serving \d", output, re.MULTILINE))) == (0, 2)
    assert output.count("the system does not start the server: no process left") == 2


def test_a_log_that_nobody_reads_holds_up_neither_a_restart_nor_the_end(start: Start, tmp_path: Path) -> None:
    process = start("""
        if start == 1:
            serve()
            fill_pipe()
            os._exit(7)
        journal.state = ServerState.SERVING
        Path("again").touch()
        time.sleep(60)
    """)
    given_up_s = time.monotonic() + 30
    while not (tmp_path / "again").exists():
        assert time.monotonic() < given_up_s, "the server was not started again"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_who_reads_the_log_late_reads_the_last_lines(start: Start) -> None:
    changes = "supervisor.restart_delay_s, supervisor.LAST_LINES_S = lambda *how: None, 60.0"
    process = start("serve(); fill_pipe(); os._exit(7)", changes=changes)
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)
    output, _ = process.communicate(timeout=60)
    assert "the server crashed 1 times in a row: giving up" in output


def test_it_stays_small(start: Start) -> None:
    process = start(WAITS)
    until_serving(process)
    assert psutil.Process(process.pid).memory_info().rss < 40e6
    modules = subprocess.run(
        [sys.executable, "-c", "import sys, torchere.serving.supervisor; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"torch", "numpy", "asyncio", "msgspec", "fastapi"} & set(modules)
