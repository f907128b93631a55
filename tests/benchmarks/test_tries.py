"""What is taken for the fastest."""

from __future__ import annotations

from harness.tries import fastest, tries_of


def test_one_lucky_try_does_not_decide() -> None:
    rates = {4: [50.0], 8: [99.0, 98.0, 97.0], 16: [94.0, 99.0, 99.0]}
    left = {size: iter(found) for size, found in rates.items()}
    tries = tries_of([4, 8, 16], lambda size: next(left[size]))
    assert tries == rates
    assert fastest(tries) == 16
