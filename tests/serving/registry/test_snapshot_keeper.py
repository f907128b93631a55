"""The keeper: a snapshot after each change that settled, in order, and none for what changed nothing."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.config.server_settings import SnapshotSettings
from torchere.serving.registry.snapshot import SnapshotKeeper
from torchere.serving.types import ModelKey


def kinds(directory: Path) -> list[str]:
    names = sorted(path.name for path in directory.iterdir())
    return [re.sub(r"\d+-(\w+)\.cfg", r"\1", name) for name in names]


def a_version(name: str = "m") -> Any:
    return SimpleNamespace(key=ModelKey(name, "1"), settled=asyncio.Event())


@pytest.fixture(autouse=True)
def empty_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in a table is another test's concern."""
    monkeypatch.setattr("torchere.serving.registry.snapshot.model_table", lambda served, lacking: {})


def keeper_of(directory: Path | None, served: dict[str, Any]) -> SnapshotKeeper:
    return SnapshotKeeper(SnapshotSettings(directory) if directory else None, lambda: served)


async def settle(keeper: SnapshotKeeper) -> None:
    await asyncio.gather(*keeper._changes)


def test_a_life_is_told_in_order(tmp_path: Path) -> None:
    async def life() -> None:
        keeper = keeper_of(tmp_path, {})
        keeper.changed()  # start-up models come before the first snapshot
        await keeper.started()
        keeper.changed()
        await settle(keeper)
        keeper.changed()
        await settle(keeper)
        await keeper.stopping()
        await keeper.stopping()
        keeper.changed()

    asyncio.run(life())
    assert kinds(tmp_path) == ["startup", "snapshot", "snapshot", "shutdown"]


def test_a_change_is_written_when_its_version_settled_and_is_still_there(tmp_path: Path) -> None:
    async def life() -> None:
        served: dict[str, Any] = {}
        keeper = keeper_of(tmp_path, served)
        await keeper.started()
        stays, taken_back = a_version(), a_version()
        served["m"] = SimpleNamespace(versions={"1": stays})
        keeper.changed(stays)
        keeper.changed(taken_back)
        await asyncio.sleep(0)
        assert kinds(tmp_path) == ["startup"]
        stays.settled.set()
        taken_back.settled.set()
        await settle(keeper)

    asyncio.run(life())
    assert kinds(tmp_path) == ["startup", "snapshot"]


def tables_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, failing: int = 0) -> list[str]:
    """What each snapshot held of six changes, of which five come while the first is written."""
    written: list[str] = []
    all_wait = threading.Event()
    served: dict[str, Any] = {}
    monkeypatch.setattr(
        "torchere.serving.registry.snapshot.model_table", lambda served, lacking: "".join(served)
    )

    def write(settings: SnapshotSettings, kind: str, content: Any) -> None:
        written.append(content["models"])
        if content["models"] == "a":
            all_wait.wait()
        if len(written) == failing:
            raise OSError("the disk is full")

    monkeypatch.setattr("torchere.serving.registry.snapshot.write_snapshot", write)

    async def life() -> None:
        keeper = keeper_of(tmp_path, served)
        await keeper.started()
        for name in "abcdef":
            served[name] = None
            keeper.changed()
            if name == "a":
                await until(lambda: len(written) == 2)
        await asyncio.sleep(0)
        all_wait.set()
        await keeper.written()

    asyncio.run(life())
    return written


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0)


def test_changes_that_wait_for_the_same_turn_share_one_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tables_of(tmp_path, monkeypatch) == ["", "a", "abcdef"]


def test_a_snapshot_that_failed_is_not_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables_of(tmp_path, monkeypatch, failing=3) == ["", "a", "abcdef", "abcdef"]


def test_the_end_does_not_wait_for_a_load(tmp_path: Path) -> None:
    async def life() -> None:
        keeper = keeper_of(tmp_path, {})
        await keeper.started()
        keeper.changed(a_version())
        await asyncio.sleep(0)
        await keeper.stopping()

    asyncio.run(life())
    assert kinds(tmp_path) == ["startup", "shutdown"]


def test_a_server_that_never_opened_writes_none(tmp_path: Path) -> None:
    asyncio.run(keeper_of(tmp_path, {}).stopping())
    assert kinds(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    asyncio.run(keeper_of(tmp_path / "file" / "config", {}).started())
    assert "no snapshot in" in caplog.text


def test_without_settings_nothing_happens(tmp_path: Path) -> None:
    async def life() -> None:
        keeper = keeper_of(None, {})
        await keeper.started()
        keeper.changed()
        await keeper.stopping()

    asyncio.run(life())
    assert kinds(tmp_path) == []


def test_what_was_in_a_snapshot_and_is_taken_back_is_in_the_newest_no_more(tmp_path: Path) -> None:
    async def life() -> None:
        loading, ready = a_version(), a_version("n")
        served: Any = {"m": SimpleNamespace(versions={"1": loading})}
        keeper = SnapshotKeeper(SnapshotSettings(tmp_path), lambda: served)
        await keeper.started()
        keeper.changed(loading)
        served = {**served, "n": SimpleNamespace(versions={"1": ready})}
        keeper.changed(ready)
        ready.settled.set()
        await keeper.written()  # a snapshot with both: the one that loads is wanted, too
        served = {"n": served["n"]}
        loading.settled.set()
        await settle(keeper)

    asyncio.run(life())
    assert kinds(tmp_path) == ["startup", "snapshot", "snapshot"]


def test_a_change_is_written_before_it_is_called_done(tmp_path: Path) -> None:
    async def life() -> None:
        settled, loading = a_version(), a_version()
        served: Any = {"m": SimpleNamespace(versions={"1": settled})}
        keeper = keeper_of(tmp_path, served)
        await keeper.started()
        keeper.changed(settled)
        keeper.changed(loading)  # nobody waits for that one
        settled.settled.set()
        await keeper.written()
        assert kinds(tmp_path) == ["startup", "snapshot"]
        await keeper.stopping()

    asyncio.run(life())


def test_a_snapshot_that_failed_is_tried_again_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def write(settings: SnapshotSettings, kind: str, content: Any) -> None:
        tries.append(kind)
        if len(tries) < 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchere.serving.registry.snapshot.write_snapshot", write)
    monkeypatch.setattr("torchere.serving.registry.snapshot.RETRY_S", (0.0,))

    async def life() -> None:
        keeper = keeper_of(tmp_path, {})
        await keeper.started()
        await until(lambda: len(tries) == 4)
        await settle(keeper)
        assert keeper._retry is None

    asyncio.run(life())
    assert tries == ["startup", "snapshot", "snapshot", "snapshot"]


def test_the_end_does_not_wait_for_another_try(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def life() -> None:
        keeper = keeper_of(tmp_path / "file" / "config", {})
        await keeper.started()
        await keeper.written()
        await keeper.stopping()
        assert keeper._retry is None

    asyncio.run(life())
