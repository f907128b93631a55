"""All settings of the server, which are fixed when it starts.

Names contain the units. The defaults are TorchServe 0.12's, except those that `docs/differences.md` lists.
This module reads no file and no environment variable: `resolve.py` builds these records.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

Isolation = Literal["auto", "thread", "process", "shared"]
ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)
Placement = Literal["thread", "process", "shared"]  # how `auto` and `shared` are resolved for a version
StageSeries = Literal["buckets", "means", "none"]
STAGE_SERIES: tuple[StageSeries, ...] = get_args(StageSeries)
SandboxLevel = Literal["off", "basic", "strict"]
SANDBOX_LEVELS: tuple[SandboxLevel, ...] = get_args(SandboxLevel)
# `deviceType` of a model: `gpu` means `cuda`, which includes ROCm; `mps` and `xla` have no device ids.
DeviceType = Literal["cpu", "gpu", "cuda", "xpu", "mps", "hpu", "xla"]
Dispatch = Literal["torchserve", "eager"]
MetricsMode = Literal["log", "prometheus", "legacy"]
METRICS_MODES: tuple[MetricsMode, ...] = get_args(MetricsMode)

# Environment variables that `strict` hides from workers, unless blacklist_env_vars names others.
SECRET_ENV_VARS = r"(?i)(AWS|AZURE|GOOGLE|OTEL)_.*|.*(SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY).*"
# Values that `strict` then hides, too: URLs with a password, which may have an unescaped slash, unlike a port
# before a path (`host:8080/a@b`).
SECRET_ENV_VALUES = r"://[^\s/?#@:\[]*:(?!\d{0,5}/)[^\s@]+@"

MAX_EXECUTORS = 1024  # per version; a typo must not start a million processes
MAX_RANKS = 256  # processes of a worker on one machine
MAX_MACHINES = 256  # machines of a worker
MAX_BATCH_SIZE = 65_536
MAX_NUMBER = 2**31 - 1  # for all other numbers, which are Java ints in TorchServe; 68 years in seconds
MAX_CLIENT_LIMIT = 10**6  # for each limit of a client: requests a second, requests at once, predictions
_BOUNDS = {
    "minWorkers": MAX_EXECUTORS,
    "maxWorkers": MAX_EXECUTORS,
    "batchSize": MAX_BATCH_SIZE,
    "parallelLevel": MAX_RANKS,
    "nnodes": MAX_MACHINES,
}


def largest(key: str) -> int:
    """Return the largest allowed value of a model setting; `key` is TorchServe's name of the setting."""
    return _BOUNDS.get(key, MAX_NUMBER)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a REST listener: a TCP host and port, or a Unix socket path."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port, which is printed at startup
    unix_path: str | None = None
    tls: bool = False

    def __str__(self) -> str:
        if self.unix_path:
            return f"unix:{self.unix_path}"
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    @property
    def authority(self) -> str:
        """`host:port` as in URLs and gRPC targets, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only clients on this machine reach it: loopback, or a Unix socket."""
        if self.unix_path is not None or self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may resolve to any address
            return False


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Batching of the requests of one version.

    With dispatch `torchserve`, a batch waits for more requests until its oldest request has waited
    `max_queue_delay_ms`; with `eager`, it never waits while an executor is idle. With a `max_batch_size` of 1
    no batch waits.
    """

    max_batch_size: int = 1
    max_queue_delay_ms: int = 100
    max_queue_size: int = 100  # queued requests; any further request is rejected immediately
    dispatch: Dispatch = "torchserve"
    at_once: int = 1  # batches that an executor runs at the same time; above 1, each has one request
    use_tickets: bool = False  # admit a request only while an executor is idle


@dataclass(frozen=True, slots=True)
class SequenceHeaders:
    """The names of the headers of sequences, for clients and handlers alike."""

    id: str = "ts_request_sequence_id"
    start: str = "ts_request_sequence_start"
    end: str = "ts_request_sequence_end"


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Limits of stateful sequences: their number, queue and lifetime; and the names of their headers."""

    max_idle_s: float  # a sequence ends after this long without a request
    timeout_s: float = 0.0  # limit on the lifetime of a sequence; 0: no limit
    max_sequences: int = 1
    max_queue_size: int = 1  # queued requests per sequence
    headers: SequenceHeaders = SequenceHeaders()


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """How one worker is spread over several processes and devices (TorchServe's `parallelType`)."""

    kind: Literal["pp", "tp", "pptp", "custom"]
    level: int  # devices of a worker on each machine, and unless `custom` its processes there
    threads: int = 0  # intra-op threads of a process; 0: its share of the cores
    # The rest is for groups over several machines (`workers/machines.py`), as in torchrun.
    least_machines: int = 1
    most_machines: int = 1
    port: int = 0  # where the machines meet; 0: the server's `rendezvous_port`
    run_id: str = ""
    last_call_s: float = 5.0  # how long to wait for machines beyond the minimum
    max_restarts: int | None = None  # in a row; None: by the rules of all workers

    @property
    def ranks(self) -> int:
        """The number of processes of a worker on each machine; a `custom` one starts its own."""
        return 1 if self.kind == "custom" else self.level

    @property
    def is_group(self) -> bool:
        """Whether a worker is several processes."""
        return self.ranks > 1 or self.most_machines > 1


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The effective settings of one version, merged from all sources (`model_settings.py`)."""

    batch: BatchSettings = field(default_factory=BatchSettings)
    min_executors: int = 1
    max_executors: int = 1
    response_timeout_s: float = 120.0  # limit for a batch; a slower executor is treated as hung
    startup_timeout_s: float = 120.0  # limit for an executor, from its start to the end of its warm-up
    client_timeout_ms: int = 0  # default deadline of a request; 0: no deadline
    max_retry_timeout_s: float = 300.0  # after crashing for this long, an executor is not restarted
    isolation: Isolation = "auto"
    sequences: SequenceSettings | None = None  # None: requests are independent
    sequences_unbounded: bool = False  # no idle time is set, so no request is admitted
    continuous: bool = False  # continuous batching: a request may rejoin the next batch
    device_ids: tuple[int, ...] = ()  # GPUs that the model requests; all are available
    gpu_ids: tuple[int, ...] = ()  # GPUs assigned to executors in rotation; empty: CPU, or a kind without ids
    device_type: DeviceType | None = None  # None: a GPU if there is one
    parallel: ParallelSettings | None = None  # None: a worker is one process on one device

    def scaled(self, min_executors: int, max_executors: int) -> ModelSettings:
        """Return the settings with other executor counts, limited by the GPUs if a worker has several."""
        most = MAX_EXECUTORS
        if self.parallel is not None and self.gpu_ids:
            most = len(self.gpu_ids) // self.parallel.level
        if self.parallel is not None and self.parallel.most_machines > 1:
            most = min(most, 1)  # only one group can meet at its address
        return replace(self, min_executors=min(min_executors, most), max_executors=min(max_executors, most))


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits on external input; exceeding one is an error without side effects."""

    max_request_bytes: int = 6_553_500
    max_response_bytes: int = 6_553_500
    max_held_bytes: int = 0  # of all unfinished requests; 0: a quarter of the container's memory
    max_connections: int = 0  # of an inference listener; 0: derived from the limit of open files
    # Least bytes a second of a body or message, averaged over a minute; 0: any progress will do. The default
    # is that of Apache's mod_reqtimeout; GPRS sends five times as much.
    min_upload_rate: int = 500
    max_archive_entries: int = 10_000
    max_archive_bytes: int = 64 * 2**30  # after unpacking
    max_download_bytes: int = 16 * 2**30  # of an archive downloaded from a URL


