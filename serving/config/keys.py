"""Table of all configuration keys: kind and setting of each, or advice if the key has no effect.

Names, kinds and defaults are those of TorchServe 0.12; the keys of the last group are our own. The table
includes TorchServe's keys that have no effect here, each with one sentence of advice, because existing files
contain many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchere.serving.config import kinds
from torchere.serving.config.kinds import Kind
from torchere.serving.config.model_properties import MODEL_DEFAULTS, SNAPSHOT
from torchere.serving.config.server_settings import MAX_CLIENT_LIMIT, MAX_EXECUTORS

ENV_GATE = "enable_envvars_config"
URLS_ENV_GATE = "use_env_allowed_urls"
METRICS_API = "metrics_api_enabled"  # not a field of the settings: false sets `metrics_address` to None


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration file.

    `setting` is the field of `ServerSettings` that the key sets, with a dot for a nested field. It is "" for
    a key without effect; such a key has an `advice`, unless it is only informational.
    """

    name: str
    kind: Kind = kinds.TEXT
    setting: str = ""
    advice: str = ""
    no_advice_for: str = ""  # a value (lower case) that requests no feature, so no advice is given
    variable: str = ""  # environment variable; "": the key is allowed in the file only
    gates: tuple[str, ...] = (ENV_GATE,)  # `variable` is read only if these keys are true in the file
    lenient: bool = False  # an invalid value is only a warning, and the default is used
    secret: bool = False  # the value is never shown


def _key(name: str, kind: Kind, setting: str = "", variable: str = "", **more: Any) -> Key:
    """Return the key of a setting, which has the name of the key unless `setting` names another."""
    return Key(name, kind, setting or name, variable=variable or _variable(name), **more)


def _advice(name: str, advice: str, no_advice_for: str = "", secret: bool = False) -> Key:
    return Key(name, advice=advice, no_advice_for=no_advice_for, variable=_variable(name), secret=secret)


def _variable(name: str) -> str:
    return f"TS_{name.upper().removeprefix('TS_')}"


_PORT = kinds.whole(0, kinds.MAX_PORT)
_NO_NETTY = "there is no Netty here; event loops need no tuning"
_NO_JVM = "there is no JVM here; remove it"
_NO_LOG4J = (
    "there is no JVM here, and log4j2 files are not read: log_levels sets levels, and PUT /log-level changes "
    "them; remove it"
)
NO_KEYSTORES = (
    "Java key stores are not read; convert one once with `openssl pkcs12 -in FILE -nodes -out tls.pem` "
    "(of type JKS, after `keytool -importkeystore -srckeystore FILE -destkeystore NEW -deststoretype "
    "PKCS12`), and set both certificate_file and private_key_file to tls.pem"
)
_NO_LAUNCHER = "the server divides the cores among its executors itself; remove it"
_NO_SUPERVISOR = (
    "models run in worker processes, which the server starts again; let systemd, Compose or Kubernetes start "
    "the server itself again"
)

_LISTENERS = (
    _key("inference_address", kinds.address(80, 443)),
    _key("management_address", kinds.address(8081, 8444)),
    _key("metrics_address", kinds.address(8082, 8445)),
    _key("enable_metrics_api", kinds.BOOLEAN, METRICS_API),
    _key("grpc_inference_address", kinds.HOST, "grpc_inference_address.host"),
    _key("grpc_inference_port", _PORT, "grpc_inference_address.port"),
    _key("grpc_management_address", kinds.HOST, "grpc_management_address.host"),
    _key("grpc_management_port", _PORT, "grpc_management_address.port"),
    _key("grpc_inference_max_connection_age_ms", kinds.AGE),
    _key("grpc_inference_max_connection_age_grace_ms", kinds.AGE),
    _key("grpc_management_max_connection_age_ms", kinds.AGE),
    _key("grpc_management_max_connection_age_grace_ms", kinds.AGE),
    _key("enable_grpc_ssl", kinds.BOOLEAN, "grpc_tls_enabled"),
    _key("certificate_file", kinds.PATH),
    _key("private_key_file", kinds.PATH),
    _key("cors_allowed_origin", kinds.TEXT),
    _key("cors_allowed_methods", kinds.TEXT),
    _key("cors_allowed_headers", kinds.TEXT),
    _key("max_request_size", kinds.size(1), "limits.max_request_bytes"),
    _key("max_response_size", kinds.size(1), "limits.max_response_bytes"),
    _key("ts_open_inference_protocol", kinds.PROTOCOL_SWITCH, "open_inference_protocol", gates=()),
)

