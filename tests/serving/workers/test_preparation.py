"""What workers are forked from is started before the server's modules are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchere.serving.config.server_settings import ServerSettings, SnapshotModel
from torchere.serving.workers import preparation
from torchere.serving.workers.preparation import fork_server_ahead


@pytest.mark.parametrize(
    "settings",
    [
        ServerSettings(load_models=("m.mar",)),
        ServerSettings(snapshot_models=(SnapshotModel("m", "1.0", "m.mar", True, {}),)),
    ],
)
def test_the_fork_server_is_started_for_models_of_the_start_and_ends_afterwards(
    settings: ServerSettings,
) -> None:
    with fork_server_ahead(settings) as fork_server:
        assert fork_server is not None
        assert fork_server.process.poll() is None
    assert fork_server.process.poll() is not None


def test_a_server_that_begins_without_models_starts_none() -> None:
    with fork_server_ahead(ServerSettings()) as fork_server:
        assert fork_server is None


def test_a_fork_server_that_can_not_be_started_is_left_to_who_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(environment: object) -> None:
        raise OSError("no process left")

    monkeypatch.setattr(preparation, "spawn", refused)
    with fork_server_ahead(ServerSettings(load_models=("m.mar",))) as fork_server:
        assert fork_server is None


def test_it_imports_nothing_that_the_fork_server_would_wait_for() -> None:
    code = """
import sys
import torchere.serving.workers.preparation
print(sorted({"torch", "numpy", "fastapi", "grpc", "yaml"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
