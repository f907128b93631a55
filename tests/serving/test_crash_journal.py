"""The memory that a server and its supervisor share."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchere.serving.crash_journal import _CELLS, _NAMES, MAX_CRASHES, Crash, History, Journal, ServerState

WRITES_AND_DIES = """
import os, signal, sys, threading
from torchere.serving.crash_journal import Journal, ServerState
journal = Journal(int(sys.argv[1]))
journal.state = ServerState.SERVING
journal.beat()
journal.models = '{"models": {}}'
cell = journal.open_cell(threading.get_ident())
cell.begin(journal.number_of("net:1.0"))
print(threading.get_ident(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def journal() -> Iterator[Journal]:
    journal = Journal.create()
    yield journal
    os.close(journal.descriptor)


def test_where_nobody_may_make_memory_without_a_name_a_file_without_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    journal = Journal.create()
    journal.models = "{}"
    assert (journal.models, os.fstat(journal.descriptor).st_nlink) == ("{}", 0)
    os.close(journal.descriptor)


def test_what_a_server_was_at_is_there_after_it_was_killed(journal: Journal) -> None:
    command = [sys.executable, "-c", WRITES_AND_DIES, str(journal.descriptor)]
    done = subprocess.run(command, pass_fds=[journal.descriptor], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert journal.running() == {int(done.stdout): "net:1.0"}
    assert (journal.state, journal.beats) == (ServerState.SERVING, 1)
    assert journal.models == '{"models": {}}'
    journal.clear()  # for the next one, which restores the models
    assert (journal.running(), journal.state, journal.beats) == ({}, ServerState.STARTING, 0)
    assert journal.models == '{"models": {}}'


def test_a_cell_is_empty_between_runs_and_free_when_its_thread_ends(journal: Journal) -> None:
    cell = journal.open_cell(7)
    assert cell is not None
    cell.begin(journal.number_of("a:1"))
    assert journal.running() == {7: "a:1"}
    cell.end()
    assert journal.running() == {}
    cell.begin(journal.number_of("a:1"))
    journal.close_cell(cell)
    assert journal.running() == {}


def test_more_threads_and_versions_than_there_is_room_for_go_unseen(journal: Journal) -> None:
    cells = [journal.open_cell(number) for number in range(_CELLS)]
    assert None not in cells
    assert journal.open_cell(1) is None
    journal.close_cell(cells[0])  # type: ignore[arg-type]
    assert journal.open_cell(1) is not None
    numbers = [journal.number_of(f"m:{number}") for number in range(_NAMES + 1)]
    assert numbers[-1] == 0
    assert journal.number_of("m:0") == numbers[0]


def test_the_history_comes_back_as_it_was_and_is_bounded(journal: Journal) -> None:
    assert journal.history == History()
    crashes = tuple(Crash(str(number), "exited with code 7", ("a:1",)) for number in range(MAX_CRASHES + 5))
    journal.history = History(crashes, {"a:1": "crashed"})
    assert journal.history == History(crashes[5:], {"a:1": "crashed"})


def test_a_table_of_models_over_the_bound_is_not_kept_by_half(journal: Journal) -> None:
    journal.models = "x" * (17 << 20)
    assert journal.models == ""


def test_the_numbers_of_versions_that_are_gone_are_used_again(journal: Journal) -> None:
    stays = {journal.number_of("stays:1"), journal.number_of("stays:1")}
    journal.give_up("stays:1")  # one of its two executors
    for count in range(3000):
        name = f"model:{count}"
        stays.add(journal.number_of("stays:1"))
        number = journal.number_of(name)
        assert number not in {0, *stays}
        cell = journal.open_cell(7)
        assert cell is not None
        cell.begin(number)
        assert journal.running() == {7: name}
        journal.close_cell(cell)
        journal.give_up(name)
    assert len(stays) == 1
