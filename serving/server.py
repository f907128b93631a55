"""The composition root: builds the rooms in order, opens the ports, and takes it all down in order.

Start: keys, registry (start-up models registered, loading in the background), ports, ready.
Stop: unready, `drain_delay_s` of ordinary service, ports closed and what is in answered, versions unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from torchere.handlers.errors import MetricsCacheError
from torchere.serving import __version__
from torchere.serving.errors import ServingError
from torchere.serving.frontend.controlplane import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.server import GrpcServer, grpc_listeners
from torchere.serving.frontend.rest.app import listener_app, listeners
from torchere.serving.frontend.rest.server import RestServer, TlsFiles
from torchere.serving.frontend.services import CorsHeaders, Services
from torchere.serving.observation import RegistryMetrics
from torchere.serving.registry.registry import Registry
from torchere.serving.settings import Address, ServerSettings
from torchere.serving.telemetry.metric_log import close_metric_files, open_metric_files
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.metrics_config import MetricsConfig, built_in_config, read_metrics_config
from torchere.serving.tokens import KeyRing

logger = logging.getLogger(__name__)

STARTED_LINE = "Model server started."  # launchers wait for this line on stdout
# CPython lets a thread keep the GIL for 5 ms by default. With executor threads beside the event loop that is
# an eternity: it answered 7,100 small requests a second at the default, and 17,000 at half a millisecond.
SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a started server listens, by API ("inference", "management", "metrics")."""

    rest: dict[str, Address] = field(default_factory=dict)
    grpc: dict[str, Address] = field(default_factory=dict)


class Server:
    """One server on one event loop: `start`, serve, `stop`, each once.

    Example:
        server = Server(ServerSettings(model_store=Path("store"), load_models=("all",)))
        endpoints = await server.start()
        ...
        await server.stop()
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._metrics = Metrics(
            mode=settings.metrics_mode,
            config=_metrics_config(settings),
            auto_detect=settings.metrics_auto_detect,
        )
        self._sampling: asyncio.Task[None] | None = None
        self._rest: list[RestServer] = []
        self._grpc: list[GrpcServer] = []

    async def start(self) -> Endpoints:
        """Register the start-up models and open the ports.

        Raises:
            ServingError: a port is taken, or the key file can't be written; what was opened is closed again.
        """
        settings = self._settings
        keys = (
            KeyRing(settings.key_file, settings.token_expiration_min) if settings.token_auth_enabled else None
        )
        self._registry = Registry(settings, RegistryMetrics(self._metrics))
        self._dataplane = DataPlane(self._registry, self._metrics)
        self._watch()
        controlplane = ControlPlane(self._registry, self._dataplane, settings)
        services = Services(settings, self._metrics, keys, __version__, _cors(settings))
        await self._registry.load_at_startup()
        try:
            endpoints = await self._open_ports(controlplane, services)
        except BaseException:
            await self.stop()
            raise
        self._dataplane.opened()
        await self._registry.opened()
        return endpoints

    def _watch(self) -> None:
        """Begin to record what is not told by events."""
        settings, dataplane = self._settings, self._dataplane
        self._metrics.watch_server(
            ready=lambda: dataplane.readiness().ready,
            inflight=lambda: dataplane.accepted - dataplane.answered,
        )
        if settings.metrics_mode != "prometheus":
            open_metric_files(settings.metrics_directory)
        if settings.system_metrics_enabled:
            sampling = self._metrics.system.sample_every(
                settings.system_metrics_interval_s, settings.max_gpus
            )
            self._sampling = asyncio.create_task(sampling)

    async def _open_ports(self, controlplane: ControlPlane, services: Services) -> Endpoints:
        endpoints = Endpoints()
        for address, surfaces in listeners(self._settings):
            app = listener_app(surfaces, self._dataplane, controlplane, services)
            rest = RestServer(
                app, address, drain_timeout_s=self._settings.drain_timeout_s, tls=_tls(self._settings)
            )
            with _said_plainly(address):
                bound = await rest.start()
            self._rest.append(rest)
            endpoints.rest.update(dict.fromkeys(surfaces, bound))
        for grpc in grpc_listeners(self._dataplane, controlplane, services):
            with _said_plainly(grpc.address):
                endpoints.grpc[grpc.api] = await grpc.start()
            self._grpc.append(grpc)
        return endpoints

    async def stop(self) -> None:
        """Take everything down; what was accepted is answered within `drain_timeout_s`."""
        self._dataplane.draining()
        await asyncio.sleep(self._settings.drain_delay_s)
        await asyncio.gather(
            *(rest.stop() for rest in self._rest),
            *(grpc.stop(self._settings.drain_timeout_s) for grpc in self._grpc),
        )
        await self._registry.close()
        if self._sampling is not None:
            self._sampling.cancel()
        close_metric_files()

    def ledger(self) -> tuple[int, int]:
        """How many predictions were accepted so far, and how many of them are answered."""
        return self._dataplane.accepted, self._dataplane.answered


async def run(settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    Returns the exit status: 0 after an orderly stop, 1 when the server could not start.
    """
    stop = asyncio.Event()
    if settings.install_signal_handlers:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _on_signal, number, stop)
    server = Server(settings)
    try:
        endpoints = await server.start()
    except ServingError as err:
        logger.error("%s %s", err.message, err.detail)
        return 1
    _announce(endpoints, settings)
    gc.freeze()  # torch's hundreds of thousands of objects live as long as we do: never walk them again
    await stop.wait()
    await server.stop()
    logger.info("stopped: %d predictions accepted, %d answered", *server.ledger())
    return 0


