"""What tests of several folders share: where the repository is, and the tools of deploy/tools.sh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says something of the machine's minute, nothing of the code.
settings.register_profile("without timing", deadline=None)
settings.load_profile("without timing")

ROOT = Path(__file__).resolve().parents[1]
TOOLS = (ROOT / ".tools/bin", ROOT / ".tools/venv/bin")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of this machine, but for `-m gpu`: what tests expect, and recordings hold, is a CPU's."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Finds a tool in .tools or on PATH; skips the test when there is none."""

    def find(name: str) -> str:
        found = shutil.which(name, path=os.pathsep.join([*map(str, TOOLS), os.environ["PATH"]]))
        if found is None:
            pytest.skip(f"{name} is not installed: `make tools` fetches it")
        return found

    return find
