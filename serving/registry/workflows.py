"""Workflows: graphs of models and functions. Each graph is registered and removed as a whole.

Each step of a workflow is a model of the registry, called `<workflow>__<step>`. A function is a model whose
handler is that function of the workflow's archive. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torchere.archiver.container.entries import MANIFEST_NAME, problem_with
from torchere.archiver.errors import ArchiveError
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import Archive, open_archive
from torchere.archiver.workflow import MANIFEST_NAME as WORKFLOW_MANIFEST
from torchere.serving.config.kinds import shown_url
from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import ServerSettings, SnapshotWorkflow
from torchere.serving.config.workflow_spec import WorkflowSpec, check_functions, read_workflow_spec
from torchere.serving.errors import (
    Conflict,
    InvalidArchive,
    InvalidRequest,
    InvalidWorkflow,
    ModelNotFound,
    ServingError,
    UnregisterTimeout,
    VersionNotFound,
    WorkflowFailed,
    WorkflowNotFound,
)
from torchere.serving.registry.desired import Wanted, startup_workflows
from torchere.serving.registry.fetching import Claim, Fetching, give_up
from torchere.serving.registry.names import NAME_PATTERN
from torchere.serving.registry.registry import Registry
from torchere.serving.registry.version import Version, load_failure
from torchere.serving.store.fetch import unsaved
from torchere.serving.store.package import OpenedArchive, Store, StoredArchive, StoreFolder

logger = logging.getLogger(__name__)

FUNCTION_VERSION = "1.0"


@dataclass(slots=True, eq=False)
class Workflow:
    """A registered workflow; `running` is the number of its requests under way."""

    name: str
    wanted: SnapshotWorkflow  # its registration
    spec: WorkflowSpec
    claim: Claim | None = None  # on its archive, which may be a download
    versions: tuple[Version, ...] = ()  # of the steps
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """The URL as given at registration."""
        return self.wanted.url

    def model_of(self, step: str) -> str:
        """Return the name of the model that runs a step."""
        return f"{self.name}__{step}"

    def begin(self) -> None:
        """Count a request."""
        self.running += 1
        self.idle.clear()

    def end(self) -> None:
        """Count the end of a request."""
        self.running -= 1
        if self.running == 0:
            self.idle.set()


class Workflows:
    """Every registered workflow of one server."""

    def __init__(self, server: ServerSettings, registry: Registry) -> None:
        self._server = server
        self._registry = registry
        self._workflows: dict[str, Workflow] = {}
        self._registering: set[str] = set()  # names of workflows that are being registered
        self._leaving: set[str] = set()  # removed, but running requests still need their steps
        self._missing: list[SnapshotWorkflow] = []  # of the start, and not registered
        self._removals: set[asyncio.Task[None]] = set()
        self._stopping = False
        registry.workflows = self

    @cached_property
    def _store(self) -> Store:
        return self._registry.workflow_store()

    @cached_property
    def _fetching(self) -> Fetching:
        fetching = Fetching(self._store)
        if self._stopping:
            fetching.close()
        return fetching

    def find(self, name: str) -> Workflow:
        """Return a workflow; raise `WorkflowNotFound` if it is not registered."""
        workflow = self._workflows.get(name)
        if workflow is None:
            raise WorkflowNotFound.named(name)
        return workflow

    def registered(self) -> list[Workflow]:
        """Return all workflows, sorted by name."""
        return [self._workflows[name] for name in sorted(self._workflows)]

    async def register(self, wanted: SnapshotWorkflow, *, at_startup: bool = False) -> Workflow:
        """Register a workflow of the workflow store, and load its steps.

        Raises:
            WorkflowNotFound, DownloadFailed, InvalidWorkflow, InvalidRequest, Conflict: nothing has changed.
            WorkflowFailed: a step could not be registered or loaded; all of them are unregistered again.
        """
        downloaded = await self._fetching.fetch(wanted.url, at_startup, signs=wanted.s3_sse_kms)
        location = downloaded.path.name if downloaded else wanted.url
        copy = downloaded.path if downloaded and downloaded.is_new else None
        claim = Claim(self._store.place_of(location), copy)
        self._registry.claims.add(claim)
        archive: OpenedArchive | None = None
        stored: StoredArchive | None = None
        try:
            archive = await asyncio.to_thread(self._opened, wanted.url, location, at_startup)
            name, spec, handler = await asyncio.to_thread(read_workflow, archive.archive, wanted.name)
            if name in self._workflows or name in self._registering:
                raise Conflict(f"Workflow {name} is already registered.")
            if name in self._leaving:
                raise Conflict(f"Workflow {name} is being removed, and still has requests. Try again later.")
            workflow = Workflow(name, wanted, spec, claim)
            self._registering.add(name)
            try:
                if spec.functions:
                    stored = await asyncio.to_thread(self._unpack, wanted.url, archive, workflow)
                workflow.versions = await self._loaded(workflow, stored, handler, at_startup)
                self._workflows[name] = workflow  # now, so that the name is never free in between
            finally:
                self._registering.discard(name)
        except BaseException:  # cancelled, too
            self._delete_unclaimed(claim)
            raise
        finally:
            if archive is not None and archive.copy is not None:
                await asyncio.to_thread(archive.close)
            if stored is not None:
                await asyncio.to_thread(self._store.remove, stored)  # the registry has unpacked copies
        self._forget(name, wanted.url)
        self._registry.workflows_changed()
        await self._registry.written()
        _tell_oddities(name, spec, self._server.service_envelope)
        return workflow

    async def unregister(self, name: str) -> None:
        """Remove a workflow after its requests are answered, and unload its steps.

        Raises:
            WorkflowNotFound: it is not registered.
            UnregisterTimeout: requests were still running at the end of the time-out; they end later.
        """
        if name not in self._workflows and self._forget(name):
            self._registry.workflows_changed()
            return
        workflow = self.find(name)
        del self._workflows[name]
        self._leaving.add(name)
        self._registry.workflows_changed()
        removal = asyncio.ensure_future(self._remove(workflow))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        try:
            await asyncio.wait_for(asyncio.shield(removal), self._server.unregister_timeout_s)
        except asyncio.TimeoutError:
            raise UnregisterTimeout(f"Timed out while cleaning resources: {name}") from None

    async def _remove(self, workflow: Workflow) -> None:
        await self._registry.written()  # the next start no longer needs its archive
        # Before the wait: the server may stop during it, and requests need only the steps' unpacked files.
        if workflow.claim is not None:
            self._delete_unclaimed(workflow.claim)
        if workflow.running:
            await workflow.idle.wait()
        self._leaving.discard(workflow.name)
        await self._discard(workflow.versions)

    def _delete_unclaimed(self, claim: Claim) -> None:
        """Give up a claim; delete its download unless a model or another workflow takes it over."""
        if (copy := give_up(claim, self._registry.claims)) is not None:
            self._store.delete(copy)

    async def wanted_at_startup(self) -> list[SnapshotWorkflow]:
        """Return the workflows that the settings load at startup; opens no archive.

        Raises:
            ServingError: the whole workflow store is to be served, and it can't be read.
        """
        folder = StoreFolder(self._server.workflow_store or self._server.model_store)
        return await asyncio.to_thread(startup_workflows, self._server, folder.workflow_names)

    async def load_at_startup(self, wanted: Sequence[SnapshotWorkflow]) -> None:
        """Register the workflows of the start in turn; log and skip one that fails."""
        for each in wanted:
            try:
                await self.register(each, at_startup=True)
            except ServingError as err:
                # A client was faster, as management is open by now, or another archive has the same name.
                is_there = each.name in self._workflows or (not each.name and isinstance(err, Conflict))
                if is_there and each in self._server.snapshot_workflows:
                    continue
                if not is_there:
                    self._missing.append(each)
                logger.error("Failed to load workflow: %s: %s", shown_url(each.url), err.full_text)
            except Exception:  # a bug: it must be seen, and the other workflows of the start are served
                self._missing.append(each)
                logger.exception("Failed to load workflow: %s", shown_url(each.url))

    def missing(self) -> tuple[str, ...]:
        """Return the names of startup workflows that could not be registered."""
        return tuple(map(_name_of, self._missing))

    def to_restore(self) -> list[dict[str, Any]]:
        """Return the snapshot entries of all workflows, also of missing ones."""
        registered = (
            replace(each.wanted, name=each.name, only_if_stored=False) for each in self.registered()
        )
        return [each.entry() for each in (*registered, *self._missing)]

    def stopping(self) -> None:
        """Stop downloads because the server is about to stop; waiting callers get `Unavailable`."""
        self._stopping = True
        if "_fetching" in self.__dict__:  # a server without workflows has no folder for them
            self._fetching.close()

    def close(self) -> None:
        """End downloads and delete unpacked files; the registry unloads the steps. Blocks."""
        self.stopping()
        if "_fetching" in self.__dict__:
            self._store.close()

    def _forget(self, name: str, url: str | None = None) -> bool:
        """Forget the missing workflows of a name, and those of a URL that were given none."""
        kept = [each for each in self._missing if _name_of(each) != name and (each.name or each.url != url)]
        has_forgotten = len(kept) < len(self._missing)
        self._missing = kept
        return has_forgotten

    def _opened(self, url: str, location: str, trusted: bool) -> OpenedArchive:
        """Open an archive; its errors get TorchServe's texts. Blocks."""
        if not url:
            raise WorkflowNotFound("Workflow not found at: ")
        try:
            return self._store.open(location, trusted)
        except ModelNotFound as err:
            relative = ".." in url
            text = err.message if relative else f"Workflow not found in workflow store: {url}"
            raise WorkflowNotFound(text, err.detail) from None
        except InvalidArchive as err:
            raise InvalidWorkflow(err.message, err.detail) from err

    def _unpack(self, url: str, archive: OpenedArchive, workflow: Workflow) -> StoredArchive:
        """Unpack a workflow, and add the manifest that makes it the archive of its functions."""
        try:
            stored = self._store.unpack(url, archive)
        except InvalidArchive as err:
            raise InvalidWorkflow(err.message, err.detail) from err
        manifest = Manifest(model_name=workflow.name, model_version=FUNCTION_VERSION)
        path = stored.directory / MANIFEST_NAME
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(manifest.dump(), encoding="utf-8")
        except OSError as err:
            self._store.remove(stored)
            if isinstance(err, (FileExistsError, IsADirectoryError)):
                text = f"An entry of the workflow's archive is in the place of its {MANIFEST_NAME}."
                raise InvalidWorkflow(text, str(err)) from err
            raise unsaved(url, str(err)) from err
        return stored

    async def _loaded(
        self, workflow: Workflow, stored: StoredArchive | None, handler: str | None, at_startup: bool
    ) -> tuple[Version, ...]:
        """Register every step and wait until all are loaded; unregister all of them if one fails."""
        functions = None
        if stored is not None:
            unpacked = await asyncio.to_thread(open_archive, stored.directory)
            functions = OpenedArchive(unpacked, stored.directory, stored.signer)
        outcomes = await self._each_registered(
            [_wanted(workflow, step, functions, handler, at_startup) for step in workflow.spec.steps]
        )
        versions = tuple(each for each in outcomes if isinstance(each, Version))
        try:
            failures = []
            for step, outcome in zip(workflow.spec.steps, outcomes, strict=True):
                if isinstance(outcome, Version):
                    await outcome.settled.wait()
                    if (failure := load_failure(outcome)) is not None:
                        failures.append((failure.message, failure.detail))
                elif isinstance(outcome, Conflict) and at_startup:
                    # The operator had replaced the step; that version is in the snapshot as a model.
                    logger.info("workflow %s: step %s is a model of its own", workflow.name, step)
                elif isinstance(outcome, ServingError):
                    model, why = workflow.model_of(step), outcome.message
                    text = f"Workflow Node {model} failed to register. Details: {why}"
                    failures.append((text, outcome.detail))
                else:
                    raise outcome
            if failures:
                texts, details = zip(*failures, strict=True)
                raise WorkflowFailed(
                    f"Workflow {workflow.name} has failed to register. Failures: [{', '.join(texts)}]",
                    "; ".join(filter(None, details)),
                )
        except BaseException:
            await self._discard(versions)
            raise
        if at_startup:
            self._restore_defaults(versions)
        return versions

    async def _each_registered(self, steps: Iterable[Wanted]) -> list[Version | BaseException]:
        """Register the steps concurrently; on cancellation, discard those that are registered already."""
        registering = [asyncio.ensure_future(self._registry.register(step)) for step in steps]
        try:
            return await asyncio.gather(*registering, return_exceptions=True)
        except asyncio.CancelledError:  # all have ended by now
            ended = [each for each in registering if not each.cancelled() and each.exception() is None]
            await self._discard([each.result() for each in ended])
            raise

    def _restore_defaults(self, versions: Sequence[Version]) -> None:
        """Make steps the default again if the snapshot has other versions of them, none of them the default.

        The other versions are registered first, and the first version of a model becomes its default.
        """
        chosen = {model.name for model in self._server.snapshot_models if model.default_version}
        for version in versions:
            if version.key.name not in chosen:
                with suppress(ModelNotFound, VersionNotFound):  # a client has unregistered it meanwhile
                    self._registry.set_default(*version.key)

    async def _discard(self, versions: Sequence[Version]) -> None:
        for version in versions:
            self._registry.discard(version)
        for version in versions:
            await version.settled.wait()


