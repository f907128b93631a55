"""The desired state: real archives in a real store, and no executors."""

import asyncio
import json
import threading
import zipfile
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pools import until

from torchere.serving.config.model_settings import Asked
from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import configure
from torchere.serving.config.server_settings import (
    ParallelSettings,
    ServerSettings,
    SnapshotModel,
    SnapshotSettings,
)
from torchere.serving.errors import (
    Conflict,
    InvalidArchive,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    ServingError,
)
from torchere.serving.registry import registry as registry_module
from torchere.serving.registry import snapshot as snapshot_module
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.registry import Registry
from torchere.serving.registry.version import Version, VersionState
from torchere.serving.store.fetch import Origins
from torchere.serving.store.package import OpenedArchive, Store, StoredArchive
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.workers.pool import WorkerPool

HAD: dict[str, object] = {"minWorkers": 0, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 5}


def pack(path: Path, version: str = "1.0") -> None:
    model = {"modelName": "m", "modelVersion": version, "handler": "h.py"}
    draft = path.with_suffix(".new")  # a server may read the file at any time
    with zipfile.ZipFile(draft, "w") as archive:
        archive.writestr("h.py", "def handle(data, context): return data\n")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    draft.replace(path)


@asynccontextmanager
async def registry_of(folder: Path, **settings: object) -> AsyncIterator[Registry]:
    (folder / "store").mkdir()
    pack(folder / "store" / "m.mar")
    server = ServerSettings(model_store=folder / "store", temp_dir=folder, **settings)  # type: ignore[arg-type]
    registry = Registry(server, RegistryMetrics(Metrics("host")))
    yield registry
    await registry.close()


