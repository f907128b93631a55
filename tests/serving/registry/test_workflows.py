"""Workflows of a start, beside clients that register some meanwhile."""

import asyncio
import errno
import json
import threading
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pools import until

from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import Limits, ServerSettings, SnapshotWorkflow
from torchere.serving.config.workflow_spec import read_workflow_spec
from torchere.serving.errors import (
    Conflict,
    DownloadFailed,
    InvalidWorkflow,
    LoadFailed,
    ModelNotFound,
    ServingError,
    Unavailable,
    UnregisterTimeout,
    WorkflowFailed,
)
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.fetching import Claim
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.registry import Registry
from torchere.serving.registry.version import Version, VersionState
from torchere.serving.registry.workflows import Workflow, Workflows
from torchere.serving.store import url_rules
from torchere.serving.store.fetch import Download, Interrupt, Origins
from torchere.serving.store.package import Store
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import ModelKey


class _Registry:
    """Knows no model. Each one that is registered loads at once, and those of the workflow `failing` fail."""

    workflows: Any = None

    def __init__(self, folder: Path | None = None, failing: str = "") -> None:
        self.folder = folder
        self.claims: set[Claim] = set()
        self.failing = failing
        self.fails_in = VersionState.FAILED
        self.may_fail = asyncio.Event()

    def workflow_store(self) -> Store:
        return Store(self.folder, Limits(), self.folder)

    async def register(self, wanted: Wanted) -> Version:
        version = object.__new__(Version)
        version.state, version.failure, version.settled = VersionState.READY, None, asyncio.Event()
        version.settled.set()
        if wanted.workflow == self.failing:
            await self.may_fail.wait()
            version.state, version.failure = self.fails_in, LoadFailed("Failed to start workers", "no room")
        return version

    def discard(self, version: Version) -> None: ...

    def workflows_changed(self) -> None: ...

    async def written(self) -> None: ...


class _Refusing(Workflows):
    """Answers each registration as that of a name that is registered, and that of `broken` with a bug."""

    async def register(self, wanted: SnapshotWorkflow, *, at_startup: bool = False) -> Workflow:
        if wanted.name == "broken":
            raise ValueError(wanted.name)
        raise Conflict(f"Workflow {wanted.name} is already registered.")


def test_of_the_workflows_of_a_start_those_that_fail_are_missing_unless_a_client_was_faster():
    registry: Any = _Registry()
    workflows = _Refusing(ServerSettings(), registry)
    workflows._workflows["there"] = Workflow(
        "there", SnapshotWorkflow("there.war"), read_workflow_spec("dag:\n  start: []\n")
    )
    wanted = [SnapshotWorkflow(f"{name}.war", name) for name in ("broken", "there", "lost")]
    asyncio.run(workflows.load_at_startup(wanted))
    assert workflows.missing() == ("broken", "lost")
    assert [entry["workflowName"] for entry in workflows.to_restore()] == ["there", "broken", "lost"]


def test_a_step_that_a_client_unregisters_during_the_start_does_not_end_it():
    registry: Any = _Registry()
    chosen: list[str] = []

    def set_default(model: str, version: str) -> None:
        if model == "flow__gone":
            raise ModelNotFound.named(model)
        chosen.append(model)

    registry.set_default = set_default
    workflows = Workflows(ServerSettings(), registry)
    steps: Any = [SimpleNamespace(key=ModelKey(f"flow__{step}", "1.0")) for step in ("gone", "there")]
    workflows._restore_defaults(steps)
    assert chosen == ["flow__there"]


@pytest.mark.parametrize("state", [VersionState.READY, VersionState.FAILED])
def test_a_workflow_fails_with_a_step_unless_that_has_loaded_and_another_call_scaled_it_up(
    state: VersionState,
):
    async def main() -> tuple[Version, ...]:
        registry: Any = _Registry(failing="flow")
        registry.fails_in = state
        registry.may_fail.set()
        spec = read_workflow_spec("models: {m: {url: m.mar}}\ndag: {m: []}\n")
        return await Workflows(ServerSettings(), registry)._loaded(
            Workflow("flow", SnapshotWorkflow("flow.war"), spec), None, None, at_startup=False
        )

    if state is VersionState.READY:
        assert len(asyncio.run(main())) == 1
    else:
        with pytest.raises(WorkflowFailed, match="Failed to start workers"):
            asyncio.run(main())


