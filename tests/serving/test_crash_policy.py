"""What follows the end of a server, as tables."""

import signal

import pytest

from torchere.serving.crash_journal import Crash, History, ServerState
from torchere.serving.crash_policy import AfterExit, after_exit, cause_of, learn, to_blame

STARTING, SERVING, ENDING = ServerState
TRACE = "Fatal Python error: Segmentation fault\n\nThread 0x0a (most recent\n\nCurrent thread 0x001b (most"


@pytest.mark.parametrize(
    ("code", "state", "told", "expected"),
    [
        (0, ENDING, False, AfterExit.END),
        (1, STARTING, False, AfterExit.END),  # its configuration is refused
        (0, STARTING, False, AfterExit.END),
        (-11, STARTING, False, AfterExit.RESTART),  # a model crashed it while it loaded
        (-11, SERVING, False, AfterExit.RESTART),
        (-9, SERVING, False, AfterExit.RESTART),
        (7, SERVING, False, AfterExit.RESTART),  # a handler's os._exit
        (0, SERVING, False, AfterExit.RESTART),
        (-11, ENDING, False, AfterExit.END),
        (-11, SERVING, True, AfterExit.END),
        (-15, SERVING, False, AfterExit.END),  # somebody told the server itself
    ],
)
def test_a_server_is_started_again_unless_its_end_was_meant(
    code: int, state: ServerState, told: bool, expected: AfterExit
) -> None:
    assert after_exit(code, state, told) is expected


@pytest.mark.parametrize(("code", "expected"), [(1, AfterExit.RESTART), (0, AfterExit.END)])
def test_what_has_served_once_is_not_given_up_by_one_start_that_fails(code: int, expected: AfterExit) -> None:
    assert after_exit(code, STARTING, told_to_end=False, has_served=True) is expected


def test_the_thread_in_the_trace_is_to_blame_and_no_other() -> None:
    assert to_blame(-11, TRACE, {10: "innocent:1.0", 0x1B: "guilty:1.0"}) == ("guilty:1.0",)


def test_without_a_trace_all_that_were_running_may_be_to_blame() -> None:
    running = {10: "b:1.0", 11: "a:1.0", 12: "a:1.0"}
    assert to_blame(7, "", running) == to_blame(0, "", running) == ("a:1.0", "b:1.0")
    assert to_blame(-11, TRACE, {12: "a:1.0"}) == ("a:1.0",)  # a thread of the model's own crashed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_from_outside_is_nobodys_fault(number: signal.Signals) -> None:
    assert to_blame(-number, "", {10: "a:1.0"}) == ()


def test_a_version_that_crashed_the_server_twice_runs_in_processes() -> None:
    crash = Crash("now", "killed by signal 11 (SIGSEGV)", ("a:1.0",))
    once = learn(History(), crash)
    assert once.isolated == {}
    other = learn(once, Crash("now", "exited with code 7", ("b:1.0",)))
    twice = learn(other, crash)
    assert list(twice.isolated) == ["a:1.0"]
    assert "crashed the server 2 times, last: killed by signal 11 (SIGSEGV)" in twice.isolated["a:1.0"]
    assert learn(twice, crash).isolated == twice.isolated  # the reason stays as it was


def test_the_cause_is_told_in_words() -> None:
    assert cause_of(-11, 0.0) == "killed by signal 11 (SIGSEGV)"
    assert cause_of(-6, 60.0) == "hung: its event loop stood still for 60 s"