def serve(settings: ServerSettings) -> int:
    """Run a server in this thread until it is told to stop; returns the exit status."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)  # of this thread, where tiny models may run; executors set their own
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it announces each port's start and end
    if sys.platform == "win32":
        return asyncio.run(run(settings))
    import uvloop  # noqa: PLC0415 - not to be had on Windows

    return uvloop.run(run(settings))


def _on_signal(number: int, stop: asyncio.Event) -> None:
    if stop.is_set():
        logger.warning("second signal %d: ending at once", number)
        sys.exit(128 + number)
    logger.info("signal %d: draining", number)
    stop.set()


def _announce(endpoints: Endpoints, settings: ServerSettings) -> None:
    for api, address in endpoints.rest.items():
        logger.info("%s API: %s", api.capitalize(), address)
    for api, address in endpoints.grpc.items():
        logger.info("%s gRPC: %s:%d", api.capitalize(), address.host, address.port)
    if settings.token_auth_enabled:
        logger.info(
            "Token authorization is enforced. The keys are in %s; switch it off with --disable-token-auth",
            settings.key_file.absolute(),
        )
    print(STARTED_LINE, flush=True)


def _metrics_config(settings: ServerSettings) -> MetricsConfig:
    """What `metrics_config` declares. A bad file costs its metrics, not the service (contract)."""
    if settings.metrics_config is None:
        return built_in_config()
    try:
        return read_metrics_config(settings.metrics_config)
    except MetricsCacheError as err:
        logger.error("Failed to load metrics configuration: %s: %s", type(err).__name__, err)
        return MetricsConfig()


def _cors(settings: ServerSettings) -> CorsHeaders:
    return CorsHeaders(
        settings.cors_allowed_origin, settings.cors_allowed_methods, settings.cors_allowed_headers
    )


def _tls(settings: ServerSettings) -> TlsFiles | None:
    if settings.certificate_file is None or settings.private_key_file is None:
        return None
    return TlsFiles(settings.certificate_file, settings.private_key_file)


@contextlib.contextmanager
def _said_plainly(address: Address) -> Iterator[None]:
    """An operating system's refusal of an address, in words that say what to do."""
    try:
        yield
    except OSError as err:
        raise ServingError(
            f"Cannot listen on {address}: {err.strerror or err}.",
            "Is another server running there? Set another address or port in the configuration.",
        ) from err