# Name of the member with torchere's own settings, in a snapshot and in each model of it. TorchServe ignores
# unknown keys, so files of its users may contain keys with any other names.
OURS = "torchere"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Limits for each client: an identity, or an address where it has none. 0: no limit."""

    rate: float = 0.0  # inference requests a second
    burst: int = 0  # requests accepted at once after a pause; 0: as many as `rate` allows in a second
    concurrency: int = 0  # unanswered predictions
    # Whether waiting clients take turns. Any limit above implies it, and so does an identity in the key file.
    fair_queueing: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotModel:
    """One version in a `model_snapshot`, to be loaded at startup with these settings."""

    name: str
    version: str
    archive: str  # file name in the model store
    default_version: bool
    settings: dict[str, object]  # by their names in the snapshot: minWorkers, maxWorkers, batchSize, ...


@dataclass(frozen=True, slots=True)
class SnapshotWorkflow:
    """A workflow to register: its archive and settings, and its entry in a `model_snapshot`."""

    url: str  # file name in the workflow store, or a remote URL
    name: str | None = None  # None: the name in its manifest
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None
    s3_sse_kms: bool = False  # the request for the URL is signed
    only_if_stored: bool = False  # from the whole store, never served: skipped if its file is gone

    def entry(self) -> dict[str, object]:
        """Return the entry of a snapshot, which is our extension; TorchServe ignores it."""
        values = {
            "workflowUrl": self.url,
            "workflowName": self.name,
            "responseTimeout": self.response_timeout_s,
            "startupTimeout": self.startup_timeout_s,
            "s3SseKms": self.s3_sse_kms or None,
            "onlyIfStored": self.only_if_stored or None,
        }
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """Directory, properties and retention of the snapshots."""

    directory: Path
    properties: tuple[tuple[str, str], ...] = ()  # the configuration to write, as key and text
    keep: int = 20  # older snapshots that torchere wrote are deleted


@dataclass(frozen=True, slots=True)
class QuarantineSettings:
    """Directory and limits for saved requests that crashed executors."""

    directory: Path
    max_files: int = 100
    max_bytes: int = 64 * 2**20  # of all files together; 0: no request is saved


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The sandbox of worker processes: `workers/sandbox.py`."""

    level: SandboxLevel = "basic"
    user: str | None = None  # user name or number of the workers; None: the server's user
    memory_limit_bytes: int = 0  # of each worker process; 0: no limit
    network: bool = False  # whether workers may open sockets in `strict`; at other levels they may
    read_paths: tuple[Path, ...] = ()  # workers may read these in `strict`, besides archive and Python


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The address and the secret by which other machines join a group of ranks (`workers/machines.py`)."""

    host: str = "127.0.0.1"  # this server listens here while a group waits for machines
    port: int = 29_400  # torchrun's; `torchrun.rdzv-endpoint` of a model names another
    secret_file: Path | None = None  # the same on all machines; None: allowed for a loopback address only


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of one server. `resolve.py` builds it, `server.py` reads it."""

    model_store: Path | None = None
    load_models: tuple[str, ...] = ()  # items of `[name=]file`; ("all",) loads the whole store
    snapshot_models: tuple[SnapshotModel, ...] = ()  # from `model_snapshot`
    workflow_store: Path | None = None  # None: the model store
    load_workflows: tuple[str, ...] = ()  # like `load_models`, for the workflow store
    snapshot_workflows: tuple[SnapshotWorkflow, ...] = ()  # from `model_snapshot`, too
    inference_address: Address = Address(port=8080)
    management_address: Address = Address(port=8081)
    metrics_address: Address | None = Address(port=8082)  # None: no metrics listener
    grpc_inference_address: Address | None = Address(port=7070)
    grpc_management_address: Address | None = Address(port=7071)
    grpc_tls_enabled: bool = False  # for both gRPC listeners; uses the two files below
    grpc_inference_max_connection_age_ms: int | None = None  # None in these four: unlimited
    grpc_inference_max_connection_age_grace_ms: int | None = None
    grpc_management_max_connection_age_ms: int | None = None
    grpc_management_max_connection_age_grace_ms: int | None = None
    certificate_file: Path | None = None  # PEM, including the chain; for every TLS listener
    private_key_file: Path | None = None  # PEM, without pass phrase; both files are reloaded when they change
    small_tls_keys: bool = False  # take keys that OpenSSL's level 2 refuses (RSA of 1024 bits), as Java does
    cors_allowed_origin: str = ""  # these three are sent verbatim in every REST response; "": no header
    cors_allowed_methods: str = ""
    cors_allowed_headers: str = ""
    # For an idle REST connection. Longer than the 60 s of common load balancers, so that they close it first.
    keep_alive_s: float = 75.0
    open_inference_protocol: bool = True  # the /v2 routes and gRPC service; TorchServe's default is False
    # TorchServe's default is "log", with which the metrics endpoint is empty.
    metrics_mode: MetricsMode = "prometheus"
    metrics_config: Path | None = None  # a metrics.yaml; None: the built-in file
    metrics_directory: Path = Path("logs")  # of ts_metrics.log and model_metrics.log; unused in "prometheus"
    metrics_stages: StageSeries = "buckets"  # how the scrape shows the stages of predictions
    metrics_idle_s: float = 0.0  # hide a version's histograms after this time without a batch; 0: never
    metrics_auto_detect: bool = False  # accept undeclared handler metrics
    tracing_enabled: bool = False  # export spans to the endpoint of the OTEL_... variables
    server_timing: bool = False  # REST answers to predictions report the times of their stages
    system_metrics_enabled: bool = True
    system_metrics_interval_s: float = 60.0
    system_metrics_command: str = ""  # script and arguments for Python, to sample the host instead; "": none
    default_executors: int = 0  # 0: at startup one per GPU or CPU core; in the register API none
    default_response_timeout_s: float = 120.0
    default_startup_timeout_s: float = 120.0
    unregister_timeout_s: float = 120.0
    first_executor_id: int = 9000  # TorchServe numbers its workers by port; log lines and metrics show ids
    max_gpus: int | None = None  # upper limit; None: all available GPUs
    hidden_env_vars: str | None = None  # regex; matching environment variables are hidden from handlers
    max_queue_size: int = 100
    pin_cores: bool = False  # run on no more cores than the CPU limit of the container allows
    default_isolation: Isolation = "auto"  # for models whose config sets none
    preload_modules: tuple[str, ...] = ()  # imported once for all workers, not by each of them
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    rendezvous: RendezvousSettings = field(default_factory=RendezvousSettings)
    default_handler: str | None = None
    service_envelope: str | None = None
    decode_input: bool = True
    limit_max_image_pixels: bool = True
    sequence_headers: SequenceHeaders = field(default_factory=SequenceHeaders)
    ipex_enabled: bool = False  # these two are only passed to handlers, in the environment of workers
    ipex_gpu_enabled: bool = False
    allowed_urls: tuple[str, ...] = ()  # regexes; empty: the model store is the only source
    download_timeout_s: float = 600.0  # per archive
    require_signed: bool = False  # refuse archives without a valid signature of a trusted signer
    trusted_signing_keys: tuple[Path, ...] = ()  # PEM: public keys, or certificates of authorities (CA)
    install_dependencies: bool = False  # install the requirements file of an archive
    install_timeout_s: float = 600.0  # for one archive
    snapshots: SnapshotSettings | None = None  # None: none are written
    audit_log: Path | None = None  # also write the lines of the audit log to this file
    log_files: bool = False  # also write TorchServe's three log files
    log_levels: dict[str, str] = field(default_factory=dict)  # by logger; "root": of all others
    model_api_enabled: bool = False  # allow registering and unregistering over the network
    token_auth_enabled: bool = True
    token_expiration_min: float = 60.0
    key_file: Path = Path("key_file.json")
    # Further names of the server, in lower case, for requests without a token; "*": any name.
    allowed_hosts: tuple[str, ...] = ()
    token_keys_file: Path | None = None  # keys of the operator, for all replicas; replaces key_file
    client_ca_file: Path | None = None  # PEM; clients with a certificate of these CAs need no token
    # Management without authorisation on addresses beyond loopback. False: refused; True: for every client;
    # "local": only clients on this machine may make changes.
    insecure_management: bool | Literal["local"] = False
    metrics_authorization: bool = False  # /metrics needs the role `metrics`; in TorchServe it needs no key
    model_defaults: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)  # `models={...}`
    limits: Limits = field(default_factory=Limits)
    clients: ClientSettings = field(default_factory=ClientSettings)
    temp_dir: Path | None = None  # None: the default of the system
    drain_delay_s: float = 0.0  # after SIGTERM: keep serving for this time, while reporting not ready
    drain_timeout_s: float = 30.0  # after this delay, limit for finishing the accepted requests
    install_signal_handlers: bool = True
    # Answer as TorchServe does where our answers are better, if that is safe; docs/differences.md lists them.
    strict_compatibility: bool = False
    readiness_of_all_models: bool = False  # also count models registered after the start
    restart_wait_s: float = 10.0  # requests wait while all workers of a version restart; after this, 503
    quarantine_directory: Path | None = None  # for requests that crash executors; None: they are not saved
    quarantine_max_files: int = 100
    quarantine_max_bytes: int = 64 * 2**20  # of all files; 0: they are not saved
    quarantine_expiry_s: float = 86_400.0  # a convicted request is run again after this; 0: never

    @property
    def env_vars_hidden_from_workers(self) -> str | None:
        """The regex of environment variables that workers do not get; None: they get all."""
        return self.hidden_env_vars or (SECRET_ENV_VARS if self.sandbox.level == "strict" else None)

    @property
    def env_values_hidden_from_workers(self) -> str | None:
        """The regex for values of environment variables that workers do not get; None: no check."""
        return SECRET_ENV_VALUES if self.env_vars_hidden_from_workers == SECRET_ENV_VARS else None

    @property
    def authorizes_clients(self) -> bool:
        """Whether clients need a token or a certificate."""
        return self.token_auth_enabled or self.client_ca_file is not None

    def allows_management(self, address: Address) -> bool:
        """Return whether a listener with this address may serve management.

        Clients that may register archives may run code: without authorisation they must be on this machine.
        """
        return self.authorizes_clients or self.insecure_management is True or address.is_local