def _tell_oddities(name: str, spec: WorkflowSpec, envelope: str | None) -> None:
    """Log models outside of the graph, unknown settings, and steps whose input the envelope can't unwrap."""
    if spec.unused:
        logger.warning("workflow %s: not in its graph, and not loaded: %s", name, ", ".join(spec.unused))
    if spec.ignored:
        logger.warning("workflow %s: unknown settings are ignored: %s", name, ", ".join(spec.ignored))
    if envelope is None:
        return
    readable = 1 if envelope == "body" else 0  # a single result is called `body`, those of several are not
    lost = [step for step, parents in spec.parents.items() if len(parents) > readable]
    if lost:
        logger.warning(
            "workflow %s: service_envelope=%s finds no input in the results that these steps get, unless the "
            "handler is tensor or in C++: %s",
            name,
            envelope,
            ", ".join(lost),
        )


def _name_of(wanted: SnapshotWorkflow) -> str:
    """Return the name of a workflow that was not opened: without one, that of its file, as it mostly is."""
    file = wanted.url.partition("?")[0].rstrip("/").rpartition("/")[2]  # hides the query
    return wanted.name or file.removesuffix(".war")


def _wanted(
    workflow: Workflow, step: str, functions: OpenedArchive | None, handler: str | None, at_startup: bool
) -> Wanted:
    """Return the registration of one step.

    As in TorchServe, it gets `max-workers` workers from the start, unless the model's config has its own pair
    of numbers.
    """
    settings = workflow.spec.steps[step]
    asked = Asked(
        batch_size=settings.batch_size,
        max_batch_delay_ms=settings.max_batch_delay_ms,
        executors=settings.max_workers,
        response_timeout_s=workflow.wanted.response_timeout_s,
        startup_timeout_s=workflow.wanted.startup_timeout_s,
    )
    is_function = settings.url is None
    return Wanted(
        settings.url or workflow.url,
        asked,
        name=workflow.model_of(step),
        handler=f"{handler}:{step}" if is_function else None,
        at_startup=at_startup,
        archive=functions if is_function else None,
        workflow=workflow.name,
    )


