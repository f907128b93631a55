"""The composition root: creates the components in order, opens the ports, and shuts down in order.

Start: keys, registry, ports, start-up models (registered; they load in the background), ready.
Stop: unready, normal service for `drain_delay_s`, ports closed and accepted requests answered, versions
unloaded.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib.util
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from torchere.handlers.errors import MetricsCacheError
from torchere.serving import __version__
from torchere.serving.access.client_limits import client_limits_of
from torchere.serving.access.fixed_keys import FixedKeys
from torchere.serving.access.keys import KeyRing, keys_of
from torchere.serving.access.reload import Reloaded, watch
from torchere.serving.access.tls import certificates_of
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.errors import ServingError
from torchere.serving.frontend.connection_limit import MIN_FILES, open_file_limit
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.server import GrpcServer, grpc_listeners
from torchere.serving.frontend.rest.server import RestServer, listener_of, listeners
from torchere.serving.frontend.services import Services, budgets_of
from torchere.serving.frontend.summary import Caller, started_models, summary
from torchere.serving.io.addresses import refuse_taken, said_plainly
from torchere.serving.logs.access_lines import access_log
from torchere.serving.logs.audit import audit_log
from torchere.serving.logs.console import ConsoleFormatter, shortened
from torchere.serving.logs.lines import AT_START, formatter, lost_lines, say
from torchere.serving.process.signals import ending_signals
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.registry import Registry
from torchere.serving.telemetry.declared import MetricsConfig, built_in_config, read_metrics_config
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.scrape import Extent
from torchere.serving.telemetry.torchserve import close_metric_files, open_metric_files
from torchere.serving.workers.sandbox import announce as announce_sandbox
from torchere.serving.workers.spawn import Spawned

if TYPE_CHECKING:
    from torchere.serving.telemetry.tracing import SpanMaker

logger = logging.getLogger(__name__)

# By default CPython lets a thread hold the GIL for 5 ms, which would block the event loop: other threads
# decode long bodies and unpack archives.
SWITCH_INTERVAL_S = 0.0005
STARTED_LINE = "Model server started."  # launchers wait for this line on stdout
_SAME_SIGTERM_S = 1.0  # after a SIGTERM: the time in which another one is taken for the same


class Server:
    """One server on one event loop: `start`, serve, `stop`, each once.

    Example:
        server = Server(ServerSettings(model_store=Path("store"), load_models=("all",)))
        endpoints = await server.start()
        ...
        await server.stop()
    """

    def __init__(self, settings: ServerSettings, fork_server: Spawned | None = None) -> None:
        self._settings = settings
        self._fork_server = fork_server  # already started; the caller stops it
        self._metrics = Metrics(
            mode=settings.metrics_mode,
            config=_metrics_config(settings),
            auto_detect=settings.metrics_auto_detect,
            extent=Extent(settings.metrics_stages, settings.metrics_idle_s),
        )
        self._background: list[asyncio.Task[None]] = []  # cancelled at the end
        self._ports = Ports(settings)

    async def start(self) -> Endpoints:
        """Register the start-up models and open the ports; on cancellation, shut down everything started.

        Raises:
            ServingError: a port is in use, keys or certificate are unusable, management would be open to the
                network, or too few files may be open; all opened ports are closed.
        """
        settings = self._settings
        _refuse_few_files(open_file_limit())
        _refuse_open_management(settings)
        announce_sandbox(settings)
        await self._ports.refuse_if_taken()
        if settings.tracing_enabled:
            self._metrics.tracing = open_tracing()
        audit_log.open(settings.audit_log)
        certificates = certificates_of(settings)
        keys = self._keys = keys_of(settings)  # after all checks that may refuse the start: it writes a file
        self._registry = Registry(settings, RegistryMetrics(self._metrics), self._fork_server)
        budgets = budgets_of(settings.limits)
        own_limits = keys.client_limits if isinstance(keys, FixedKeys) else None
        client_limits = client_limits_of(settings.clients, own_limits, budgets.refused)
        self._dataplane = DataPlane(
            self._registry,
            self._metrics,
            client_limits=client_limits,
            readiness_of_all_models=settings.readiness_of_all_models,
        )
        self._observe()
        if certificates is not None:
            self._metrics.process.watch_certificate(lambda: certificates.value.expires_at_s)
        controlplane = self._controlplane = ControlPlane(self._registry, self._dataplane, settings)
        self._metrics.watch_budgets(lambda: budgets.held_bytes, budgets.refused)
        if client_limits is not None:
            self._metrics.watch_clients(client_limits.tallies)
        services = Services(settings, self._metrics, keys, __version__, budgets, certificates, client_limits)
        if files := [each for each in (keys, certificates) if isinstance(each, Reloaded)]:
            self._background.append(asyncio.create_task(watch(files)))
        try:
            wanted = await self._registry.wanted_at_startup()
            workflows = controlplane.workflows.known
            wanted_workflows = await workflows.wanted_at_startup()
            # Before archives are unpacked, which may take minutes, so that probes are answered meanwhile.
            endpoints = await self._ports.open(self._dataplane, controlplane, services)
            await self._registry.load_at_startup(wanted)
            await workflows.load_at_startup(wanted_workflows)
            self._dataplane.opened()
            await self._registry.opened()
        except BaseException:
            self._dataplane.draining()
            await self._end()
            raise
        return endpoints

    def _observe(self) -> None:
        """Start the periodic measurements: readiness, event loop lag and system metrics."""
        settings, dataplane = self._settings, self._dataplane
        self._metrics.watch_server(
            ready=lambda: dataplane.readiness().ready,
            inflight=lambda: dataplane.ledger.accepted - dataplane.ledger.answered,
            dropped_lines=lambda: access_log.dropped + lost_lines(),
        )
        self._background.append(asyncio.create_task(self._metrics.process.watch_loop()))
        self._background.append(asyncio.create_task(self._metrics.watch_load()))
        if settings.metrics_mode != "prometheus":
            open_metric_files(settings.metrics_directory)
        if settings.system_metrics_enabled:
            self._metrics.system.command = settings.system_metrics_command
            sampling = self._metrics.system.sample_every(
                settings.system_metrics_interval_s, settings.max_gpus
            )
            self._background.append(asyncio.create_task(sampling))

    async def stop(self) -> None:
        """Shut down the server; accepted requests are answered within `drain_timeout_s`."""
        self._dataplane.draining()
        self._ports.drain()
        await asyncio.sleep(self._settings.drain_delay_s)
        await self._end()

    async def _end(self) -> None:
        """Close ports and registry in order; metrics are served until the last version is unloaded."""
        self._registry.stopping()
        self._controlplane.workflows.known.stopping()
        await self._ports.close()
        await self._registry.close()
        await asyncio.to_thread(self._controlplane.workflows.known.close)
        await self._ports.close_metrics()
        for task in self._background:
            task.cancel()
        await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        """Close the metric files, the access and audit logs, and tracing; delete the keys. Blocks."""
        close_metric_files()
        access_log.close()
        audit_log.close()
        if self._metrics.tracing is not None:
            self._metrics.tracing.close()
        if isinstance(self._keys, KeyRing):
            self._keys.close()

    async def tell_models(self, endpoints: Endpoints) -> None:
        """Once every start-up model has loaded or failed, print which ones work and how to call each."""
        versions = list(self._registry.versions())
        await asyncio.gather(*(version.settled.wait() for version in versions))
        caller = Caller(_own_command(), endpoints.rest["inference"], self._settings)
        models = started_models(
            versions,
            self._registry.missing(),
            lambda key: self._dataplane.facts(key.name, key.version),
            caller,
        )
        style = formatter()
        if not isinstance(style, ConsoleFormatter):
            for model in models:
                if model.line:
                    logger.info("To call %s: %s", model.name, model.line)
            return
        grpc = {api: address.authority for api, address in endpoints.grpc.items()}
        addresses = {api: (str(address), grpc.get(api, "")) for api, address in endpoints.rest.items()}
        keys = _about_keys(self._settings)
        for line in summary(models, addresses, keys, style.warnings, style.paint):
            say(shortened(line))
        style.is_started = True

    def ledger(self) -> tuple[int, int]:
        """Return the number of accepted predictions so far, and the number of answered ones."""
        return self._dataplane.ledger.accepted, self._dataplane.ledger.answered


async def run(settings: ServerSettings, fork_server: Spawned | None = None) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; a second signal ends the process at once: see `StopSignals`.

    Returns the exit status: 0 after an orderly stop, 1 when the server could not start.
    """
    stop = asyncio.Event()
    if settings.install_signal_handlers:
        signals = StopSignals(stop)
        for number in ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, signals.take, number)
    server = Server(settings, fork_server)
    try:
        endpoints = await _started(server, stop)
    except ServingError as err:
        logger.error("%s", err.full_text)
        return 1
    if endpoints is None:
        logger.info("stopped before the start was over")
        return 0
    _announce(endpoints, settings)
    telling = asyncio.create_task(server.tell_models(endpoints))
    gc.freeze()  # the objects of the start live until exit: exclude them from collections
    gc.enable()  # may have been disabled until here: see `commands/serve.py`
    await stop.wait()
    telling.cancel()
    await server.stop()
    logger.info("stopped: %d predictions accepted, %d answered", *server.ledger())
    return 0


