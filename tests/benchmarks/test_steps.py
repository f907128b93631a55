"""How `benchmarks/steps.py` reads perf and shows what it counted."""

import pytest
from harness.errors import Failed
from steps import ALLOCATIONS, SYSTEM_CALLS, count_of, table

_SAID = "12345;;raw_syscalls:sys_enter;3001;100.00;;\n"


def test_the_count_stands_before_its_event() -> None:
    assert count_of(f"Some warning\n{_SAID}", SYSTEM_CALLS) == 12345


@pytest.mark.parametrize("said", ["", "<not counted>;;raw_syscalls:sys_enter;0;0.00;;\n", _SAID])
def test_an_event_that_was_not_counted_is_no_zero(said: str) -> None:
    with pytest.raises(Failed, match="perf counted no torchere_steps:allocated"):
        count_of(said, ALLOCATIONS)


def test_the_table_has_a_column_for_each_tree() -> None:
    found = {"old": {"REST": {"system calls": 2.04}}, "new": {"REST": {"system calls": 0.96}}}

    assert table(found) == [
        ["request", "for one answer", "old", "new"],
        ["REST", "system calls", "2.0", "1.0"],
    ]