def read_workflow(archive: Archive, name: str | None) -> tuple[str, WorkflowSpec, str | None]:
    """Return name, specification and handler of a workflow's archive. Blocks.

    Raises:
        InvalidWorkflow: the manifest, the specification or the handler can't be used.
        InvalidRequest: the name contains special characters.
    """
    has_manifest = any(entry.name == WORKFLOW_MANIFEST for entry in archive.entries)
    try:
        manifest = json.loads(archive.read_text(WORKFLOW_MANIFEST)) if has_manifest else {}
    except (ArchiveError, ValueError, RecursionError) as err:
        raise InvalidWorkflow("Failed to parse workflow manifest.", str(err)) from err
    entry = manifest.get("workflow") if isinstance(manifest, dict) else None
    members = entry if isinstance(entry, dict) else {}
    own_name = _text(members, "workflowName", required="Workflow name is not defined.")
    spec_file = _text(members, "specFile", required="Workflow spec file is not defined.")
    handler = _text(members, "handler")
    try:
        spec = read_workflow_spec(archive.read_text(str(spec_file)))
        check_functions(spec, handler, archive.read_text(handler) if handler and spec.functions else "")
    except ArchiveError as err:
        text = f"{err.entry or 'The archive'} of the workflow can't be read: {err.reason}."
        raise InvalidWorkflow(text, str(err)) from err
    return _checked_name(name or str(own_name)), spec, handler


def _text(members: dict[str, Any], key: str, required: str = "") -> str | None:
    value = members.get(key)
    if value is None or value == "":
        if required:
            raise InvalidWorkflow(required, f"{key} is not in the object workflow of {WORKFLOW_MANIFEST}")
        return None
    if not isinstance(value, str) or (key != "workflowName" and problem_with(value)):
        raise InvalidWorkflow(f"{key} of the workflow is {value!r:.80}; expected the name of a file in it.")
    return value


def _checked_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRequest(
            f"Workflow name {name[:80]!r} contains special characters.\nThe allowed regular expression "
            f"filter for workflow name is: {re.sub(r'{.*}', '*', NAME_PATTERN.pattern)}"
        )
    return name