def test_a_registration_that_a_stop_cuts_off_takes_its_steps_with_it():
    class Slow(_Registry):
        """Never ends the registration of `slow`."""

        def __init__(self) -> None:
            super().__init__()
            self.made: list[Version] = []
            self.discarded: list[Version] = []

        async def register(self, wanted: Wanted) -> Version:
            if wanted.name == "flow__slow":
                await asyncio.Event().wait()
            self.made.append(await super().register(wanted))
            return self.made[-1]

        def discard(self, version: Version) -> None:
            self.discarded.append(version)

    async def main() -> None:
        registry: Any = Slow()
        spec = read_workflow_spec("models: {m: {url: m.mar}, slow: {url: m.mar}}\ndag: {m: [slow]}\n")
        loading = asyncio.create_task(
            Workflows(ServerSettings(), registry)._loaded(
                Workflow("flow", SnapshotWorkflow("flow.war"), spec), None, None, at_startup=False
            )
        )
        await until(lambda: registry.made)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert registry.discarded == registry.made

    asyncio.run(main())


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of an archive in the store once it is downloaded from any URL."""
    path = tmp_path / "flow.war"

    def download(*_: object, **__: bool) -> Download:
        with zipfile.ZipFile(path, "w") as war:
            war.writestr("flow.yaml", "models: {m: {url: m.mar}}\ndag: {m: []}\n")
            manifest = {"workflow": {"workflowName": "flow", "specFile": "flow.yaml"}}
            war.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))
        return Download(path, is_new=True)

    monkeypatch.setattr(Store, "download", download)
    return path


@pytest.mark.parametrize("first_fails", [False, True])
def test_a_download_stays_as_long_as_a_workflow_was_registered_from_it(archive: Path, first_fails: bool):
    async def main() -> None:
        registry: Any = _Registry(archive.parent, failing="first" if first_fails else "")
        workflows = Workflows(ServerSettings(), registry)
        first = asyncio.create_task(workflows.register(SnapshotWorkflow("http://host/flow.war", "first")))
        await until(lambda: bool(workflows._registering | workflows._workflows.keys()))
        second = asyncio.create_task(workflows.register(SnapshotWorkflow("flow.war", "second")))
        await asyncio.sleep(0)  # the second has begun, no more
        registry.may_fail.set()
        await asyncio.wait({first, second} if first_fails else {first})
        if not first_fails:
            await workflows.unregister("first")
        await second
        assert [workflow.name for workflow in workflows.registered()] == ["second"]
        assert archive.exists()
        await workflows.unregister("second")
        assert not archive.exists()
        await asyncio.to_thread(workflows.close)

    asyncio.run(main())


def test_the_download_of_a_workflow_leaves_the_store_while_its_last_requests_run(archive: Path):
    async def main() -> None:
        registry: Any = _Registry(archive.parent)
        workflows = Workflows(ServerSettings(unregister_timeout_s=0.05), registry)
        (await workflows.register(SnapshotWorkflow("http://host/flow.war", "flow"))).begin()
        with pytest.raises(UnregisterTimeout):
            await workflows.unregister("flow")
        assert not archive.exists()
        await asyncio.to_thread(workflows.close)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("envelope", "dag", "told"),
    [
        (None, "{pre: [m], m: [post]}", ""),
        ("json", "{m: []}", ""),
        ("json", "{pre: [m], m: [post]}", "m, post"),
        ("kservev2", "{pre: [m]}", "m"),
        ("body", "{pre: [m], m: [post]}", ""),
        ("body", "{pre: [m, n], m: [post], n: [post]}", "post"),
    ],
)
def test_steps_whose_input_the_envelope_does_not_find_are_told_at_the_registration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, envelope: str | None, dag: str, told: str
):
    models = ", ".join(f"{step}: {{url: m.mar}}" for step in ("pre", "m", "n", "post") if step in dag)
    manifest = {"workflow": {"workflowName": "flow", "specFile": "flow.yaml"}}
    with zipfile.ZipFile(tmp_path / "flow.war", "w") as war:
        war.writestr("flow.yaml", f"models: {{{models}}}\ndag: {dag}\n")
        war.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))

    async def main() -> None:
        registry: Any = _Registry(tmp_path)
        workflows = Workflows(ServerSettings(service_envelope=envelope), registry)
        await workflows.register(SnapshotWorkflow("flow.war"))
        await asyncio.to_thread(workflows.close)

    asyncio.run(main())
    steps = [message.rpartition(": ")[2] for message in caplog.messages if "service_envelope" in message]
    assert steps == ([told] if told else [])


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive that is that of a model, and that of a workflow whose steps are left out."""

    async def no_steps(*_: object) -> tuple[Version, ...]:
        return ()

    monkeypatch.setattr(Workflows, "_loaded", no_steps)
    monkeypatch.setattr(url_rules, "_matching", lambda url, patterns: list(patterns))  # in no process
    path = tmp_path / "both.war"
    model = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py"}
    workflow = {"workflowName": "flow", "specFile": "flow.yaml"}
    with zipfile.ZipFile(path, "w") as war:
        war.writestr("h.py", "def handle(data, context): return data\n")
        war.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        war.writestr("flow.yaml", "models: {m: {url: m.mar}}\ndag: {m: []}\n")
        war.writestr("WAR-INF/MANIFEST.json", json.dumps({"workflow": workflow}))
    return path