_MODELS = (
    _key("model_store", kinds.PATH),
    _key("workflow_store", kinds.PATH),
    _key("load_models", kinds.MODELS),
    Key("models", MODEL_DEFAULTS, "model_defaults"),
    Key("model_snapshot", SNAPSHOT, "snapshot_models"),
    _key("default_workers_per_model", kinds.whole(0, MAX_EXECUTORS), "default_executors"),
    _key("initial_worker_port", kinds.whole(0), "first_executor_id"),
    _key("default_response_timeout", kinds.seconds(1), "default_response_timeout_s"),
    _key("default_startup_timeout", kinds.seconds(0), "default_startup_timeout_s"),
    _key("unregister_model_timeout", kinds.seconds(0), "unregister_timeout_s"),
    _key("job_queue_size", kinds.whole(1), "max_queue_size"),
    _key("number_of_gpu", kinds.whole(0), "max_gpus"),
    _key("limit_max_image_pixels", kinds.BOOLEAN),
    _key("decode_input_request", kinds.BOOLEAN, "decode_input"),
    _key("default_service_handler", kinds.TEXT, "default_handler"),
    _key("service_envelope", kinds.ENVELOPE),
    *(
        _key(f"ts_header_key_sequence_{which}", kinds.HEADER, f"sequence_headers.{which}")
        for which in ("id", "start", "end")
    ),
    _key("ipex_enable", kinds.IPEX, "ipex_enabled"),
    _key("ipex_gpu_enable", kinds.IPEX, "ipex_gpu_enabled"),
    _key("blacklist_env_vars", kinds.PATTERN, "hidden_env_vars"),
    _key("install_py_dep_per_model", kinds.BOOLEAN, "install_dependencies"),
)

_ACCESS = (
    _key("allowed_urls", kinds.PATTERNS, gates=(ENV_GATE, URLS_ENV_GATE)),
    _key("token_expiration_min", kinds.EXPIRATION, "", "TS_TOKEN_EXPIRATION_TIME_MIN", lenient=True),
    _key("disable_token_authorization", kinds.INVERTED_BOOLEAN, "token_auth_enabled"),
    _key("enable_model_api", kinds.BOOLEAN, "model_api_enabled"),
)

_METRICS = (
    _key("metrics_config", kinds.PATH),
    _key("metrics_mode", kinds.METRICS_MODE, lenient=True),
    _key("model_metrics_auto_detect", kinds.BOOLEAN, "metrics_auto_detect"),
    _key("disable_system_metrics", kinds.INVERTED_BOOLEAN, "system_metrics_enabled"),
    Key("metric_time_interval", kinds.seconds(1), "system_metrics_interval_s"),
    Key("system_metrics_cmd", kinds.TEXT, "system_metrics_command"),
)

_WITHOUT_EFFECT = (
    Key(ENV_GATE, kinds.BOOLEAN),
    Key(URLS_ENV_GATE, kinds.BOOLEAN),
    Key("version"),
    Key("tsConfigFile"),
    Key("python"),  # TorchServe writes it to its snapshots
    Key("NUM_WORKERS"),
    Key("metrics_format", advice="the format is always Prometheus'; remove it", no_advice_for="prometheus"),
    _advice("debug", "attach a debugger to the server process instead", "false"),
    _advice("number_of_netty_threads", _NO_NETTY),
    _advice("netty_client_threads", _NO_NETTY),
    Key("use_native_io", advice=_NO_NETTY, no_advice_for="true"),
    Key("io_ratio", advice=_NO_NETTY),
    _advice("prefer_direct_buffer", _NO_JVM, "false"),
    _advice("async_logging", "no request waits for its log lines; remove it", "false"),
    _advice("model_server_home", "nothing is read from an installation folder; remove it"),
    _advice("keystore", NO_KEYSTORES),
    _advice("keystore_pass", NO_KEYSTORES, secret=True),
    _advice("keystore_type", NO_KEYSTORES),
    _advice("cpu_launcher_enable", _NO_LAUNCHER, "false"),
    _advice("cpu_launcher_args", _NO_LAUNCHER),
    _advice("initial_distribution_port", "the ranks of a worker meet at a free port; remove it"),
    _advice("cpp_log_config", "handlers in C++ log as others do; remove it"),
    Key("vmargs", advice=_NO_LOG4J),
    Key("plugins_path", advice="Java plug-ins can't be loaded; remove it"),
)

