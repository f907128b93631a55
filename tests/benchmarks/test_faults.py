"""The benchmark of faults: its list, and its verdict."""

from __future__ import annotations

import faults
import pytest
from harness.load import Load


def test_the_faults_are_the_functions_of_the_handler() -> None:
    assert "segfault" in faults.FAULTS
    assert "Faults" not in faults.FAULTS


@pytest.mark.parametrize(("p99_ms", "verdict"), [(50.0, ""), (50.1, "MISSED")])
def test_a_row_compares_with_the_phases_before_and_after(p99_ms: float, verdict: str) -> None:
    def of(per_second: float, p99_ms: float) -> faults.Phase:
        return faults.Phase(Load(per_second, {"99": p99_ms}, 1), [1.0] * 100, 0)

    found = faults.Phase(Load(90.0, {"99": 6.0}, 1), [*[1.0] * 98, p99_ms, p99_ms], 3)
    row = faults.row("thread", "spin", found, [of(80, 4), of(120, 2)])
    assert row == ("thread", "spin", "3", "0.90", "2.00", "1.0", f"{p99_ms:.1f}", f"{p99_ms:.1f}", verdict)
