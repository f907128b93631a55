from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `/closed` a folder that this user may not look into."""
    stat = os.stat

    def refusing(path: str | Path, **options: bool) -> os.stat_result:
        if str(path).startswith("/closed/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refusing)
