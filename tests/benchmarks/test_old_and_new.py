"""Which rows `benchmarks/old_and_new.py` measures, on which trees, and how it judges them."""

from pathlib import Path

import old_and_new
import pytest
from harness import catalogue, pairs, rounds
from harness.models import Workshop
from harness.rows import Conditions, Row
from harness.trees import CHECKOUT, Tree, tree

OLDER = Tree(Path("/older"), Path("/older/.venv/bin/python"))
SIDES = {pairs.OLD: OLDER, pairs.NEW: CHECKOUT}


def test_every_subject_and_every_goal_names_what_there_is():
    rows = {row.key: row for row in catalogue.rows()}
    for subject in old_and_new.SUBJECTS.values():
        assert {subject.contender, *subject.peers} <= set(rows[subject.row].contenders)
    for goal in old_and_new.GOALS:
        subject = old_and_new.SUBJECTS[goal.row]
        assert goal.metric in subject.figures
        assert goal.against in {pairs.OLD, *subject.peers}


def test_each_side_is_measured_with_its_own_tree_and_the_same_archives(tmp_path: Path, monkeypatch):
    served = []

    def measure(conditions: Conditions) -> dict[str, float]:
        served.append(conditions.shop)
        return {"rps_1": 1.0}

    row = Row("tiny_mlp", "", "", {"torchere": measure, "mosec, orjson": measure}, {}, ())
    monkeypatch.setattr(catalogue, "rows", lambda: [row])
    monkeypatch.setitem(
        old_and_new.SUBJECTS,
        "tiny_mlp",
        old_and_new.Subject("tiny_mlp", "torchere", ("mosec, orjson",), ("rps_1",)),
    )
    shop = Workshop(tmp_path)
    paired = old_and_new.paired_row("tiny_mlp", SIDES, ["mosec"])
    rounds.measure(paired, Conditions(shop, 1.0), 2, order=pairs.turns)
    assert [one.tree for one in served] == [OLDER, CHECKOUT, CHECKOUT, CHECKOUT, OLDER, CHECKOUT]
    assert set(served) == {shop}  # so that what one has packed, the other serves
    assert list(old_and_new.paired_row("tiny_mlp", SIDES, []).contenders) == [pairs.OLD, pairs.NEW]


def found(row: str, **samples: dict[str, list[float | None]]) -> rounds.Measured:
    return rounds.Measured(old_and_new.paired_row(row, SIDES, ["mosec", "triton", "torchserve"]), samples)


def test_a_figure_stands_beside_the_old_trees_and_a_goal_beside_its_peers():
    samples: dict[str, dict[str, list[float | None]]] = {
        pairs.OLD: {"rps": [100.0] * 9, "cpu_us": [50.0] * 9},
        pairs.NEW: {"rps": [300.0] * 9, "cpu_us": [20.0] * 9},
        "triton": {"rps": [200.0] * 9},
    }
    lines = old_and_new.judged("grpc_deadlines", found("grpc_deadlines", **samples), inline=False)
    by_figure = {(line[1], line[2]): line[3:] for line in lines}
    assert by_figure["rps", "old"] == ["100", "300", "3.000", "3.000-3.000", "≥ 2.5", "reached"]
    assert by_figure["rps", "triton"] == ["200", "300", "1.500", "1.500-1.500", "≥ 2", "MISSED"]
    assert by_figure["cpu_us", "old"] == ["50", "20", "0.400", "0.400-0.400", "", ""]
    assert by_figure["p50_ms", "old"][2:] == ["-", "-", "", ""]


def test_a_row_without_a_goal_of_its_own_may_not_be_slower():
    samples: dict[str, dict[str, list[float | None]]] = {
        pairs.OLD: {"back_s": [1.0] * 9, "failures": [0.0] * 9},
        pairs.NEW: {"back_s": [1.1] * 9, "failures": [0.0] * 9},
    }
    back, failures = old_and_new.judged("kill", found("kill", **samples), inline=False)
    assert back[-2:] == ["≤ 1.03", "MISSED"]
    assert failures[-2:] == ["", ""]


def test_what_is_neither_a_commit_nor_a_folder_is_refused(capsys):
    assert old_and_new.main(["--old", "no-such-commit"]) == 2
    assert "found 'no-such-commit'" in capsys.readouterr().err


def test_a_folder_without_an_environment_is_refused(tmp_path: Path, capsys):
    assert old_and_new.main(["--old", str(tmp_path)]) == 2
    assert "make install" in capsys.readouterr().err


def test_this_checkout_runs_with_the_python_that_measures():
    assert tree(str(CHECKOUT.folder)) == CHECKOUT


def test_the_list_needs_no_trees(capsys):
    assert old_and_new.main(["--list", "--rows", "kill,tensor_1mib"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["kill", "tensor_1mib"]


def test_an_unknown_row_is_refused():
    with pytest.raises(SystemExit):
        old_and_new.main(["--rows", "tiny"])


@pytest.mark.parametrize("seconds", ["1.5", "0", "inf", "nan", "2s"])
def test_phases_that_wrk_would_refuse_are_refused(seconds: str, capsys):
    with pytest.raises(SystemExit):
        old_and_new.main(["--seconds", seconds, "--list"])
    assert f"found {seconds!r}, expected a whole number of seconds" in capsys.readouterr().err


def test_phases_of_whole_seconds_are_taken():
    assert old_and_new.main(["--seconds", "3", "--list", "--rows", "kill"]) == 0
