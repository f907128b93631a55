"""KServe's SDK in an environment of its own, `.peers/kserve`: it pins other versions than torchere has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / ".peers" / "kserve"
PACKAGE = "kserve==0.21.0"
_PROOF = "lib/python*/site-packages/kserve-0.21.0.dist-info/RECORD"
_BUILD_S = 600


def python() -> Path:
    """The interpreter of the environment, which is built when it is first needed; skips when it can't be."""
    if not list(FOLDER.glob(_PROOF)):
        try:
            _run(sys.executable, "-m", "venv", str(FOLDER))
            pip = [str(FOLDER / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
            _run(*pip, "--no-compile", PACKAGE)
        except (subprocess.SubprocessError, OSError) as err:
            words = str(getattr(err, "stderr", "") or err).strip().splitlines()[-1:]
            pytest.skip(f"{PACKAGE} can't be installed here: {words}")
    return FOLDER / "bin" / "python"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
