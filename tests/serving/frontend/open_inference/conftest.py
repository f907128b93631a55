"""Requests with few items, and the same ones as if they had many."""

import pytest

from torchere.handlers.tensors import list_text


@pytest.fixture(params=[list_text.MANY_ITEMS, 0], ids=["few items", "many items"])
def items(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test as it is, and again as if its request had many items."""
    monkeypatch.setattr(list_text, "MANY_ITEMS", request.param)
