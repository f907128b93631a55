"""The environment of workers, and the fork server that is started ahead of the server."""

from __future__ import annotations

import pytest

from torchere.serving.config.server_settings import ServerSettings, SnapshotModel
from torchere.serving.workers import spawn as module
from torchere.serving.workers.spawn import SPIN_COUNT, fork_server_ahead, worker_environment


def test_hidden_variables_do_not_reach_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("OPEN_TOKEN", "y")
    passed = worker_environment("SECRET.*")
    assert "SECRET_TOKEN" not in passed
    assert passed["OPEN_TOKEN"] == "y"
    assert "SECRET_TOKEN" in worker_environment("SECRET")  # of a part of a name nothing follows


@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_that_wait_sleep_soon_unless_the_operator_wants_it_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    found = worker_environment()
    assert chosen.items() <= found.items()
    assert found.get("GOMP_SPINCOUNT") == (chosen.get("GOMP_SPINCOUNT") if chosen else str(SPIN_COUNT))


@pytest.mark.parametrize(
    "settings",
    [
        ServerSettings(load_models=("m.mar",)),
        ServerSettings(load_workflows=("w.war",)),
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
    def refused(environment: object, modules: object) -> None:
        raise OSError("no process left")

    monkeypatch.setattr(module, "spawn", refused)
    with fork_server_ahead(ServerSettings(load_models=("m.mar",))) as fork_server:
        assert fork_server is None