async def _started(server: Server, stop: asyncio.Event) -> Endpoints | None:
    """Start the server; return None when `stop` was set during the start and the server shut down again."""
    starting = asyncio.ensure_future(server.start())
    told = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        starting.cancel()  # no effect when it is done
    try:
        return await starting
    except asyncio.CancelledError:
        return None


def serve(settings: ServerSettings, fork_server: Spawned | None = None) -> int:
    """Run a server in this thread until a stop signal; return the exit status."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _show_threads_on_sigquit()
    return uvloop.run(run(settings, fork_server))


def _show_threads_on_sigquit() -> None:
    """Dump all thread stacks to standard error on SIGQUIT, as a Java server does, and keep running."""
    with suppress(RuntimeError, AttributeError, ValueError):
        faulthandler.register(signal.SIGQUIT)


class StopSignals:
    """Sets `stop` at the first signal, and ends the process at the second.

    A SIGTERM that soon follows another one is not the second: systemd sends one to a service whose
    `ExecStop=torchserve --stop` has just sent another, and scripts do likewise.
    """

    def __init__(self, stop: asyncio.Event, now: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._now = now
        self._first = 0
        self._came_s = 0.0

    def take(self, number: int) -> None:
        """Take a signal that came."""
        if not self._stop.is_set():
            logger.info("signal %d: draining", number)
            self._first, self._came_s = number, self._now()
            self._stop.set()
        elif not number == self._first == signal.SIGTERM or self._now() - self._came_s > _SAME_SIGTERM_S:
            logger.warning("second signal %d: ending at once", number)
            sys.exit(128 + number)


def _announce(endpoints: Endpoints, settings: ServerSettings) -> None:
    for api, address in endpoints.rest.items():
        logger.info("%s API: %s", api.capitalize(), address, extra=AT_START)
    for api, address in endpoints.grpc.items():
        logger.info("%s gRPC: %s", api.capitalize(), address.authority, extra=AT_START)
    if settings.client_ca_file is not None:
        logger.info("Client certificates are accepted: of the CAs in %s", settings.client_ca_file.absolute())
    if settings.token_auth_enabled:
        logger.info(
            "Token authorization is enforced. The keys are in %s; switch it off with --disable-token-auth",
            (settings.token_keys_file or settings.key_file).absolute(),
            extra=AT_START,
        )
    say(STARTED_LINE)


def _own_command() -> str | None:
    """Return the command that runs `torchere`; None if httpx, which `torchere predict` needs, is missing."""
    if importlib.util.find_spec("httpx") is None:
        return None
    beside = Path(sys.executable).with_name("torchere")
    found = shutil.which("torchere")
    return "torchere" if found and Path(found).parent == beside.parent else str(beside)


def _about_keys(settings: ServerSettings) -> str:
    if not settings.token_auth_enabled:
        return "off: clients need a certificate" if settings.client_ca_file else "off: no client needs one"
    if settings.token_keys_file is not None:
        return str(settings.token_keys_file.absolute())
    return f"{settings.key_file.absolute()} (good for {settings.token_expiration_min:g} min)"


def open_tracing() -> SpanMaker:
    """Return a span maker that exports spans as OpenTelemetry's environment variables configure.

    Raises:
        ServingError: OpenTelemetry's packages are not installed.
    """
    try:
        from torchere.serving.telemetry.tracing import SpanMaker, exporting_provider  # noqa: PLC0415 - optional
    except ImportError as err:
        raise ServingError(
            "Tracing is on, and OpenTelemetry is not installed.",
            f"{err}. Install torchere[otel], or leave out tracing=true",
        ) from err
    return SpanMaker(exporting_provider(__version__))


def _refuse_open_management(settings: ServerSettings) -> None:
    """Raise ServingError where clients in the network could manage models without authorization.

    The commands have checked it before, but settings that a program makes pass no other check.
    """
    for address in (settings.management_address, settings.grpc_management_address):
        is_open = address is not None and not settings.allows_management(address)
        if address is not None and is_open and settings.insecure_management != "local":
            raise ServingError(
                "Management would be open to the network.",
                f"every client that reaches {address.authority} may change models, and so run code: "
                "authorize clients, or set insecure_management",
            )


def _refuse_few_files(files: int) -> None:
    """Raise ServingError if idle connections could leave no file descriptor for probes and management."""
    if files < MIN_FILES:
        raise ServingError(
            f"At most {files} files may be open, and the server needs {MIN_FILES} at least.",
            "Raise the hard limit of open files (ulimit -Hn).",
        )


def _metrics_config(settings: ServerSettings) -> MetricsConfig:
    """Return the metrics that the file `metrics_config` declares; log an invalid file, and return none."""
    if settings.metrics_config is None:
        return built_in_config()
    try:
        config = read_metrics_config(settings.metrics_config, settings.metrics_mode)
    except MetricsCacheError as err:
        logger.error("Failed to load metrics configuration: %s: %s", type(err).__name__, err)
        return MetricsConfig()
    for cause in config.dropped:
        logger.warning("a metric that metrics_config declares is dropped: %s", cause)
    return config


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a started server, by API ("inference", "management", "metrics")."""

    rest: dict[str, Address] = field(default_factory=dict)
    grpc: dict[str, Address] = field(default_factory=dict)


