"""Nothing stays for ever because it was frozen. The handlers of closed pools: see `test_threads.py`."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from torchere.serving.execution import letting_go


class Circle:
    """What only the collector can free."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collects_when_asked_only() -> Iterator[None]:
    """The collector is on, as in a server, and does not come by itself."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_garbage_is_not_frozen_with_the_models() -> None:
    circle = Circle()
    gone = weakref.ref(circle)
    del circle
    letting_go.freeze()
    assert gone() is None


def test_what_was_frozen_in_use_is_freed_in_the_end() -> None:
    circle = Circle()
    gone = weakref.ref(circle)
    letting_go.freeze()
    del circle
    for _ in range(letting_go.WALK_EVERY):
        letting_go.freeze()
    assert gone() is None


def test_a_start_does_not_walk_over_what_was_imported() -> None:
    circle = Circle()
    still_there = weakref.ref(circle)
    del circle
    gc.disable()
    try:
        letting_go.freeze()
    finally:
        gc.enable()
    assert still_there() is not None
    assert gc.get_freeze_count() > 0
