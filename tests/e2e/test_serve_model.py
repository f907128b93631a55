"""`torchere serve MODEL` as a newcomer runs it: a file of a model, an empty cache, no archive."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import servers
import torch
from no_torch import NoTorch


def test_a_file_of_torchscript_is_served_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.jit.script(torch.nn.Softmax(1)).save(tmp_path / "odds.pt")
    (tmp_path / "example.json").write_text("[[0.0, 0.0]]")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for again in (False, True):
        if again:  # packing needs torch, which the server does not
            forbidden = NoTorch(tmp_path)
            monkeypatch.setenv("PYTHONPATH", forbidden.environment["PYTHONPATH"])
        server = servers.start(tmp_path, "odds.pt", "--example", "example.json", "--dt", store=None)
        try:
            server.follow("odds:1.0 is ready")
            reply = server.call("POST", "/predictions/odds", b"[1.0, 1.0]", content_type="application/json")
            assert (reply.status, reply.json()) == (200, [0.5, 0.5]), server.log()
            found = re.search(r"^(odds.pt: packed before|packed): ", server.log(), re.MULTILINE)
            assert found and ("before" in found[1]) == again
        finally:
            assert server.stop() == 0
    assert not forbidden.attempts