class Ports:
    """The configured ports. Used on the event loop; call `open`, `drain` and `close` once each."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._rest: list[RestServer] = []
        self._metrics_only: list[RestServer] = []
        self._grpc: list[GrpcServer] = []

    async def refuse_if_taken(self) -> None:
        """Check that no other server uses the addresses; does not open any port.

        Raises:
            ServingError: an address is in use.
        """
        settings = self._settings
        rest = [address for address, _ in listeners(settings)]
        grpc = filter(None, (settings.grpc_inference_address, settings.grpc_management_address))
        await asyncio.to_thread(refuse_taken, [*rest, *grpc])

    async def open(self, dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> Endpoints:
        """Open all ports.

        Raises:
            ServingError: a port can't be opened; the ports opened before it stay open until `close`.
        """
        endpoints = Endpoints()
        for address, surfaces in listeners(self._settings):
            listener = listener_of(surfaces, dataplane, controlplane, services)
            rest = RestServer(
                listener,
                address,
                drain_timeout_s=self._settings.drain_timeout_s,
                certificates=services.certificates,
            )
            with said_plainly(address):
                bound = await rest.start()
            (self._metrics_only if surfaces == {"metrics"} else self._rest).append(rest)
            endpoints.rest.update(dict.fromkeys(surfaces, bound))
        for grpc in grpc_listeners(dataplane, controlplane, services):
            with said_plainly(grpc.address):
                endpoints.grpc[grpc.api] = await grpc.start()
            self._grpc.append(grpc)
        return endpoints

    def drain(self) -> None:
        """Keep serving, and close each REST connection after its next response; see `RestServer.drain`."""
        for rest in self._rest:
            rest.drain()

    async def close(self) -> None:
        """Close all but metrics-only ports; accepted requests are answered within `drain_timeout_s`."""
        await asyncio.gather(
            *(rest.stop() for rest in self._rest),
            *(grpc.stop(self._settings.drain_timeout_s) for grpc in self._grpc),
        )

    async def close_metrics(self) -> None:
        """Close the metrics-only ports, which stay open longer so that the drain can be monitored."""
        await asyncio.gather(*(rest.stop() for rest in self._metrics_only))
