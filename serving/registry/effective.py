"""Which source of a setting wins: a pure function of all of them.

TorchServe's precedence (contract, "Precedence of effective values"): the API, the archive's model config, the
`models={...}` property, the server's defaults; for time-outs the model config comes first. How many executors
there are the model config says, then the call; at the start, where there is none, `models={...}`, then the
default.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torchere.serving.registry.model_config import ModelConfig
from torchere.serving.settings import BatchSettings, ModelSettings, SequenceSettings, ServerSettings

logger = logging.getLogger(__name__)

# An archive with a model config that names no time-out gets TorchServe's own default, not the server's: a
# model that relies on it must not be cut short by a `default_response_timeout` it never obeyed.
TIMEOUT_WITH_CONFIG_S = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the registration call itself said; None: nothing."""

    batch_size: int | None = None
    max_batch_delay_ms: int | None = None
    executors: int = 0
    executors_by_default: bool = False  # at the start: `models={...}` may say another number
    response_timeout_s: float | None = None
    startup_timeout_s: float | None = None


def effective_settings(
    asked: Asked, config: ModelConfig, defaults: dict[str, object], server: ServerSettings, gpus: int = 0
) -> ModelSettings:
    """The settings of one version.

    `defaults` is its entry of the `models={...}` property, {} without one; `gpus` is how many there are.
    """
    batch = BatchSettings(
        max_batch_size=_first(asked.batch_size, config.batch_size, defaults.get("batchSize"), fallback=1),
        max_queue_delay_ms=_first(
            asked.max_batch_delay_ms, config.max_batch_delay_ms, defaults.get("maxBatchDelay"), fallback=100
        ),
        max_queue_size=_first(config.job_queue_size, fallback=server.max_queue_size),
        dispatch=config.dispatch,
        use_tickets=config.use_job_ticket,
    )
    if asked.max_batch_delay_ms == 0:  # from a client it means "never wait"; in the other places "not said"
        batch = replace(batch, max_queue_delay_ms=0)
    device_ids = _device_ids(config, gpus)
    min_executors, max_executors = _executors(asked, config, defaults)
    return ModelSettings(
        batch=batch,
        min_executors=min_executors,
        max_executors=max_executors,
        response_timeout_s=_timeout(
            (config.response_timeout_s, defaults.get("responseTimeout"), asked.response_timeout_s),
            TIMEOUT_WITH_CONFIG_S if config.present else server.default_response_timeout_s,
        ),
        startup_timeout_s=_timeout(
            (config.startup_timeout_s, defaults.get("startupTimeout"), asked.startup_timeout_s),
            TIMEOUT_WITH_CONFIG_S if config.present else server.default_startup_timeout_s,
        ),
        client_timeout_ms=config.client_timeout_ms or 0,
        max_retry_timeout_s=300.0 if config.max_retry_timeout_s is None else config.max_retry_timeout_s,
        isolation=config.isolation or server.default_isolation,
        sequences=_sequences(config),
        sequences_unbounded=config.sequence_batching and not config.sequence_max_idle_ms,
        continuous=config.continuous_batching,
        device_ids=device_ids,
        gpu_ids=() if config.device_type == "cpu" else device_ids or tuple(range(gpus)),
    )


def _device_ids(config: ModelConfig, gpus: int) -> tuple[int, ...]:
    """TorchServe's rule: one that is not there discards them all."""
    if max(config.device_ids, default=-1) < gpus:
        return config.device_ids
    if gpus:
        logger.warning("deviceIds %s are ignored: there are %d GPUs", list(config.device_ids), gpus)
    return ()


def _sequences(config: ModelConfig) -> SequenceSettings | None:
    if not config.sequence_batching or not config.sequence_max_idle_ms:
        return None
    return SequenceSettings(
        max_idle_s=config.sequence_max_idle_ms / 1000,
        timeout_s=(config.sequence_timeout_ms or 0) / 1000,
        max_sequences=config.max_num_sequence or 1,
        max_queue_size=config.max_sequence_job_queue_size or 1,
    )


def _first(*candidates: object, fallback: int) -> int:
    """The first that is a whole number above 0; the others say nothing."""
    return next((value for value in candidates if type(value) is int and value > 0), fallback)


def _executors(asked: Asked, config: ModelConfig, defaults: dict[str, object]) -> tuple[int, int]:
    if config.min_workers and config.max_workers and config.max_workers >= config.min_workers:
        return config.min_workers, config.max_workers
    if not asked.executors_by_default:
        return asked.executors, asked.executors
    low, high = (_first(defaults.get(key), fallback=0) for key in ("minWorkers", "maxWorkers"))
    if low > high > 0:
        return asked.executors, asked.executors
    # Either may stand alone: the other is what it would be without it, as far as that goes.
    return low or min(asked.executors, high or asked.executors), high or max(asked.executors, low)


def _timeout(candidates: tuple[object, ...], fallback_s: float) -> float:
    given = (value for value in candidates if isinstance(value, (int, float)) and value > 0)
    return float(next(given, fallback_s))
