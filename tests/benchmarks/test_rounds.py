"""The rounds: whose turn it is, and what becomes of a contender that fails."""

from pathlib import Path

import pytest
from harness.errors import Failed, Unavailable
from harness.figures import Goal
from harness.models import Workshop
from harness.rounds import measure, turns
from harness.rows import Conditions, Figures, Row


def row_of(**contenders) -> Row:
    goals = (Goal("faster", "rps", 2.0, against=("peer",)),)
    return Row("row", "A row", "Nothing is done.", contenders, {"rps": "req/s"}, goals)


@pytest.fixture
def conditions(tmp_path: Path) -> Conditions:
    return Conditions(Workshop(tmp_path), 1.0)


def test_each_round_begins_with_another_contender():
    assert [turns(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]


def test_every_contender_is_measured_once_a_round(conditions, capsys):
    calls = []

    def contender(name: str, value: float):
        def run(_conditions: Conditions) -> Figures:
            calls.append(name)
            return {"rps": value * len(calls)}

        return run

    measured = measure(row_of(torchere=contender("t", 2), peer=contender("p", 1)), conditions, 2)
    assert calls == ["t", "p", "p", "t"]
    assert measured.samples == {"torchere": {"rps": [2.0, 8.0]}, "peer": {"rps": [2.0, 3.0]}}
    assert measured.missing == {}
    assert "[row] round 2/2 peer" in capsys.readouterr().out


def test_a_peer_that_cannot_be_had_is_asked_once_and_left_out(conditions):
    asked = []

    def gone(_conditions: Conditions) -> Figures:
        asked.append(1)
        raise Unavailable("no Java here")

    measured = measure(row_of(torchere=lambda _: {"rps": 1.0}, peer=gone), conditions, 3)
    assert len(asked) == 1
    assert measured.missing == {"peer": "no Java here"}
    assert measured.samples == {"torchere": {"rps": [1.0, 1.0, 1.0]}}


def test_a_round_that_failed_leaves_a_hole_in_its_place(conditions):
    answers = [{"rps": 1.0}, None, {"rps": 3.0}]

    def shaky(_conditions: Conditions) -> Figures:
        answer = answers.pop(0)
        if answer is None:
            raise Failed("the server ended with -9")
        return answer

    measured = measure(row_of(torchere=shaky), conditions, 3)
    assert measured.samples == {"torchere": {"rps": [1.0, None, 3.0]}}
    assert measured.missing == {"torchere": "round 2: the server ended with -9"}
