"""Loading of models that are registered already, and of names that the store has no archive for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from torchere.serving.config.server_settings import ModelSettings
from torchere.serving.errors import Conflict, InvalidRequest
from torchere.serving.frontend.open_inference.repository import Repository
from torchere.serving.registry.version import VersionState


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
    assert control.calls[-1] == ("scale", "echo", None, wish)


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
