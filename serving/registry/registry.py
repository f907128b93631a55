"""The desired state, which operators change, and the serving map, which requests read.

The map is immutable and replaced as a whole. Used on the event loop; the request path only does look-ups.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from torchere.handlers.archive_import import forget_archive
from torchere.serving.config.kinds import shown_url
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import (
    Conflict,
    DefaultVersionInUse,
    DependenciesFailed,
    DownloadFailed,
    InvalidArchive,
    NotFound,
    ServingError,
    Unavailable,
    VersionNotFound,
)
from torchere.serving.registry import serving_map as routing
from torchere.serving.registry.builder import Loader, model_holds_gil
from torchere.serving.registry.desired import Missing, Wanted, check_snapshot, startup_models
from torchere.serving.registry.fetching import Claim, Fetching, give_up
from torchere.serving.registry.names import (
    check_model_name,
    check_runtime,
    check_version_name,
    default_model_name,
)
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.reconciler import Reconciler
from torchere.serving.registry.snapshot import SnapshotKeeper
from torchere.serving.registry.version import Version, VersionState
from torchere.serving.store.environment import EnvironmentBuilder
from torchere.serving.store.package import (
    IS_WORKFLOW,
    OpenedArchive,
    Store,
    StoredArchive,
    is_workflow,
    store_of,
)
from torchere.serving.store.url_rules import is_remote
from torchere.serving.types import ModelKey
from torchere.serving.workers.spawn import Spawned, worker_environment

logger = logging.getLogger(__name__)
T = TypeVar("T")
FETCH_AGAIN_S = (5.0, 15.0, 30.0, 60.0)  # pauses before startup archives are tried again; the last repeats


class RegisteredWorkflows(Protocol):
    """The methods of `Workflows` that the registry calls."""

    def to_restore(self) -> list[dict[str, Any]]:
        """Return the snapshot entries of all workflows, also of missing ones."""

    def missing(self) -> tuple[str, ...]:
        """Return the names of startup workflows that could not be registered."""


class Registry:
    """Every registered version of one server."""

    def __init__(
        self,
        server: ServerSettings,
        observer: RegistryMetrics,
        fork_server: Spawned | None = None,
    ) -> None:
        self._server = server
        self._observer = observer
        self._store = store_of(server)
        self._fetching = Fetching(self._store)
        # A separate pool: large archives take long, and metrics and request bodies need the default threads.
        self._unpackers = ThreadPoolExecutor(thread_name_prefix="unpack")
        variables = worker_environment(server.hidden_env_vars)
        self._environments = EnvironmentBuilder(
            variables, server.install_timeout_s, server.install_dependencies
        )
        self._loader = Loader(server, observer, fork_server)
        self._reconciler = Reconciler(server.unregister_timeout_s, self._gone)
        self._serving: routing.ServingMap = routing.EMPTY
        self._missing = Missing()
        self._snapshots = SnapshotKeeper(
            server.snapshots, self.served, self._missing.to_restore, self._workflows_to_restore
        )
        self.workflows: RegisteredWorkflows | None = None  # the workflows whose steps are registered here
        self._registering: WeakValueDictionary[ModelKey, asyncio.Lock] = WeakValueDictionary()
        # Claims of unfinished registrations of models and of workflows, as both stores may be one folder.
        self.claims: set[Claim] = set()
        self._kept: list[Version] = []  # versions registered when the server stops
        self._sweeping: asyncio.Future[None] | None = None
        self._fetching_again: asyncio.Task[None] | None = None

    def find(self, model: str, version: str | None) -> Version:
        """Return the version for a request; raise `ModelNotFound` or `VersionNotFound`."""
        return routing.find(self._serving, model, version)

    def served(self) -> routing.ServingMap:
        """Return the current serving map, which is immutable."""
        return self._serving

    def versions(self) -> Iterator[Version]:
        """Iterate over every version of every model."""
        return (version for served in self._serving.values() for version in served.versions.values())

    def missing(self) -> tuple[str, ...]:
        """Return the names of startup models and workflows that are not registered."""
        return (*self._missing.names(), *(self.workflows.missing() if self.workflows else ()))

    def of_the_start(self, version: Version) -> bool:
        """Return whether a version was loaded at startup, or was registered instead of a missing model."""
        return version.origin.loaded_at_startup or self._missing.is_replaced_by(version.key)

    async def register(self, wanted: Wanted) -> Version:
        """Register an archive; its load has started, not finished, when this returns.

        Raises:
            ModelNotFound, DownloadFailed, InvalidArchive, InvalidRequest: the archive or request is invalid.
            UntrustedArchive: signatures are required, and the archive has no valid one.
            Unavailable: too many downloads or installations are queued.
            Conflict: the same name and version is registered. Nothing has changed in all these cases.
        """
        if wanted.runtime:
            check_runtime(wanted.runtime)  # before the download
        downloaded = None
        if wanted.archive is None:
            downloaded = await self._fetching.fetch(
                wanted.url, wanted.by_operator, signs=wanted.signs, reuses=wanted.at_startup
            )
        archive = wanted.archive
        location = downloaded.path.name if downloaded else wanted.url
        copy = downloaded.path if downloaded and downloaded.is_new else None
        claim = Claim(self._store.place_of(location), copy)
        self.claims.add(claim)
        try:
            if archive is None:
                opening = functools.partial(self._store.open, location, wanted.by_operator)
                archive = await self._in_thread(opening, OpenedArchive.close)
            claim.path = archive.source  # a folder outside the store lies at another path
            key = _key_of(wanted, location, archive)
            # A second registration of the version waits here, and is refused before it unpacks the archive.
            async with self._registering.setdefault(key, asyncio.Lock()):
                self._refuse_twin(wanted, key)
                version = await self._built(key, wanted, archive)
                version.claim = claim
                self._serving = routing.with_version(self._serving, version)
        except BaseException:  # cancelled, too
            self._give_up(claim)
            if archive is not None and archive.copy is not None:
                await asyncio.to_thread(archive.close)
            raise
        if archive.signer:
            logger.info("registered %s from %s, signed by %s", key, shown_url(wanted.url), archive.signer)
        self._missing.registered(wanted, key)
        self._observer.registered(version, lambda: self._weight_of(version))
        self._reconciler.wake(version)
        self._snapshots.changed(version)
        return version

    async def _built(self, key: ModelKey, wanted: Wanted, archive: OpenedArchive) -> Version:
        unpacking = functools.partial(self._unpack, wanted, archive)
        stored = await self._in_thread(unpacking, self._store.remove)
        try:
            environment = await self._environments.build(
                key.name, stored.directory, stored.manifest, stored.config.raw
            )
            return self._loader.build(key, replace(stored, environment=environment), wanted)
        except BaseException:  # cancelled, too
            await asyncio.to_thread(self._store.remove, stored)
            raise

    async def _in_thread(self, make: Callable[[], T], delete: Callable[[T], None]) -> T:
        """Call `make` in a thread of the unpackers; on cancellation, `delete` its result."""
        making = asyncio.get_running_loop().run_in_executor(self._unpackers, make)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:  # the thread can't be stopped: wait for its result
            await asyncio.wait({making})
            if making.exception() is None:
                await asyncio.to_thread(delete, making.result())
            raise

    def _unpack(self, wanted: Wanted, archive: OpenedArchive) -> StoredArchive:
        try:
            stored = self._store.unpack(wanted.url, archive)
        finally:
            archive.close()
        handler = wanted.handler or archive.manifest.handler or self._server.default_handler
        try:
            # Another call may name the file of a download that is not checked yet.
            of_client = is_remote(wanted.url) or self._store.is_of_client(archive.source)
            if of_client and not wanted.by_operator:
                self._store.check_weights(stored.config)
            self._store.share_weights(archive, stored, handler)
            # In this thread, because both may block.
            self._loader.gpus_of(stored.config.device_type)
            return replace(stored, holds_gil=model_holds_gil(stored))
        except BaseException:
            self._store.remove(stored)
            raise

    def _weight_of(self, version: Version) -> float:
        """Return the share of the requests without a version that this version gets."""
        served = self._serving.get(version.key.name)
        return float(served is not None and served.default_version == version.key.version)

    def _refuse_twin(self, wanted: Wanted, key: ModelKey) -> None:
        if key.name in self._serving and key.version in self._serving[key.name].versions:
            # A model of the start may get its name from an archive that could not be fetched before.
            if self._missing.already_registered(wanted, key):
                self._snapshots.changed()
            raise Conflict(f"Model version {key.version} is already registered for model {key.name}")

    async def unregister(self, model: str, version: str | None) -> Version:
        """Unregister a version: new requests no longer find it.

        On return, unloading has started but may not have finished.

        Raises:
            ModelNotFound, VersionNotFound: it is not registered; it is also removed from `missing`.
            DefaultVersionInUse: it is the default version and the model has others.
        """
        try:
            found = self.find(model, version)
        except NotFound:
            if self._missing.unregistered(model, version):
                self._snapshots.changed()
            raise
        served = self._serving[model]
        if found.key.version == served.default_version and len(served.versions) > 1:
            raise DefaultVersionInUse(f"Cannot remove default version for model {model}")
        self._missing.unregistered(model, version)
        self._missing.left(found.key)
        self._take_out(found)
        self._snapshots.changed()
        return found

    def discard(self, version: Version) -> None:
        """Remove exactly this version, which failed to load, without a trace; idempotent."""
        if version in self.versions():
            self._missing.taken_back(version.key)
        self._take_out(version)
        self._snapshots.discarded(version)

    def _take_out(self, version: Version) -> None:
        self._serving = routing.without_version(self._serving, version)
        if version not in self._kept:  # kept versions hold their downloads for the next start
            self.claims.discard(version.claim)
        version.wanted = False
        self._reconciler.wake(version)

    def scale(self, version: Version, min_executors: int, max_executors: int) -> None:
        """Change the executor range of a version; `version.settled` is set when the change is applied."""
        version.settings = settings = version.settings.scaled(min_executors, max_executors)
        version.target = min(max(version.pool.size, settings.min_executors), settings.max_executors)
        gave_up = version.living_executors < version.pool.size
        version.retry = version.state is VersionState.FAILED or gave_up
        self._reconciler.wake(version)
        self._snapshots.changed(version)

    def set_default(self, model: str, version: str) -> None:
        """Make a version the default; raise `ModelNotFound` or `VersionNotFound`."""
        routing.find(self._serving, model, None)
        if version not in self._serving[model].versions:
            raise VersionNotFound(f"Model version {version} does not exist for model {model}")
        self._serving = routing.with_default(self._serving, model, version)
        self._missing.has_other_default(model)
        self._snapshots.changed()

    def workflow_store(self) -> Store:
        """Create the store of the workflows whose steps are registered here."""
        return store_of(self._server, models=self._store)

    def _workflows_to_restore(self) -> list[dict[str, Any]]:
        return self.workflows.to_restore() if self.workflows else []

    def workflows_changed(self) -> None:
        """Write a snapshot, because a workflow was registered or removed."""
        self._snapshots.changed()

    async def written(self) -> None:
        """Wait until every settled change is in a snapshot on disk, so that it survives a crash."""
        await self._snapshots.written()

    async def wanted_at_startup(self) -> list[Wanted]:
        """Return the models that the settings load at startup; opens no archive.

        Raises:
            InvalidSnapshot: the settings restore a snapshot, and one of its archives is not in the store.
            ServingError: the whole store is to be served, and it can't be read.
        """
        return await asyncio.to_thread(self._wanted_at_startup)

    async def load_at_startup(self, models: Sequence[Wanted]) -> None:
        """Register `models` in turn; log and skip a model that fails, as TorchServe does.

        A skipped model is `missing` until it is registered. One whose archive could not be fetched is tried
        again in the background.
        """
        self._sweeping = asyncio.ensure_future(asyncio.to_thread(self._store.sweep))
        waiting = [wanted for wanted in models if not await self._tried(wanted)]
        for model in self._server.snapshot_models:
            if model.default_version and model.name in self._serving:
                with contextlib.suppress(VersionNotFound):  # it failed to register, which was logged
                    self.set_default(model.name, model.version)
        self._tell_unread_settings()
        if waiting:
            self._fetching_again = asyncio.create_task(self._fetch_again(waiting))

    def _tell_unread_settings(self) -> None:
        """Warn of settings in `models` for a version that is not there, while the model has another one.

        A client may register that version later, or its archive may be fetched again; then they take effect.
        """
        for name, settings in self._server.model_defaults.items():
            loaded = self._serving[name].versions if name in self._serving else {}
            for version in settings.keys() - loaded.keys() if loaded else ():
                logger.warning(
                    "models: the settings for version %s of %s have no effect until it is registered; "
                    "the start has registered version %s",
                    version, name, ", ".join(sorted(loaded)),
                )  # fmt: skip

    async def _tried(self, wanted: Wanted) -> bool:
        """Register a model of the start; log a failure. Return False if its archive could not be fetched."""
        try:
            await self.register(wanted)
        except ServingError as err:
            is_there = isinstance(err, Conflict)
            if is_there and self._server.snapshot_models:  # the snapshot has restored it
                return True
            if not is_there:
                self._missing.add(wanted)
            reason = err.detail or err.message
            if isinstance(err, DependenciesFailed):  # its detail does not say which step failed
                reason = f"{err.message}: {reason}"
            logger.error("Failed to load model: %s: %s", shown_url(wanted.url), reason)
            return not isinstance(err, (DownloadFailed, Unavailable))
        except Exception:  # a bug: it must be seen, and the other models of the start are served
            self._missing.add(wanted)
            logger.exception("Failed to load model: %s", shown_url(wanted.url))
        return True

    async def _fetch_again(self, waiting: Sequence[Wanted]) -> None:
        """Retry startup models until each is registered, or no longer missing.

        Otherwise replicas that start while a host is down for a minute would stay out of service for good.
        """
        for pause_s in chain(FETCH_AGAIN_S, repeat(FETCH_AGAIN_S[-1])):
            logger.warning(
                "archives of the start that can't be fetched: the next attempt is in %d s", pause_s
            )
            await asyncio.sleep(pause_s)
            # Checked before each attempt, because earlier ones may have taken minutes.
            waiting = [one for one in waiting if self._missing.lacks(one) and not await self._tried(one)]
            if not waiting:
                return

    def _wanted_at_startup(self) -> list[Wanted]:
        """Check the snapshot's archives on disk and return the startup models. Blocks."""
        check_snapshot(self._server.snapshot_models, self._store.has)
        return startup_models(self._server, self._store.names, self._loader.gpus_of(None))

    async def opened(self) -> None:
        """Start writing snapshots: the server answers requests now."""
        await self._snapshots.started()

    def stopping(self) -> None:
        """Stop downloads because the server is about to stop; waiting callers get `Unavailable`."""
        if self._fetching_again is not None:
            self._fetching_again.cancel()
        self._fetching.close()

    async def close(self) -> None:
        """Remove every version, including its running requests, and wait until all are gone."""
        await self._snapshots.stopping()
        self._kept = list(self.versions())
        self._reconciler.hurry()
        self.stopping()
        for version in self._kept:
            self._take_out(version)
        # Those that were unregistered before may still be draining.
        await asyncio.gather(*(version.settled.wait() for version in self._reconciler.under_way()))
        await self._loader.close()
        if self._sweeping is not None:
            await self._sweeping
        self._unpackers.shutdown(wait=False)
        await asyncio.to_thread(self._store.close)

    async def _gone(self, version: Version) -> None:
        self._observer.gone(version, was_last=version.key.name not in self._serving)
        forget_archive(str(version.origin.archive.directory))
        # When the server stops, downloads stay in the store: the next start restores them from there.
        if version.claim.copy is not None and version not in self._kept:
            await self.written()  # otherwise a start after a crash would look for the deleted file
            self._give_up(version.claim)
        await asyncio.to_thread(self._store.remove, version.origin.archive)

    def _give_up(self, claim: Claim) -> None:
        """End a claim; delete its download, unless another claim takes it over or the next start needs it.

        Runs on the event loop: a registration could take over the file before a thread has deleted it.
        """
        copy = give_up(claim, self.claims)
        if copy is None:
            return
        if self._snapshots.needs(copy.name):
            logger.warning(
                "%s stays in the store, because the newest snapshot names it; delete it after a later one",
                copy,
            )
        else:
            self._store.delete(copy)


def _key_of(wanted: Wanted, location: str, archive: OpenedArchive) -> ModelKey:
    if is_workflow(archive.archive):  # it has no handler, and an error about that would mislead
        raise InvalidArchive(f"{location} {IS_WORKFLOW}, or register it at /workflows.")
    name = wanted.name or archive.manifest.model_name or default_model_name(location)
    return ModelKey(check_model_name(name), check_version_name(shown_url(wanted.url), archive.manifest))
