"""Models are quantised here without a search for the fastest engine."""

from __future__ import annotations

import pytest

from torchere.archiver.models.quantize import candidates


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which engine is fastest matters to no test here."""
    monkeypatch.setattr(candidates, "_BUDGET_S", 0.01)
