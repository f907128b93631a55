"""Types of command line arguments that the scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class Listed:
    """Argparse type: names separated by commas, each of which must be known."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> list[str]:
        """The names; raises argparse's error, which names those that are known."""
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in self._known:
                raise argparse.ArgumentTypeError(f"found {name!r}, expected {', '.join(self._known)}")
        return names


def whole_seconds(text: str) -> float:
    """Argparse type: how long a load phase is; raises argparse's error for a fraction, which wrk refuses."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds < 1 or not seconds.is_integer():
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a whole number of seconds, 1 or more: wrk takes no fractions"
        )
    return seconds
