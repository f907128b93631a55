"""Tables, JSON and the document of a run."""

import json
from dataclasses import replace
from pathlib import Path

from harness.document import markdown
from harness.figures import Goal, Spread
from harness.machine import Machine
from harness.report import number, shown, summary
from harness.results import Result, write
from harness.rounds import Measured
from harness.rows import Row

MACHINE = Machine(
    "2026-01-02T03:04:05+00:00", "A CPU", 2, 24.0, "Linux 6", "3.11.0", "2.13.0", "0.1.0", "abc", 0.0
)


def a_run() -> Result:
    goals = (
        Goal("req/s to the peer", "rps", 2.0, against=("peer",)),
        Goal("p50 to the peer", "p50", 0.5, more_is_better=False, against=("peer",)),
        Goal("to nobody there", "rps", 2.0, against=("gone",)),
    )
    row = Row("row", "A row", "Something is measured.", {}, {"rps": "req/s", "p50": "p50 ms"}, goals)
    samples: dict[str, dict[str, list[float | None]]] = {
        "torchere": {"rps": [4000.0, 5000.0], "p50": [1.0, 0.9]},
        "peer": {"rps": [1000.0, 1000.0], "p50": [1.0, 1.0]},
    }
    return Result(MACHINE, 2, 5.0, [Measured(row, samples, {"gone": "it can't be installed\nat all"})])


def test_numbers_show_three_digits_or_whole_hundreds():
    assert [number(value) for value in (0.12345, 1.5, 12.34, 123.6, 12345.0)] == [
        "0.123",
        "1.5",
        "12.3",
        "124",
        "12,345",
    ]


def test_a_spread_shows_its_ends_only_if_there_are_any():
    assert shown(Spread(2.0, 1.0, 3.0, 3)) == "2 (1-3)"
    assert shown(Spread(2.0, 2.0, 2.0, 3)) == "2"
    assert shown(None) == "-"


def test_the_summary_names_what_was_reached_missed_and_not_measured():
    text = summary(a_run())
    lines = {line.split("  ")[1].strip(): line for line in text.splitlines() if "to " in line}
    assert lines["req/s to the peer"].split()[4:] == ["≥", "2", "4.5", "(4-5)", "peer", "reached"]
    assert lines["p50 to the peer"].endswith("MISSED")
    assert lines["to nobody there"].endswith("not measured")
    assert "gone: it can't be installed" in text


def test_the_document_puts_what_falls_short_first():
    text = markdown(a_run())
    assert "1 of 3 goals are reached" in text
    assert text.index("A row: p50 to the peer: 0.95 (0.9-1), wanted at most 0.5") < text.index("## A row")
    assert "`python benchmarks/run.py --only row`" in text
    assert "| torchere | 4,500 (4,000-5,000) | 0.95 (0.9-1) |" in text
    assert "Not measured: gone (it can't be installed)." in text


def test_a_ratio_without_a_target_is_shown_and_counts_as_no_goal():
    run = a_run()
    (measured,) = run.rows
    told = Goal("what the machine allows", "rps", None, against=("peer",))
    measured.row = replace(measured.row, goals=(*measured.row.goals, told))
    text = markdown(run)
    assert "1 of 3 goals are reached" in text
    assert "| what the machine allows | - | 4.5 (4-5) | peer |  |" in text


def test_the_document_says_when_the_machine_was_busy():
    busy = Machine(
        "2026-01-02T03:04:05+00:00", "A CPU", 2, 24.0, "Linux 6", "3.11.0", "2.13.0", "0.1.0", "abc", 1.5
    )
    assert "other work ran beside it" in markdown(Result(busy, 1, 1.0, []))
    assert "other work ran beside it" not in markdown(Result(MACHINE, 1, 1.0, []))


def test_the_json_keeps_every_sample_and_every_ratio(tmp_path: Path):
    path = write(a_run(), tmp_path / "results")
    found = json.loads(path.read_text())
    assert path.name == "2026-01-02T030405+0000.json"
    row = found["rows"]["row"]
    assert row["samples"]["torchere"]["rps"] == [4000.0, 5000.0]
    assert row["goals"][0]["found"] == {"median": 4.5, "low": 4.0, "high": 5.0, "rounds": 2}
    assert [goal["met"] for goal in row["goals"]] == [True, False, None]