_OURS = (
    _key("load_workflows", kinds.MODELS),
    _key("key_file", kinds.PATH),
    _key("token_keys_file", kinds.PATH),
    _key("client_ca_file", kinds.PATH),
    _key("insecure_management", kinds.OPENNESS),
    _key("metrics_authorization", kinds.BOOLEAN),
    _key("allowed_hosts", kinds.HOSTS),
    _key("drain_delay_s", kinds.seconds(0)),
    _key("drain_timeout_s", kinds.seconds(0)),
    _key("max_held_bytes", kinds.size(0), "limits.max_held_bytes"),
    _key("max_connections", kinds.whole(0), "limits.max_connections"),
    _key("min_upload_rate", kinds.whole(0), "limits.min_upload_rate"),
    _key("keep_alive_s", kinds.number(1, 86_400)),
    _key("client_rate", kinds.number(0, MAX_CLIENT_LIMIT), "clients.rate"),
    _key("client_burst", kinds.whole(0, MAX_CLIENT_LIMIT), "clients.burst"),
    _key("client_concurrency", kinds.whole(0, MAX_CLIENT_LIMIT), "clients.concurrency"),
    _key("fair_queueing", kinds.BOOLEAN, "clients.fair_queueing"),
    _key("max_archive_entries", kinds.whole(1), "limits.max_archive_entries"),
    _key("max_archive_bytes", kinds.size(1), "limits.max_archive_bytes"),
    _key("max_download_bytes", kinds.size(1), "limits.max_download_bytes"),
    _key("download_timeout_s", kinds.seconds(1)),
    _key("install_timeout_s", kinds.seconds(1)),
    _key("require_signed", kinds.BOOLEAN),
    _key("trusted_signing_keys", kinds.PATHS),
    _key("audit_log", kinds.PATH),
    _key("log_files", kinds.BOOLEAN),
    _key("log_levels", kinds.LOGGER_LEVELS),
    _key("default_isolation", kinds.ISOLATION),
    _key("pin_cores", kinds.BOOLEAN),
    _key("preload_modules", kinds.MODULES),
    _key("worker_sandbox", kinds.SANDBOX, "sandbox.level"),
    _key("worker_user", kinds.TEXT, "sandbox.user"),
    _key("worker_memory_limit", kinds.size(0), "sandbox.memory_limit_bytes"),
    _key("worker_network", kinds.BOOLEAN, "sandbox.network"),
    _key("worker_read_paths", kinds.PATHS, "sandbox.read_paths"),
    _key("rendezvous_address", kinds.HOST, "rendezvous.host"),
    _key("rendezvous_port", kinds.whole(1, kinds.MAX_PORT), "rendezvous.port"),
    _key("rendezvous_secret_file", kinds.PATH, "rendezvous.secret_file"),
    _key("metrics_stages", kinds.STAGES),
    _key("metrics_idle_s", kinds.seconds(0)),
    _key("tracing", kinds.BOOLEAN, "tracing_enabled"),
    _key("server_timing", kinds.BOOLEAN),
    _advice("supervise", _NO_SUPERVISOR, "false"),
    _key("quarantine_directory", kinds.PATH),
    _key("quarantine_max_files", kinds.whole(1)),
    _key("quarantine_max_bytes", kinds.size(0)),
    _key("strict_compatibility", kinds.BOOLEAN),
    _key("readiness_of_all_models", kinds.BOOLEAN),
    _key("restart_wait_s", kinds.seconds(0)),
    _key("quarantine_expiry_s", kinds.seconds(0)),
)

KEYS: dict[str, Key] = {
    key.name: key for key in (*_LISTENERS, *_MODELS, *_ACCESS, *_METRICS, *_WITHOUT_EFFECT, *_OURS)
}
