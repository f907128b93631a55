"""Builds a loadable version from an unpacked archive: its settings, executor pool and batcher.

Nothing is loaded here: the reconciler loads a version when its target is above 0 executors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from torchere.archiver.split import SECTION, Split
from torchere.handlers.built_in import CPP_ADVICE, CPP_HANDLERS
from torchere.handlers.cgroup import available_cores
from torchere.handlers.compiled.package import holds_gil
from torchere.handlers.cpp import cpp_handler_name
from torchere.serving.batching.admission import Admission
from torchere.serving.batching.batcher import Batcher
from torchere.serving.batching.quarantine import Quarantine, QuarantineFiles
from torchere.serving.batching.stateful import StatefulBatcher
from torchere.serving.config.model_settings import ModelConfig, effective_settings
from torchere.serving.config.server_settings import (
    DeviceType,
    ModelSettings,
    Placement,
    QuarantineSettings,
    ServerSettings,
)
from torchere.serving.errors import InvalidRequest, LoadFailed
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.names import check_runtime
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.version import Origin, Version, VersionMetrics
from torchere.serving.store.package import StoredArchive
from torchere.serving.types import ModelKey
from torchere.serving.workers.devices import CoreShares, chosen_threads, counted_kind, gpu_count
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.isolation import LANES_SHARE, choose_isolation
from torchere.serving.workers.launch import CompilerLauncher, ExecLauncher, ForkLauncher, Launcher
from torchere.serving.workers.oom import OomWatch
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.rendezvous import rendezvous_of
from torchere.serving.workers.rooms import RoomLauncher
from torchere.serving.workers.sandbox import Sandbox, sandbox_of
from torchere.serving.workers.send_ahead import MOST_INSIDE
from torchere.serving.workers.spawn import Spawned, worker_environment
from torchere.serving.workers.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

# The contract's text for every request that can't be admitted.
_NO_WORKER = (
    'Model "{}" has no worker to serve inference request. Please use scale workers API to add workers. If '
    "this is a sequence inference, please check if it is closed, or expired; or exceeds "
    "maxSequenceJobQueueSize"
)
_COUNTED = ("gpu", "cuda", "xpu", "hpu")  # kinds of GPUs with numbers


class Loader:
    """Builds versions for one server; used on the event loop."""

    def __init__(
        self,
        server: ServerSettings,
        observer: RegistryMetrics,
        fork_server: Spawned | None = None,
    ) -> None:
        self._server = server
        self._observer = observer
        self._next_id = itertools.count(server.first_executor_id).__next__
        self._variables = worker_environment(server.env_vars_hidden_from_workers, server)
        self._launcher = ForkLauncher(self._variables, fork_server, server.preload_modules)
        self._sandbox = sandbox_of(server)
        self._rooms = RoomLauncher(self._launcher)
        self._oom = OomWatch()
        self._cores = CoreShares(available_cores(), chosen_threads(self._variables))
        self._gpus: dict[str, int] = {}  # by kind

    def gpus_of(self, kind: DeviceType | None) -> int:
        """Return the number of GPUs of a kind that executors may use; the first call for a kind blocks."""
        counted = counted_kind(kind)
        if counted not in self._gpus:
            self._gpus[counted] = gpu_count(self._server.max_gpus, counted)
        return self._gpus[counted]

    def build(self, key: ModelKey, archive: StoredArchive, wanted: Wanted) -> Version:
        """Build a version in state NEW.

        Raises:
            InvalidRequest: no handler is named anywhere, or the runtime is unknown.
            LoadFailed: a worker needs more GPUs than there are, or needs a network that its sandbox lacks.
            ServingError: other machines can't join its ranks: see `rendezvous_of`.
        """
        model = archive.manifest.get("model") or {}
        handler = wanted.handler or model.get("handler") or self._server.default_handler
        if not handler:
            raise InvalidRequest(
                f"No handler is named for {key.name}: neither by the request, nor by the archive's manifest, "
                "nor by default_service_handler."
            )
        runtime = check_runtime(wanted.runtime or archive.manifest.get("runtime") or "python")
        in_cpp = cpp_handler_name(handler, runtime) is not None
        if runtime == "LSP" and handler not in CPP_HANDLERS and not in_cpp:
            logger.warning("%s: the handler of runtime LSP is %s; %s", key, handler, CPP_ADVICE)
        config = archive.config
        gpus = self.gpus_of(config.device_type)
        if not gpus and (config.device_type in _COUNTED or (config.device_ids and not config.device_type)):
            logger.warning("%s asks for a GPU in its model config, and there is none: the CPU does it", key)
        defaults = self._server.model_defaults.get(key.name, {}).get(key.version, {})
        settings = effective_settings(wanted.asked, config, defaults, self._server, gpus)
        if wanted.executor_range:
            settings = settings.scaled(*wanted.executor_range)
        if settings.parallel and 0 < len(settings.gpu_ids) < settings.parallel.level:
            level = settings.parallel.level
            raise LoadFailed(f"No enough gpu devices for model:{key.name} parallelLevel:{level}")
        self._refuse_without_network(key, config)
        isolation: Placement = "process"
        keeps_state = _is_stateful(settings) or settings.batch.at_once > 1
        if not (in_cpp or archive.environment or settings.parallel or keeps_state):
            isolation = choose_isolation(archive, settings, handler, may_share=self._may_share_process)
        _tell_unshared(key, settings, isolation)
        origin = Origin(
            archive=archive,
            handler=handler,
            runtime=runtime,
            isolation=isolation,
            loaded_at_startup=wanted.at_startup,
            needs_compiler=archive.holds_gil or bool(config.raw.get("pt2")),
            workflow=wanted.workflow,
            is_function=wanted.archive is not None,
        )
        return self._assemble(key, origin, settings)

    def _assemble(self, key: ModelKey, origin: Origin, settings: ModelSettings) -> Version:
        def pump_soon() -> None:
            asyncio.get_running_loop().call_soon(batcher.pump)

        observer = self._observer.watch(key)
        launcher = self._launcher_of(key, origin, settings)
        pool = self._pool(self._spec(key, origin, settings), launcher, settings, pump_soon, observer)
        batcher = _batcher(key, settings, pool, observer)
        most_bytes = self._server.limits.max_response_bytes
        batcher.unread_limit_bytes = max(batcher.unread_limit_bytes, most_bytes)
        batcher.restart_wait_s = self._server.restart_wait_s
        batcher.quarantine = Quarantine(
            QuarantineFiles(key, _quarantine_settings(self._server)),
            expiry_s=self._server.quarantine_expiry_s,
        )
        return Version(key, origin, settings, pool, batcher, observer=observer)

    def _pool(
        self,
        spec: LoadSpec,
        launcher: Launcher,
        settings: ModelSettings,
        on_free: Callable[[], None],
        observer: VersionMetrics,
    ) -> WorkerPool:
        # Requests sent ahead to a worker are not always counted as queued, so tickets and a small queue limit
        # forbid sending ahead.
        counts_all = (
            settings.batch.use_tickets
            or settings.batch.at_once > 1
            or settings.batch.max_queue_size < MOST_INSIDE
        )
        workers = WorkerSettings(
            spec=spec,
            response_timeout_s=settings.response_timeout_s,
            startup_timeout_s=settings.startup_timeout_s,
            max_retry_timeout_s=settings.max_retry_timeout_s,
            on_free=on_free,
            on_loaded=observer.executor_loaded,
            on_lost=observer.executor_lost,
            on_metrics=observer.handler_metrics,
            launcher=launcher,
            oom=self._oom,
            hangs_as_deaths=self._server.strict_compatibility,
            sends_ahead=not counts_all,
        )
        return WorkerPool(workers, self._next_id, self._cores)

    def _refuse_without_network(self, key: ModelKey, config: ModelConfig) -> None:
        split = Split.read(config.raw)
        if split and split.weights and self._sandbox is not None and not self._sandbox.network:
            raise LoadFailed(
                f"The weights of model {key.name} are in S3, and its workers have no network",
                f"{SECTION}.weights of its model config is {split.weights}, and worker_sandbox=strict; set "
                "worker_network=true, or put the weights into the archive",
            )

    @property
    def _may_share_process(self) -> bool:
        return self._sandbox is None or not self._sandbox.takes_whole_process

    def _sandbox_of(self, origin: Origin, settings: ModelSettings) -> Sandbox | None:
        if self._sandbox is None:
            return None
        on_device = bool(settings.gpu_ids) or settings.device_type == "xla"
        return replace(self._sandbox, archive=str(origin.archive.directory), gpu=on_device)

    def _is_confined_first(self, origin: Origin) -> bool:
        """Return whether the sandbox is entered before the interpreter starts: packages may be hostile.

        Not with `basic`, where it would make each start of a worker a tenth longer.
        """
        return origin.archive.environment is not None and not self._may_share_process

    def _launcher_of(self, key: ModelKey, origin: Origin, settings: ModelSettings) -> Launcher:
        environment = origin.archive.environment
        if environment is None and origin.isolation == "shared":
            return self._rooms.of(key)
        if environment is None:
            return CompilerLauncher(self._launcher) if origin.needs_compiler else self._launcher
        return ExecLauncher(
            self._variables,
            environment.python,
            sandbox=self._sandbox_of(origin, settings) if self._is_confined_first(origin) else None,
            packages=environment.packages,
        )

    async def close(self) -> None:
        """Stop the fork server and the shared worker processes; call it when no version is left."""
        await self._rooms.close()
        await self._launcher.close()

    def _spec(self, key: ModelKey, origin: Origin, settings: ModelSettings) -> LoadSpec:
        parallel = settings.parallel
        return LoadSpec(
            model_name=key.name,
            model_version=key.version,
            archive_dir=str(origin.archive.directory),
            handler=origin.handler,
            declared_metrics=self._observer.declared_metrics,
            runtime=origin.runtime,
            handler_installed=origin.handler == self._server.default_handler,
            manifest=origin.archive.manifest,
            model_config=origin.archive.config.raw,
            envelope=self._server.service_envelope,
            batch_size=settings.batch.max_batch_size,
            decode_input=self._server.decode_input,
            limit_max_image_pixels=self._server.limit_max_image_pixels,
            intra_op_threads=self._threads(settings),
            gpu_ids=settings.gpu_ids,
            max_response_bytes=self._server.limits.max_response_bytes,
            pinned=_is_stateful(settings),
            shares_weights=LANES_SHARE[origin.isolation],
            at_once=settings.batch.at_once,
            sandbox=None if self._is_confined_first(origin) else self._sandbox_of(origin, settings),
            ranks=parallel.ranks if parallel else 1,
            devices=parallel.level if parallel else 1,
            parallel_type=parallel.kind if parallel else "",
            rendezvous=rendezvous_of(
                origin.archive, settings, self._server.rendezvous, at_startup=origin.loaded_at_startup
            ),
            max_restarts=parallel.max_restarts if parallel else None,
        )

    def _threads(self, settings: ModelSettings) -> int:
        """Return the intra-op threads of a process while it loads."""
        ranks, threads = (settings.parallel.ranks, settings.parallel.threads) if settings.parallel else (1, 0)
        return threads or self._cores.with_more(settings.min_executors * ranks)


def _tell_unshared(key: ModelKey, settings: ModelSettings, isolation: str) -> None:
    if settings.isolation == "shared" != isolation:
        logger.info(
            "model %s version %s can't share a process with other models and gets isolation: %s",
            key.name,
            key.version,
            isolation,
        )


def model_holds_gil(archive: StoredArchive) -> bool:
    """Return whether the model is a `.pt2` that holds the GIL on a CPU; this reads its file."""
    serialized = str((archive.manifest.get("model") or {}).get("serializedFile") or "")
    if not serialized.endswith(".pt2"):
        return False
    return holds_gil(str(archive.directory / serialized), str(archive.directory))


def _is_stateful(settings: ModelSettings) -> bool:
    return settings.sequences is not None or settings.continuous


def _batcher(key: ModelKey, settings: ModelSettings, pool: WorkerPool, observer: VersionMetrics) -> Admission:
    text = _NO_WORKER.format(key.name)
    if _is_stateful(settings):
        return StatefulBatcher(
            settings.batch, settings.sequences, pool, observer=observer, now=time.monotonic, refusal=text
        )
    batch = settings.batch if settings.batch.at_once == 1 else replace(settings.batch, max_batch_size=1)
    batcher = Batcher(batch, pool, observer=observer, now=time.monotonic, refusal=text)
    if settings.sequences_unbounded:
        # The contract: without sequenceMaxIdleMSec every request is refused.
        batcher.close_admission(for_good=True)
    return batcher


def _quarantine_settings(server: ServerSettings) -> QuarantineSettings | None:
    if server.quarantine_directory is None:
        return None
    return QuarantineSettings(
        server.quarantine_directory, server.quarantine_max_files, server.quarantine_max_bytes
    )