@asynccontextmanager
async def server_of(folder: Path, workflow_store: str) -> AsyncIterator[tuple[Registry, Workflows]]:
    """A registry whose store is `models`, and its workflows."""
    for name in ("models", "workflows"):
        (folder / name).mkdir()
    settings = ServerSettings(
        model_store=folder / "models",
        workflow_store=folder / workflow_store,
        temp_dir=folder,
        allowed_urls=("file://.*",),
    )
    registry = Registry(settings, RegistryMetrics(Metrics("host")))
    workflows = Workflows(settings, registry)
    yield registry, workflows
    await asyncio.to_thread(workflows.close)
    await registry.close()


async def unregister_model(registry: Registry) -> None:
    await (await registry.unregister("m", None)).settled.wait()


@pytest.mark.parametrize("is_of_workflow", [True, False])
def test_a_download_stays_while_a_model_or_a_workflow_of_the_same_folder_uses_it(
    tmp_path: Path, both: Path, is_of_workflow: bool
):
    copy = tmp_path / "models" / both.name

    async def main() -> None:
        async with server_of(tmp_path, "models") as (registry, workflows):
            if is_of_workflow:
                await workflows.register(SnapshotWorkflow(f"file://{both}"))
                await registry.register(Wanted(both.name, Asked()))
                await workflows.unregister("flow")
                assert copy.exists()
                await unregister_model(registry)
            else:
                await registry.register(Wanted(f"file://{both}", Asked()))
                await workflows.register(SnapshotWorkflow(both.name))
                await unregister_model(registry)
                assert copy.exists()
                await workflows.unregister("flow")
            assert not copy.exists()

    asyncio.run(main())


@pytest.mark.parametrize("is_of_workflow", [True, False])
def test_a_download_goes_though_the_other_folder_has_a_file_of_its_name(
    tmp_path: Path, both: Path, is_of_workflow: bool
):
    model, workflow = (tmp_path / folder / both.name for folder in ("models", "workflows"))
    url = f"file://{both}"

    async def main() -> None:
        async with server_of(tmp_path, "workflows") as (registry, workflows):
            kept = model if is_of_workflow else workflow
            kept.write_bytes(both.read_bytes())
            await workflows.register(SnapshotWorkflow(url if is_of_workflow else both.name))
            await registry.register(Wanted(both.name if is_of_workflow else url, Asked()))
            assert (model.exists(), workflow.exists()) == (True, True)
            await workflows.unregister("flow")
            assert workflow.exists() is not is_of_workflow
            await unregister_model(registry)
            assert (model.exists(), workflow.exists()) == (is_of_workflow, not is_of_workflow)

    asyncio.run(main())


