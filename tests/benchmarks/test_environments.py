"""The peers' environments, of a peer that is there in every one: pip."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import environments
from harness.environments import Peer, environment


def test_an_environment_is_built_once_and_again_for_another_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peer = Peer("pip", ("--dry-run", "pip"), "lib/python*/site-packages/pip")
    monkeypatch.setattr(environments, "PEERS", tmp_path)
    monkeypatch.setitem(environments.KNOWN, "pip", peer)
    folder = environment("pip")
    python, mark = folder / "bin" / "python", folder / "mark"
    assert python.resolve() == Path(sys.executable).resolve()
    mark.touch()
    assert environment("pip") == folder
    assert mark.exists()
    python.unlink()
    python.symlink_to("/bin/sh")
    environment("pip")
    assert python.resolve() == Path(sys.executable).resolve()
    assert not mark.exists()
