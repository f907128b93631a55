from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from torchere.serving.frontend.rest.listener import DeferredApp, build_after


class Building:
    """Makes an app that notes its scopes, when it is let."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.times = 0
        self.asked: list[str] = []

    def __call__(self) -> ASGIApp:
        self.times += 1
        assert self.may_go_on.wait(10)
        return self.answer

    async def answer(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        self.asked.append(scope["path"])


async def nothing(*_: object) -> Any:
    return {}


def test_requests_wait_for_one_app_and_are_all_answered_by_it() -> None:
    building = Building()

    async def scenario() -> None:
        app = DeferredApp(building)
        first = [asyncio.create_task(app({"path": path}, nothing, nothing)) for path in "ab"]
        while not building.times:  # the loop turns while it is built
            await asyncio.sleep(0)
        assert building.asked == []
        building.may_go_on.set()
        await asyncio.gather(*first)
        await app({"path": "c"}, nothing, nothing)

    asyncio.run(scenario())
    assert building.times == 1
    assert sorted(building.asked) == ["a", "b", "c"]


def test_apps_that_are_asked_for_at_the_same_time_are_built_one_after_the_other() -> None:
    first, second = Building(), Building()

    async def scenario() -> None:
        apps = [asyncio.create_task(DeferredApp(building).built()) for building in (first, second)]
        while not first.times + second.times:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)  # long enough for the other one to begin, if it may
        assert first.times + second.times == 1
        for building in (first, second):
            building.may_go_on.set()
        await asyncio.gather(*apps)

    asyncio.run(scenario())
    assert (first.times, second.times) == (1, 1)


def test_one_that_was_built_before_answers_at_once() -> None:
    building = Building()
    building.may_go_on.set()

    async def scenario() -> None:
        app = DeferredApp(building)
        assert await app.built() == building.answer
        await app({"path": "a"}, nothing, nothing)

    asyncio.run(scenario())
    assert (building.times, building.asked) == (1, ["a"])


def test_who_goes_away_takes_the_app_from_nobody() -> None:
    building = Building()

    async def scenario() -> None:
        app = DeferredApp(building)
        gone, stays = (
            asyncio.create_task(app({"path": path}, nothing, nothing)) for path in ("gone", "stays")
        )
        while not building.times:
            await asyncio.sleep(0)
        gone.cancel()
        building.may_go_on.set()
        await stays

    asyncio.run(scenario())
    assert building.asked == ["stays"]


def test_what_the_building_raises_comes_out_of_every_request() -> None:
    def build() -> ASGIApp:
        raise ImportError("no framework")

    async def scenario() -> None:
        app = DeferredApp(build)
        for _ in range(2):
            with pytest.raises(ImportError, match="no framework"):
                await app({"path": "a"}, nothing, nothing)

    asyncio.run(scenario())


def test_apps_are_built_when_everything_is_loaded_and_not_before() -> None:
    building = Building()
    building.may_go_on.set()

    async def scenario() -> None:
        loaded = [asyncio.Event(), asyncio.Event()]
        later = asyncio.create_task(
            build_after([event.wait() for event in loaded], [DeferredApp(building)], answers_s=0)
        )
        loaded[0].set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert building.times == 0
        loaded[1].set()
        await later

    asyncio.run(scenario())
    assert building.times == 1


@pytest.mark.parametrize("models", [0, 1])
def test_apps_are_built_without_models_and_despite_one_that_does_not_load(models: int) -> None:
    building = Building()
    building.may_go_on.set()

    async def scenario() -> None:
        never = [asyncio.Event().wait() for _ in range(models)]
        await build_after(never, [DeferredApp(building)], within_s=0.01, answers_s=0.01)

    asyncio.run(scenario())
    assert building.times == 1


def test_who_waited_for_the_models_is_answered_before_apps_are_built() -> None:
    building = Building()
    building.may_go_on.set()

    async def scenario() -> None:
        app = DeferredApp(building)
        later = asyncio.create_task(build_after([], [app], answers_s=3600))
        await asyncio.sleep(0.05)
        assert building.times == 0
        await app.built()  # who asks for it waits for nothing else
        later.cancel()

    asyncio.run(scenario())
    assert building.times == 1