def test_a_download_that_can_not_be_deleted_keeps_no_name(archive: Path, monkeypatch: pytest.MonkeyPatch):
    def delete(self: Origins, target: Path) -> None:
        raise OSError("read-only")

    async def main() -> None:
        registry: Any = _Registry(archive.parent)
        workflows = Workflows(ServerSettings(), registry)
        monkeypatch.setattr(Origins, "delete", delete)
        await workflows.register(SnapshotWorkflow("http://host/flow.war", "flow"))
        await workflows.unregister("flow")
        await workflows.register(SnapshotWorkflow("http://host/flow.war", "flow"))
        await asyncio.to_thread(workflows.close)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("entry", "refusal"),
    [
        ("MAR-INF", InvalidWorkflow),
        ("MAR-INF/MANIFEST.json/x", InvalidWorkflow),
        ("full disk", ServingError),
    ],
)
def test_a_workflow_whose_functions_get_no_manifest_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, refusal: type[ServingError]
):
    def write_text(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if entry == "full disk":
        monkeypatch.setattr(Path, "write_text", write_text)
    (tmp_path / "unpacked").mkdir()
    manifest = {"workflow": {"workflowName": "flow", "specFile": "flow.yaml", "handler": "flow.py"}}
    with zipfile.ZipFile(tmp_path / "flow.war", "w") as war:
        war.writestr("flow.yaml", "models: {m: {url: m.mar}}\ndag: {pre: [m]}\n")
        war.writestr("flow.py", "def pre(data, context): return data\n")
        war.writestr(entry, "")
        war.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))

    async def main() -> None:
        registry: Any = _Registry(tmp_path)
        registry.workflow_store = lambda: Store(tmp_path, Limits(), tmp_path / "unpacked")
        workflows = Workflows(ServerSettings(), registry)
        with pytest.raises(ServingError) as caught:
            await workflows.register(SnapshotWorkflow("flow.war"))
        assert type(caught.value) is refusal
        assert list((tmp_path / "unpacked").rglob("flow.py")) == []
        await asyncio.to_thread(workflows.close)

    asyncio.run(main())


@pytest.mark.parametrize("is_under_way", [True, False])
def test_at_the_stop_of_the_server_the_download_of_a_workflow_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_under_way: bool
):
    begun = threading.Event()

    def download(self: Store, url: str, by_operator: bool, interrupt: Interrupt, **_: bool) -> Download:
        begun.set()
        while not interrupt.asked:
            time.sleep(0.005)
        raise DownloadFailed("Failed to download archive", "it was given up before its end")

    async def main() -> None:
        settings = ServerSettings(workflow_store=tmp_path, temp_dir=tmp_path)
        workflows = Workflows(settings, _Registry(tmp_path))  # type: ignore[arg-type]
        if not is_under_way:
            workflows.stopping()
        registering = asyncio.create_task(
            workflows.register(SnapshotWorkflow("http://host/flow.war", "flow"))
        )
        if is_under_way:
            await asyncio.to_thread(begun.wait, 10)
            workflows.stopping()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(registering, 5)
        assert begun.is_set() is is_under_way
        await asyncio.to_thread(workflows.close)

    monkeypatch.setattr(Store, "download", download)
    asyncio.run(main())


def test_a_workflow_of_the_settings_is_registered_and_one_that_fails_is_missing_until_it_is(
    tmp_path: Path, both: Path, caplog: pytest.LogCaptureFixture
):
    async def main() -> None:
        registry: Any = _Registry(tmp_path / "store")
        registry.folder.mkdir()
        settings = ServerSettings(workflow_store=registry.folder, load_workflows=("all",))
        workflows = Workflows(settings, registry)
        for name in ("first.war", "second.war"):  # of one workflow: the second is told, and not missing
            (registry.folder / name).write_bytes(both.read_bytes())
        (registry.folder / "broken.war").write_text("junk")
        await workflows.load_at_startup(await workflows.wanted_at_startup())
        assert [each.name for each in workflows.registered()] == ["flow"]
        assert workflows.missing() == ("broken",)
        await workflows.unregister("flow")
        (registry.folder / "broken.war").write_bytes(both.read_bytes())
        await workflows.register(SnapshotWorkflow("broken.war"))
        assert workflows.missing() == ()
        await asyncio.to_thread(workflows.close)

    asyncio.run(main())
    told = [text for text in caplog.messages if text.startswith("Failed to load workflow: ")]
    assert [text.split(": ")[1] for text in told] == ["broken.war", "second.war"]
    assert "Workflow flow is already registered." in told[1]
