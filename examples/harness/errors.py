"""What ends an example."""

from __future__ import annotations


class ExampleFailed(Exception):
    """Something is not as the example says; the text tells what was found and what was expected."""


def expect(holds: bool, found: str) -> None:
    """Go on only if it holds.

    Raises:
        ExampleFailed: it does not.
    """
    if not holds:
        raise ExampleFailed(found)
