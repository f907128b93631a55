"""Loading of models that are registered already, and of names that the store has no archive for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from torchere.serving.config.server_settings import ModelSettings
from torchere.serving.errors import Conflict, InvalidRequest
from torchere.serving.frontend.control import VersionDescription
from torchere.serving.frontend.open_inference.repository import Repository
from torchere.serving.registry.version import VersionState
from torchere.serving.types import ModelKey


@pytest.mark.parametrize(
    ("has", "asked", "gets"),
    [((0, 0), {}, (1, 1)), ((2, 3), {}, (2, 3)), ((2, 3), {"initial_workers": 4}, (4, 4))],
)
def test_what_is_registered_and_not_ready_is_brought_up(
    planes: Any, monkeypatch: pytest.MonkeyPatch, has: tuple[int, int], asked: Any, gets: tuple[int, int]
) -> None:
    async def taken(wish: Any) -> None:
        raise Conflict("Model version 1.0 is already registered for model echo")

    control = planes.control
    monkeypatch.setattr(control, "register", taken)
    settings = ModelSettings().scaled(*has)
    control.description = replace(control.description, state=VersionState.LOADING, settings=settings)
    asyncio.run(Repository(control).load("echo", asked))
    least, most = gets
    wish = {"min_executors": least, "max_executors": most, "synchronous": True}
    assert control.calls[-1] == ("scale", "echo", "1.0", wish)


@pytest.fixture
def two_versions(planes: Any) -> Any:
    """A control plane with `echo` in version 1.0, the default, which has failed, and 2.0, which is ready."""
    control = planes.control
    failed = replace(control.description, state=VersionState.FAILED, condition="failed")
    ready = replace(control.description, key=ModelKey("echo", "2.0"), url="http://host/v2/echo2.mar")
    control.versions = {"1.0": failed, "2.0": ready}

    def describe(model: str, version: str | None) -> list[VersionDescription]:
        return [*control.versions.values()] if version == "all" else [control.versions[version or "1.0"]]

    control.describe = describe
    control.list_models = lambda limit, page_token: control.page
    return control


def test_a_load_waits_for_the_default_version_though_another_one_is_ready(two_versions: Any) -> None:
    asyncio.run(Repository(two_versions).load("echo", {}))
    assert [call[:3] for call in two_versions.calls] == [("scale", "echo", "1.0")]


def test_a_load_of_an_archive_that_no_version_came_from_registers_it(two_versions: Any) -> None:
    asyncio.run(Repository(two_versions).load("echo", {"url": "echo3.mar"}))
    ((called, wish, _),) = two_versions.calls
    assert (called, wish.url, wish.name) == ("register", "echo3.mar", "echo")


@pytest.mark.parametrize("restored", [False, True])
def test_a_load_of_an_archive_that_a_ready_version_came_from_changes_nothing(
    two_versions: Any, restored: bool
) -> None:
    if restored:  # by a start, which knows the file in the store
        there = replace(two_versions.versions["2.0"], url="echo2.mar", loaded_at_startup=True)
        two_versions.versions["2.0"] = there
    asyncio.run(Repository(two_versions).load("echo", {"url": "http://host/v2/echo2.mar"}))
    assert not two_versions.calls


def test_a_load_of_another_archive_with_the_same_version_is_a_conflict(two_versions: Any) -> None:
    two_versions.error = Conflict("Model version 2.0 is already registered for model echo")
    with pytest.raises(Conflict):
        asyncio.run(Repository(two_versions).load("echo", {"url": "other.mar"}))
    assert [call[0] for call in two_versions.calls] == ["register"]


def test_an_unload_removes_all_versions_before_it_waits_for_their_requests(two_versions: Any) -> None:
    gone: list[str] = []

    async def unregister(model: str, version: str) -> None:
        gone.append(version)
        await asyncio.sleep(0 if version == "1.0" else 3600)

    async def main() -> None:
        two_versions.unregister = unregister
        unloading = asyncio.ensure_future(Repository(two_versions).unload("echo"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert gone == ["2.0", "1.0"]
        assert not unloading.done()
        unloading.cancel()

    asyncio.run(main())


def test_files_of_the_client_are_refused_and_not_ignored(planes: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^parameters\.file:1/model\.pt: found the bytes of a file"):
        asyncio.run(Repository(planes.control).load("echo", {"config": "{}", "file:1/model.pt": b"x"}))
    assert not planes.control.calls


def test_a_configuration_of_the_client_is_refused_and_an_empty_one_is_none(planes: Any) -> None:
    asked = '{"max_batch_size": 8, "instance_group": [{"count": 2}]}'
    with pytest.raises(
        InvalidRequest, match=r"^parameters\.config: found a model configuration, expected none"
    ):
        asyncio.run(Repository(planes.control).load("echo", {"config": asked}))
    assert not planes.control.calls
    asyncio.run(Repository(planes.control).load("echo", {"config": "{}"}))
