"""The batch size that a server gets in rows of real models."""

from __future__ import annotations

from harness.rows_models import Plan, fastest


def test_one_lucky_try_does_not_decide() -> None:
    tries = {4: [50.0], 8: [99.0, 98.0, 97.0], 16: [94.0, 99.0, 99.0]}
    left = {size: iter(rates) for size, rates in tries.items()}
    assert fastest([Plan(size, 2) for size in tries], lambda plan: next(left[plan.batch])) == Plan(16, 2)
    assert [next(rates, None) for rates in left.values()] == [None] * 3
