"""`benchmarks/formats.py`: some of its rows, what it makes of a crash, and its table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.machine import Machine
from variety.catalogue import ENTRIES
from variety.document import kept_cells, section, with_section
from variety.trial import CRASHED, PACKED, REFUSED, WRONG, Cell, in_child

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine("2026-11-25T12:00", "a CPU", 2, 8.0, "Linux", "3.11", "2.13", "0.1.0", "abc", 0.1)


def test_there_are_24_models_of_12_kinds_and_their_keys_are_their_own() -> None:
    assert len({entry.key for entry in ENTRIES}) == len(ENTRIES) >= 24
    assert len({entry.kind for entry in ENTRIES}) >= 12


def test_models_are_packed_and_answer_as_eager_does(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = [sys.executable, "benchmarks/formats.py", "--models", "tabular,graph", "--kept", str(kept)]
    command += ["--formats", "torchscript,keep", "--methods", "fp32"]
    done = subprocess.run([*command, "--again"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {name: Cell(**cell) for name, cell in json.loads(kept.read_text()).items()}
    assert sorted(cells) == [
        f"{key} {how} fp32" for key in ("graph", "tabular") for how in ("keep", "torchscript")
    ]
    assert all(cell.status == PACKED and cell.difference is not None for cell in cells.values()), cells
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1/" not in again.stdout  # what is known is not measured again


def crash(_told: Callable[[Any], None]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(_told: Callable[[Any], None]) -> None:
    time.sleep(60)


def end(_told: Callable[[Any], None]) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("work", "limit_s", "expected"),
    [(lambda told: told([1]), 30, [1]), (crash, 30, "SIGSEGV"), (end, 30, "exit 1"), (hang, 0.2, None)],
    ids=["answers", "crashes", "ends", "hangs"],
)
def test_a_child_that_ends_is_a_result(work: Any, limit_s: float, expected: object, tmp_path: Path) -> None:
    assert in_child(work, tmp_path / "log", limit_s) == expected


CELLS: dict[tuple[str, ...], Cell] = {
    ("unet", "torchscript", "fp32"): Cell(PACKED, "", 2e-7, 1.5),
    ("unet", "torchscript", "int8-dynamic"): Cell(REFUSED, "it has 3 layers of none"),
    ("crnn", "torchscript", "int8-dynamic"): Cell(REFUSED, "it has 4 layers of none"),
    ("crnn", "torchscript", "bf16"): Cell(REFUSED, "bf16 is not faster than fp32 on this processor: 1 -> 2"),
    ("crnn", "torchscript", "int8-static"): Cell(REFUSED, "the quantised model has lost outputs"),
    ("crnn", "export", "fp32"): Cell(WRONG, "off by 1", 1.0, 1.0),
    ("crnn", "aoti", "fp32"): Cell(CRASHED, "SIGSEGV"),
}


def test_the_section_counts_and_numbers_refusals_that_differ_in_figures_once() -> None:
    made = section(CELLS, [one for one in ENTRIES if one.key in ("unet", "crnn")], MACHINE)
    assert "7 trials: 1 packed, 4 refused, 2 crashed, late or wrong" in made
    assert "| torchscript | 1.50 ×, 2e-07 | refused (1) |" in made
    assert "| refused (1) | drifts | slower |" in made
    assert "**wrong** 1.00 ×, 1e+00" in made
    assert made.count("layers of none") == 1


def test_a_section_is_read_back_as_it_was_written() -> None:
    document = "<!-- begin: benchmarks/formats.py -->\n<!-- end: benchmarks/formats.py -->"
    assert kept_cells(document, ENTRIES) == {}
    written = with_section(document, section(CELLS, ENTRIES, MACHINE))
    read = kept_cells(written, ENTRIES)
    assert read.keys() == CELLS.keys()
    assert with_section(document, section(read, ENTRIES, MACHINE)) == written


def test_a_document_keeps_all_but_the_section() -> None:
    marks = ("<!-- begin: benchmarks/formats.py -->", "<!-- end: benchmarks/formats.py -->")
    assert with_section("\n".join(["a", marks[0], "old", marks[1], "b"]), "new").split("\n") == [
        *("a", marks[0], "new", marks[1], "b")
    ]
    with pytest.raises(ValueError, match="lacks"):
        with_section("a", "new")