def test_what_is_discarded_late_leaves_what_has_its_name_by_now(tmp_path: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            first = await registry.register(Wanted("m.mar", Asked()))
            await registry.unregister("m", None)
            second = await registry.register(Wanted("m.mar", Asked()))
            registry.discard(first)
            await first.settled.wait()
            assert registry.find("m", "1.0") is second
            assert second.wanted

    asyncio.run(main())


def test_the_runtime_of_the_cpp_backend_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            await registry.register(Wanted("m.mar", Asked(), runtime="LSP"))
            assert "m:1.0: the handler of runtime LSP is h.py; expected a class in a shared" in caplog.text

    asyncio.run(main())


def test_a_model_over_several_machines_is_scaled_to_one_worker_at_most(tmp_path: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            version = await registry.register(Wanted("m.mar", Asked()))
            parallel = ParallelSettings("tp", 1, least_machines=2, most_machines=2)
            version.settings = replace(version.settings, parallel=parallel)
            registry.scale(version, 3, 5)
            assert (version.target, version.settings.max_executors) == (1, 1)
            registry.scale(version, 0, 0)  # before the reconciler begins: nothing is loaded

    asyncio.run(main())


@pytest.mark.parametrize(
    ("size", "wanted", "expected"),
    [(1, (2, 4), 2), (3, (2, 4), 3), (6, (2, 4), 4), (2, (0, 0), 0), (0, (1, 1), 1)],
)
def test_scaling_moves_no_further_than_into_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, wanted: tuple[int, int], expected: int
) -> None:
    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            version = await registry.register(Wanted("m.mar", Asked()))
            with monkeypatch.context() as patched:
                patched.setattr(WorkerPool, "size", size)
                registry.scale(version, *wanted)
            assert version.target == expected
            registry.scale(version, 0, 0)  # before the reconciler begins: nothing is loaded

    asyncio.run(main())


def test_a_runtime_that_is_none_is_refused_before_the_archive_is_looked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            with pytest.raises(InvalidRequest, match="Invalid RuntimeType value: InvalidRuntime"):
                await registry.register(Wanted("not-there.mar", Asked(), runtime="InvalidRuntime"))

    asyncio.run(main())


def folders(place: Path) -> list[str]:
    """What there is below the temporary folder of archives that were unpacked."""
    return [path.name for path in place.rglob("h.py")]


@pytest.fixture
def slow_unpacking(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Unpacking says that it has begun, and waits for its go."""
    begun, go_on = threading.Event(), threading.Event()
    unpack = Store.unpack

    def slowly(self: Store, url: str, archive: OpenedArchive) -> StoredArchive:
        begun.set()
        go_on.wait(30)
        return unpack(self, url, archive)

    monkeypatch.setattr(Store, "unpack", slowly)
    return begun, go_on


def test_a_registration_that_is_given_up_while_it_is_unpacked_leaves_no_folder(
    tmp_path: Path, slow_unpacking: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = slow_unpacking

    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            task = asyncio.create_task(registry.register(Wanted("m.mar", Asked())))
            await asyncio.to_thread(begun.wait)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait({task})
            assert task.cancelled()
            assert folders(tmp_path) == []

    asyncio.run(main())


def test_an_archive_that_takes_long_to_unpack_leaves_the_threads_of_others_free(
    tmp_path: Path, slow_unpacking: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = slow_unpacking

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with registry_of(tmp_path) as registry:
            task = asyncio.create_task(registry.register(Wanted("m.mar", Asked())))
            while not begun.is_set():
                await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.to_thread(go_on.set), 5)
            await task

    asyncio.run(main())


@pytest.mark.parametrize("broken", [0, 1])
def test_of_many_with_the_same_name_one_is_unpacked_at_a_time_until_it_is_taken(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[str] = []
    unpack = Store.unpack

    def watched(self: Store, url: str, archive: OpenedArchive) -> StoredArchive:
        unpacked.append(url)
        if len(unpacked) <= broken:
            raise InvalidArchive("The archive is broken.")
        return unpack(self, url, archive)

    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            many = [registry.register(Wanted("m.mar", Asked())) for _ in range(20)]
            ends = [type(end) for end in await asyncio.gather(*many, return_exceptions=True)]
            assert Counter(ends) == +Counter({Version: 1, Conflict: 19 - broken, InvalidArchive: broken})
            assert len(unpacked) == 1 + broken

    monkeypatch.setattr(Store, "unpack", watched)
    asyncio.run(main())


def test_of_two_registrations_of_a_url_at_once_one_is_told_what_a_later_one_is(tmp_path: Path) -> None:
    pack(tmp_path / "bought.mar")
    url = f"file://{tmp_path}/bought.mar"

    async def main() -> None:
        async with registry_of(tmp_path, allowed_urls=("file://.*",)) as registry:
            both = (registry.register(Wanted(url, Asked())) for _ in range(2))
            outcomes = await asyncio.gather(*both, return_exceptions=True)
            with pytest.raises(ServingError) as later:
                await registry.register(Wanted(url, Asked()))
            assert later.value.message == "Model file already exists bought.mar"
            first, second = sorted(outcomes, key=lambda one: isinstance(one, ServingError))
            assert registry.find("m", "1.0") is first
            assert (type(second), str(second)) == (type(later.value), str(later.value))
            assert (tmp_path / "store" / "bought.mar").is_file()

    asyncio.run(main())


def test_a_registration_that_fails_after_it_was_unpacked_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    async def main() -> None:
        async with registry_of(tmp_path) as registry:
            with pytest.raises(OSError, match="Input/output error"):
                await registry.register(Wanted("m.mar", Asked()))
            assert folders(tmp_path) == []

    monkeypatch.setattr(Store, "share_weights", fail)
    asyncio.run(main())


def test_the_loop_goes_on_while_the_store_is_looked_through_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def slowly(self: Store) -> list[str]:
        assert goes_on.wait(5)
        return []

    async def main() -> None:
        async with registry_of(tmp_path, load_models=("all",)) as registry:
            asyncio.get_running_loop().call_soon(goes_on.set)
            await registry.load_at_startup(await registry.wanted_at_startup())
            assert not registry.served()

    monkeypatch.setattr(Store, "names", slowly)
    asyncio.run(main())


def test_settings_for_a_version_that_no_archive_has_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers: dict[str, object] = {"minWorkers": 0}
    settings = {"m": {"9.9": workers, "1.0": workers}, "later": {"1.0": workers}}

    async def main() -> None:
        async with registry_of(tmp_path, load_models=("all",), model_defaults=settings) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())

    asyncio.run(main())
    told = [each.getMessage() for each in caplog.records if each.getMessage().startswith("models:")]
    assert told == [
        "models: the settings for version 9.9 of m have no effect until it is registered; "
        "the start has registered version 1.0"
    ]


def test_a_model_of_the_start_from_another_archive_is_missing_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=("n=away.mar",)) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            assert registry.missing() == ("n",)
            pack(tmp_path / "store" / "other.mar")
            stands_in = await registry.register(Wanted("other.mar", Asked(), name="n"))
            assert registry.missing() == ()
            additional = await registry.register(Wanted("other.mar", Asked(), name="additional"))
            assert (registry.of_the_start(stands_in), registry.of_the_start(additional)) == (True, False)

    asyncio.run(main())


def test_the_error_of_a_workflow_among_the_models_of_a_start_names_the_key_that_loads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=("w.war",), default_handler="h.py") as registry:
            with zipfile.ZipFile(tmp_path / "store" / "w.war", "w") as war:
                war.writestr("WAR-INF/MANIFEST.json", "{}")
            await registry.load_at_startup(await registry.wanted_at_startup())
            assert registry.missing() == ("w_war",)

    asyncio.run(main())
    assert (
        "Failed to load model: w.war: w.war is a workflow, not a model: name it in load_workflows, or "
        "register it at /workflows." in caplog.messages
    )


def test_a_step_of_a_workflow_from_the_archive_of_a_missing_model_stands_for_no_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=("away.mar",)) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            missing = registry.missing()
            pack(tmp_path / "store" / "away.mar")
            await registry.register(Wanted("away.mar", Asked(), name="flow__step", workflow="flow"))
            assert registry.missing() == missing != ()

    asyncio.run(main())


def test_a_model_that_can_not_be_restored_now_is_tried_again_by_the_next_start(tmp_path: Path) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    models = tuple(SnapshotModel(name, "1.0", f"{name}.mar", True, HAD) for name in ("m", "n"))

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, snapshot_models=models) as registry:
            (tmp_path / "store" / "n.mar").touch()  # no archive, as one is where the disk is full
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            assert registry.missing() == ("n",)
            pack(tmp_path / "store" / "n.mar")
            await registry.register(Wanted("n.mar", Asked(), name="n"))
            await (await registry.unregister("n", None)).settled.wait()

    asyncio.run(main())
    first, *_, last = sorted(snapshots.directory.iterdir())
    assert configure(read_properties(first)).checked().snapshot_models[1] == models[1]
    assert [model.name for model in configure(read_properties(last)).checked().snapshot_models] == ["m"]


def restored(directory: Path) -> list[SnapshotModel]:
    """What the next start would have."""
    return list(configure(read_properties(max(directory.iterdir()))).checked().snapshot_models)


@pytest.mark.parametrize("lacking", ["a", "b"])
def test_of_two_models_from_one_archive_the_one_that_lacks_is_tried_again(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    models = tuple(SnapshotModel(name, "1.0", "m.mar", True, HAD) for name in ("a", "b"))
    outcomes, unpack = iter(name == lacking for name in ("a", "b")), Store.unpack

    def unpack_unless_full(store: Store, url: str, archive: OpenedArchive) -> StoredArchive:
        if next(outcomes):
            raise InvalidArchive("It can't be unpacked.", "No space left on device")
        return unpack(store, url, archive)

    monkeypatch.setattr(Store, "unpack", unpack_unless_full)

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, snapshot_models=models) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            assert registry.missing() == (lacking,)
            assert sorted(model.name for model in restored(snapshots.directory)) == ["a", "b"]
            await (await registry.unregister("b" if lacking == "a" else "a", None)).settled.wait()

    asyncio.run(main())
    assert [model.name for model in restored(snapshots.directory)] == [lacking]


@pytest.mark.parametrize("version", [None, "1.0"])
def test_a_missing_model_that_is_unregistered_is_not_tried_again(version: str | None, tmp_path: Path) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    models = (SnapshotModel("n", "1.0", "n.mar", True, HAD),)

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, snapshot_models=models) as registry:
            (tmp_path / "store" / "n.mar").touch()
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            for other in (("n", "2.0"), ("k", version), ("n", version)):
                assert registry.missing() == ("n",)
                with pytest.raises(NotFound):
                    await registry.unregister(*other)
            assert registry.missing() == ()
            await registry.written()
            assert restored(snapshots.directory) == []

    asyncio.run(main())


@pytest.mark.parametrize(("chosen", "default"), [(None, "2.0"), ("3.0", "3.0")])
def test_the_default_of_the_next_start_is_the_one_that_lacks_unless_another_is_chosen(
    chosen: str | None, default: str, tmp_path: Path
) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    numbers = ("1.0", "2.0", "3.0")
    models = tuple(SnapshotModel("m", each, f"{each}.mar", each == "2.0", HAD) for each in numbers)

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, snapshot_models=models) as registry:
            for number in numbers:
                pack(tmp_path / "store" / f"{number}.mar", number)
            (tmp_path / "store" / "2.0.mar").write_bytes(b"")
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            if chosen is not None:
                registry.set_default("m", chosen)

    asyncio.run(main())
    defaults = {model.version: model.default_version for model in restored(snapshots.directory)}
    assert defaults == {number: number == default for number in numbers}


@pytest.mark.parametrize(("registered", "left"), [("1.0", ["2.0"]), ("3.0", [])])
def test_of_two_missing_versions_the_one_that_is_registered_is_there_and_another_stands_for_both(
    registered: str, left: list[str], tmp_path: Path
) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    models = tuple(SnapshotModel("m", each, f"{each}.mar", each == "2.0", HAD) for each in ("1.0", "2.0"))

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, snapshot_models=models) as registry:
            for model in models:
                (tmp_path / "store" / model.archive).touch()
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            pack(tmp_path / "store" / f"{registered}.mar", registered)
            await registry.register(Wanted(f"{registered}.mar", Asked()))

    asyncio.run(main())
    assert [model.version for model in restored(snapshots.directory)] == [registered, *left]


async def next_start(folder: Path, snapshots: SnapshotSettings, **settings: Any) -> tuple[str, ...]:
    """What is served after a start by the newest snapshot, and `!` before what is missing."""
    server = configure(read_properties(max(snapshots.directory.iterdir()))).checked()
    server = replace(
        server, model_store=folder / "store", temp_dir=folder, snapshots=snapshots, load_models=(), **settings
    )
    registry = Registry(server, RegistryMetrics(Metrics("host")))
    await registry.load_at_startup(await registry.wanted_at_startup())
    await registry.opened()
    found = (*registry.served(), *(f"!{name}" for name in registry.missing()))
    await registry.close()
    return found


@pytest.mark.parametrize("items", [("m.mar", "b=broken.mar"), ("all",)])
def test_what_never_could_be_unpacked_is_tried_again_by_every_start_until_it_can(
    items: tuple[str, ...], tmp_path: Path
) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    name = "b" if "all" not in items else "m"

    async def main() -> None:
        async with registry_of(tmp_path, load_models=items, snapshots=snapshots) as registry:
            (tmp_path / "store" / "broken.mar").touch()
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
        missing = "!b" if name == "b" else "!broken"
        assert await next_start(tmp_path, snapshots) == ("m", missing)
        assert await next_start(tmp_path, snapshots) == ("m", missing)
        pack(tmp_path / "store" / "broken.mar", "2.0")
        expected = ("m", "b") if name == "b" else ("m",)
        assert await next_start(tmp_path, snapshots) == expected
        assert {(model.name, model.version) for model in restored(snapshots.directory)} == {
            ("m", "1.0"),
            (name, "2.0"),
        }

    asyncio.run(main())


def test_of_all_a_store_holds_what_was_taken_out_of_it_is_not_missed(tmp_path: Path) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")

    async def main() -> None:
        async with registry_of(tmp_path, load_models=("all",), snapshots=snapshots) as registry:
            (tmp_path / "store" / "broken.mar").touch()
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
        (tmp_path / "store" / "broken.mar").unlink()
        assert await next_start(tmp_path, snapshots) == ("m",)

    asyncio.run(main())


def test_what_a_named_item_lacks_is_missed_as_long_as_it_is_not_there(tmp_path: Path) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")

    async def main() -> None:
        async with registry_of(tmp_path, load_models=("away.mar",), snapshots=snapshots) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
        assert await next_start(tmp_path, snapshots) == ("!away",)

    asyncio.run(main())


def test_what_would_not_load_leaves_missing_what_it_stood_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=("n=away.mar",)) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            failing = await registry.register(Wanted("m.mar", Asked(), name="n"))
            assert registry.missing() == ()
            registry.discard(failing)
            assert registry.missing() == ("n",)
            registry.discard(failing)
            good = await registry.register(Wanted("m.mar", Asked(), name="n"))
            registry.discard(failing)  # somebody else's by now
            assert registry.missing() == ()
            await (await registry.unregister("n", None)).settled.wait()
            registry.discard(good)
            assert registry.missing() == ()

    asyncio.run(main())


def test_a_default_that_was_chosen_meanwhile_outlives_what_would_not_load(tmp_path: Path) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    models = tuple(SnapshotModel("m", each, f"{each}.mar", each == "2.0", HAD) for each in ("1.0", "2.0"))

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, snapshot_models=models) as registry:
            pack(tmp_path / "store" / "1.0.mar", "1.0")
            (tmp_path / "store" / "2.0.mar").touch()
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            pack(tmp_path / "store" / "2.0.mar", "2.0")
            failing = await registry.register(Wanted("2.0.mar", Asked()))
            registry.set_default("m", "1.0")
            registry.discard(failing)
            assert registry.missing() == ("m",)

    asyncio.run(main())
    assert {model.version: model.default_version for model in restored(snapshots.directory)} == {
        "1.0": True,
        "2.0": False,
    }


def test_a_download_stays_as_long_as_a_version_was_registered_from_it(tmp_path: Path) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    pack(tmp_path / "fetched.mar")

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, allowed_urls=("file://.*",)) as registry:
            await registry.opened()
            await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked(), name="a"))
            await registry.register(Wanted("m.mar", Asked(), name="c"))
            await registry.register(Wanted("fetched.mar", Asked(), name="b"))
            await (await registry.unregister("a", None)).settled.wait()
            await registry.written()
            assert await next_start(tmp_path, snapshots) == ("c", "b")
            await (await registry.unregister("c", None)).settled.wait()
            assert (tmp_path / "store" / "fetched.mar").exists()
            await (await registry.unregister("b", None)).settled.wait()
            assert not (tmp_path / "store" / "fetched.mar").exists()

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_download_stays_until_a_snapshot_on_disk_names_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    pack(tmp_path / "fetched.mar")
    fetched = tmp_path / "store" / "fetched.mar"
    begun, go_on = threading.Event(), threading.Event()
    write = snapshot_module.write_snapshot

    def slowly(*asked: Any) -> Path:
        begun.set()
        go_on.wait(30)
        if fails:
            raise OSError(28, "No space left on device")
        return write(*asked)

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, allowed_urls=("file://.*",)) as registry:
            await registry.opened()
            version = await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked(), name="a"))
            await version.settled.wait()
            await registry.written()
            monkeypatch.setattr(snapshot_module, "write_snapshot", slowly)
            await registry.unregister("a", None)
            await asyncio.to_thread(begun.wait)
            await asyncio.sleep(0.05)
            assert fetched.exists()
            go_on.set()
            await version.settled.wait()
            assert fetched.exists() is fails
            monkeypatch.setattr(snapshot_module, "write_snapshot", write)
            assert await next_start(tmp_path, snapshots) == (("a",) if fails else ())
            assert (f"{fetched} stays in the store" in caplog.text) is fails

    asyncio.run(main())


def test_a_download_that_would_not_load_is_deleted_if_a_snapshot_named_it_meanwhile(tmp_path: Path) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    pack(tmp_path / "fetched.mar")

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, allowed_urls=("file://.*",)) as registry:
            await registry.opened()
            failing = await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked(), name="a"))
            await failing.settled.wait()
            await registry.written()
            assert {model.name for model in restored(snapshots.directory)} == {"a"}
            registry.discard(failing)  # as if it had not loaded
            await failing.settled.wait()
            assert not (tmp_path / "store" / "fetched.mar").exists()
            assert not restored(snapshots.directory)

    asyncio.run(main())


def test_an_unwritable_folder_of_snapshots_keeps_no_downloads(tmp_path: Path) -> None:
    pack(tmp_path / "fetched.mar")
    (tmp_path / "config").touch()
    snapshots = SnapshotSettings(tmp_path / "config")

    async def main() -> None:
        async with registry_of(tmp_path, snapshots=snapshots, allowed_urls=("file://.*",)) as registry:
            await registry.opened()
            await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked(), name="a"))
            await (await registry.unregister("a", None)).settled.wait()
            assert not (tmp_path / "store" / "fetched.mar").exists()

    asyncio.run(main())


def test_a_download_of_a_version_that_is_gone_is_there_for_no_registration(tmp_path: Path) -> None:
    pack(tmp_path / "fetched.mar")
    go_on = threading.Event()

    async def main() -> None:
        async with registry_of(tmp_path, allowed_urls=("file://.*",)) as registry:
            await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked(), name="a"))
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1))
            busy = loop.run_in_executor(None, go_on.wait, 10)
            leaving = await registry.unregister("a", None)
            await until(lambda: leaving.state is VersionState.GONE)
            with pytest.raises(ModelNotFound):
                await registry.register(Wanted("fetched.mar", Asked(), name="b"))
            go_on.set()
            await busy

    asyncio.run(main())


@pytest.mark.parametrize("is_unregistered", [False, True])
def test_a_download_stays_when_the_server_stops_unless_its_model_was_unregistered(
    tmp_path: Path, is_unregistered: bool
) -> None:
    pack(tmp_path / "fetched.mar")

    async def main() -> None:
        async with registry_of(tmp_path, allowed_urls=("file://.*",)) as registry:
            await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked(), name="a"))
            if is_unregistered:
                await registry.unregister("a", None)
        assert (tmp_path / "store" / "fetched.mar").exists() is not is_unregistered

    asyncio.run(main())


def test_a_registration_whose_download_can_not_be_deleted_fails_with_its_own_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Origins, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    pack(tmp_path / "fetched.mar")
    monkeypatch.setattr(Origins, "delete", refuse)

    async def main() -> None:
        async with registry_of(tmp_path, allowed_urls=("file://.*",)) as registry:
            await registry.register(Wanted("m.mar", Asked()))
            with pytest.raises(Conflict):
                await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked()))

    asyncio.run(main())


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_download_stays_for_a_registration_that_uses_it_and_is_under_way(
    tmp_path: Path, slow_unpacking: tuple[threading.Event, threading.Event], is_given_up: bool
) -> None:
    pack(tmp_path / "fetched.mar")
    fetched = tmp_path / "store" / "fetched.mar"
    begun, go_on = slow_unpacking

    async def main() -> None:
        async with registry_of(tmp_path, allowed_urls=("file://.*",)) as registry:
            go_on.set()
            await registry.register(Wanted(f"file://{tmp_path}/fetched.mar", Asked(), name="a"))
            begun.clear()
            go_on.clear()
            second = asyncio.create_task(registry.register(Wanted("fetched.mar", Asked(), name="b")))
            await asyncio.to_thread(begun.wait)
            await (await registry.unregister("a", None)).settled.wait()
            assert fetched.exists()
            if is_given_up:
                second.cancel()
                await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait({second})
            assert fetched.exists() is not is_given_up
            if not is_given_up:
                await (await registry.unregister("b", None)).settled.wait()
                assert not fetched.exists()

    asyncio.run(main())


def test_models_of_the_command_line_join_those_of_a_snapshot_which_keep_their_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry: dict[str, object] = {"minWorkers": 0, "maxWorkers": 0, "batchSize": 7, "maxBatchDelay": 100}
    models = (SnapshotModel("m", "1.0", "m.mar", True, entry),)

    async def main() -> None:
        items = ("m.mar", "n=m.mar", "typo.mar")
        async with registry_of(tmp_path, load_models=items, snapshot_models=models) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            sizes = {str(each.key): each.settings.batch.max_batch_size for each in registry.versions()}
            assert sizes == {"m:1.0": 7, "n:1.0": 1}

    asyncio.run(main())
    assert [line.split(":")[1].strip() for line in caplog.messages if "Failed to load" in line] == [
        "typo.mar"
    ]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/n.mar", "http://host/../n.mar", "file://{}/odd.mar"])
def test_a_url_that_fails_at_the_start_is_logged_without_its_query(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    pack(tmp_path / "odd.mar", version="a/b")
    url = url.format(tmp_path)

    async def main() -> None:
        items = (f"n={url}?signature=secret",)
        async with registry_of(tmp_path, load_models=items) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())

    asyncio.run(main())
    assert f"Failed to load model: {url}: " in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("url", ["http://[::1/x.mar", "x.mar"])
def test_an_archive_that_fails_in_an_unexpected_way_leaves_the_others_of_the_start_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    open_archive = Store.open

    def opened(self: Store, name: str, trusted: bool = False) -> OpenedArchive:
        if name == "x.mar":
            raise ValueError("a bug")
        return open_archive(self, name, trusted)

    monkeypatch.setattr(Store, "open", opened)

    async def main() -> None:
        async with registry_of(tmp_path, load_models=(f"x={url}", "m.mar")) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            assert (list(registry.served()), registry.missing()) == (["m"], ("x",))

    asyncio.run(main())
    assert f"Failed to load model: {url}" in caplog.text
    assert ("ValueError: a bug" in caplog.text) is (url == "x.mar")


def test_requirements_that_fail_at_the_start_name_pip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=("m.mar",), install_dependencies=True) as registry:
            model = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py", "requirementsFile": "r.txt"}
            with zipfile.ZipFile(tmp_path / "store" / "m.mar", "w") as archive:
                archive.writestr("h.py", "")
                archive.writestr("r.txt", "/no/such.whl")
                archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model}))
            await registry.load_at_startup(await registry.wanted_at_startup())

    asyncio.run(main())
    said = "m.mar: Custom pip package installation failed for model m: pip install -r r.txt: exit status 1: "
    assert f"Failed to load model: {said}" in caplog.text


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive of a model of the start that cannot be fetched; attempts follow one another at once."""
    monkeypatch.setattr(registry_module, "FETCH_AGAIN_S", (0.0, 0.001))
    (tmp_path / "shop").mkdir()
    return tmp_path / "shop" / "late.mar"


def test_an_archive_of_the_start_that_cannot_be_fetched_is_tried_again(tmp_path: Path, late: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=(f"late=file://{late}", "m.mar")) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            assert (list(registry.served()), registry.missing()) == (["m"], ("late",))
            pack(late)
            await until(lambda: not registry.missing())
            assert list(registry.served()) == ["m", "late"]
            assert registry.of_the_start(registry.find("late", None))

    asyncio.run(main())


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_archive_of_the_start_that_nobody_misses_is_not_tried_again(
    tmp_path: Path, late: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=(f"late=file://{late}",)) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            if is_replaced:
                await registry.register(Wanted("m.mar", Asked(), name="late"))
            else:
                with pytest.raises(NotFound):
                    await registry.unregister("late", None)
            pack(late)
            attempts = "the next attempt"
            await until(lambda: not [one for one in asyncio.all_tasks() if "fetch_again" in repr(one)])
            assert attempts in caplog.text
            assert list(registry.served()) == (["late"] if is_replaced else [])

    asyncio.run(main())


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_an_archive_of_the_start_whose_model_was_registered_meanwhile_is_missed_no_more(
    tmp_path: Path, late: Path, has_snapshot: bool
) -> None:
    snapshots = SnapshotSettings(tmp_path / "config")
    models = (SnapshotModel("n", "1.0", "m.mar", True, HAD),) if has_snapshot else ()
    settings = {"snapshots": snapshots, "snapshot_models": models, "load_models": (f"file://{late}",)}

    async def main() -> None:
        async with registry_of(tmp_path, **settings) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            await registry.opened()
            assert registry.missing() == ("late",)
            version = await registry.register(Wanted("m.mar", Asked()))
            pack(late)  # its manifest names the model m
            await until(lambda: not registry.missing())
            await registry.written()
            assert {model.archive for model in restored(snapshots.directory)} == {"m.mar"}
            assert registry.of_the_start(version)
            registry.discard(version)  # as if it had not loaded
            assert registry.missing() == ("late",)

    asyncio.run(main())


def test_an_archive_that_nobody_misses_while_another_is_tried_is_not_tried_again(
    tmp_path: Path, late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = late.with_name("later.mar")

    async def main() -> None:
        models = (f"late=file://{late}", f"later=file://{later}")
        async with registry_of(tmp_path, load_models=models) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            register = registry.register

            async def registered(wanted: Wanted) -> Any:
                if wanted.name == "late" and "later" in registry.missing():
                    pack(late)
                    pack(later)
                    with pytest.raises(NotFound):
                        await registry.unregister("later", None)
                return await register(wanted)

            monkeypatch.setattr(registry, "register", registered)
            await until(lambda: not [one for one in asyncio.all_tasks() if "fetch_again" in repr(one)])
            assert list(registry.served()) == ["late"]

    asyncio.run(main())


def test_a_server_that_stops_tries_no_archive_again(tmp_path: Path, late: Path) -> None:
    async def main() -> None:
        async with registry_of(tmp_path, load_models=(f"late=file://{late}",)) as registry:
            await registry.load_at_startup(await registry.wanted_at_startup())
            registry.stopping()
        assert registry.missing() == ("late",)

    asyncio.run(main())
