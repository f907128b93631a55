"""Reads `model-config.yaml`: strictly typed, bounded, and never more than data."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from torchere.serving.errors import InvalidArchive
from torchere.serving.settings import Isolation, largest

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
MAX_ALIASES = 100  # a few anchors are fine; thousands are a bomb
MAX_DEPTH = 50
_NOT_SPREAD = (
    "a model is not spread over several processes; quantise it until it fits one device (deviceIds gives "
    "each worker its own), or run a server made for it beside this one"
)
UNSUPPORTED_KEYS = {
    "parallelType": _NOT_SPREAD,
    "parallelLevel": _NOT_SPREAD,
    "torchrun": f"workers are not started by torchrun: {_NOT_SPREAD}",
    "asyncCommunication": "a worker runs one batch at a time; raise maxWorkers, or use continuousBatching",
    "pippy": "pipeline parallelism with PiPPy is not supported",
    "deepspeed": "DeepSpeed is not supported",
    "dali": "NVIDIA DALI is not supported",
}
"""Keys of TorchServe that have no effect here, and why."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The keys the server itself understands (contract: TorchServe's names); None: not given.

    `raw` is the whole file, which handlers see as `context.model_yaml_config`.
    """

    present: bool = False
    raw: dict[str, Any] = field(default_factory=dict)
    min_workers: int | None = None
    max_workers: int | None = None
    batch_size: int | None = None
    max_batch_delay_ms: int | None = None
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None
    max_retry_timeout_s: int | None = None
    client_timeout_ms: int | None = None
    job_queue_size: int | None = None
    device_type: Literal["cpu", "gpu"] | None = None
    device_ids: tuple[int, ...] = ()
    use_job_ticket: bool = False
    sequence_batching: bool = False
    sequence_max_idle_ms: int | None = None
    sequence_timeout_ms: int | None = None
    max_num_sequence: int | None = None
    max_sequence_job_queue_size: int | None = None
    continuous_batching: bool = False
    isolation: Isolation = "auto"
    dispatch: Literal["torchserve", "eager"] = "torchserve"


def parse_model_config(text: str) -> ModelConfig:
    """Read the text of a `model-config.yaml`.

    A key of a wrong type is ignored with a warning, as TorchServe does.

    Raises:
        InvalidArchive: not YAML, not a mapping, or larger, deeper or more self-referring than is sane; or a
            number beyond `largest`.
    """
    raw = _load_yaml(text)
    integer = _IntegerReader(raw)
    return ModelConfig(
        present=True,
        raw=raw,
        min_workers=integer("minWorkers", 1),
        max_workers=integer("maxWorkers", 0),
        batch_size=integer("batchSize", 1),
        max_batch_delay_ms=integer("maxBatchDelay", 1),  # 0 behaves as unset, as in TorchServe
        response_timeout_s=integer("responseTimeout", 1),
        startup_timeout_s=integer("startupTimeout", 1),
        max_retry_timeout_s=integer("maxRetryTimeoutInSec", 0),
        client_timeout_ms=integer("clientTimeoutInMills", 0),
        job_queue_size=integer("jobQueueSize", 1),
        device_type=_choice(raw, "deviceType", ("cpu", "gpu"), None),
        device_ids=_device_ids(raw),
        use_job_ticket=_flag(raw, "useJobTicket"),
        sequence_batching=_flag(raw, "sequenceBatching"),
        sequence_max_idle_ms=integer("sequenceMaxIdleMSec", 1),
        sequence_timeout_ms=integer("sequenceTimeoutMSec", 0),
        max_num_sequence=integer("maxNumSequence", 1),
        max_sequence_job_queue_size=integer("maxSequenceJobQueueSize", 1),
        continuous_batching=_flag(raw, "continuousBatching"),
        isolation=_choice(raw, "isolation", ("auto", "thread", "process"), "auto"),
        dispatch=_choice(raw, "dispatch", ("torchserve", "eager"), "torchserve"),
    )


def unsupported_keys(raw: dict[str, Any]) -> list[str]:
    """The keys that ask for something the server can't do."""
    return [key for key in raw if key in UNSUPPORTED_KEYS and raw[key] not in (None, False, 0)]


def _load_yaml(text: str) -> dict[str, Any]:
    try:
        _check_shape(text)
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as err:
        raise InvalidArchive(f"The model config is not valid YAML: {_one_line(err)}") from err
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise InvalidArchive(
            f"The model config is a {type(raw).__name__}, expected a mapping of keys to values"
        )
    return raw


def _check_shape(text: str) -> None:
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"{len(text)} characters, at most {MAX_CONFIG_BYTES} are read")
    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if aliases > MAX_ALIASES or depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_ALIASES} aliases or {MAX_DEPTH} levels")


def _one_line(err: BaseException) -> str:
    return " ".join(str(err).split())


class _IntegerReader:
    """Takes an integer of at least `minimum` from a mapping; anything else there is said and ignored."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw

    def __call__(self, key: str, minimum: int) -> int | None:
        value = self._raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            _warn(key, value, "an integer")
            return None
        if value > largest(key):
            raise InvalidArchive(f"{key} in the model config is too large, expected at most {largest(key)}")
        return value if value >= minimum else (minimum if key in _CLAMPED else None)


# TorchServe raises these to the least rather than ignoring them.
_CLAMPED = ("minWorkers", "batchSize", "maxRetryTimeoutInSec")


def _choice(raw: dict[str, Any], key: str, allowed: tuple[str, ...], default: Any) -> Any:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, str) and value.lower() in allowed:
        return value.lower()
    _warn(key, value, "one of " + ", ".join(allowed))
    return default


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if isinstance(value, bool):
        return value
    _warn(key, value, "true or false")
    return False


def _device_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    value = raw.get("deviceIds")
    if value is None:
        return ()
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    _warn("deviceIds", value, "a list of integers")
    return ()


def _warn(key: str, value: object, expected: str) -> None:
    logger.warning("model config: %s is %.80r, expected %s; it is ignored", key, value, expected)
