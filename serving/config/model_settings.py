"""Parser for `model-config.yaml`, with strict types and limits, and the effective settings of a version."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torchere.archiver.reader import Archive
from torchere.archiver.split import Split
from torchere.serving.config.bounded_yaml import MAX_CHARACTERS, MAX_NUMBER_CHARACTERS, read_yaml
from torchere.serving.config.kinds import MAX_PORT
from torchere.serving.config.server_settings import (
    ISOLATIONS,
    BatchSettings,
    DeviceType,
    Isolation,
    ModelSettings,
    ParallelSettings,
    SequenceHeaders,
    SequenceSettings,
    ServerSettings,
    largest,
)
from torchere.serving.errors import InvalidArchive


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The keys of a model config that the server uses, with TorchServe's names; None: not given.

    `raw` is the whole document, which handlers read as `context.model_yaml_config`.
    """

    present: bool = False
    raw: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)  # key that is not used as given -> why
    min_workers: int | None = None
    max_workers: int | None = None
    batch_size: int | None = None
    max_batch_delay_ms: int | None = None
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None
    max_retry_timeout_s: int | None = None
    client_timeout_ms: int | None = None
    job_queue_size: int | None = None
    device_type: DeviceType | None = None
    device_ids: tuple[int, ...] = ()
    use_job_ticket: bool = False
    sequence_batching: bool = False
    sequence_max_idle_ms: int | None = None
    sequence_timeout_ms: int | None = None
    max_num_sequence: int | None = None
    max_sequence_job_queue_size: int | None = None
    continuous_batching: bool = False
    async_communication: bool = False
    isolation: Isolation | None = None
    dispatch: Literal["torchserve", "eager"] = "torchserve"
    parallel: ParallelSettings | None = None


def config_of(archive: Archive) -> ModelConfig:
    """Return the model config of an archive, without unpacking it; an empty one if it has none.

    Raises:
        ArchiveError: the file of the model config is missing, damaged, too long or not text.
        InvalidArchive: see `parse_model_config`.
    """
    name = archive.manifest.config_file
    return parse_model_config(archive.read_text(name, MAX_CHARACTERS)) if name else ModelConfig()


def parse_model_config(text: str) -> ModelConfig:
    """Parse the text of a `model-config.yaml`.

    A value of the wrong type, or out of range, is ignored, as in TorchServe, and its key listed in `ignored`.

    Raises:
        InvalidArchive: the text is not YAML, not a mapping, contains itself or exceeds a `read_yaml` limit;
            or a number is greater than `largest` allows.
    """
    raw = _load_yaml(text)
    read = _Reader(raw)
    least, most = read.workers()
    config = ModelConfig(
        present=True,
        raw=raw,
        ignored=read.ignored,
        min_workers=least,
        max_workers=most,
        batch_size=read.integer("batchSize", 1),
        max_batch_delay_ms=read.integer("maxBatchDelay", 1),  # 0 means unset, as in TorchServe
        response_timeout_s=read.integer("responseTimeout", 1),
        startup_timeout_s=read.integer("startupTimeout", 1),
        max_retry_timeout_s=read.integer("maxRetryTimeoutInSec", 0),
        client_timeout_ms=read.integer("clientTimeoutInMills", 0),
        job_queue_size=read.integer("jobQueueSize", 1),
        device_type=read.choice("deviceType", get_args(DeviceType), None),
        device_ids=read.device_ids(),
        use_job_ticket=read.flag("useJobTicket"),
        sequence_batching=read.flag("sequenceBatching"),
        sequence_max_idle_ms=read.integer("sequenceMaxIdleMSec", 1),
        sequence_timeout_ms=read.integer("sequenceTimeoutMSec", 0),
        max_num_sequence=read.integer("maxNumSequence", 1),
        max_sequence_job_queue_size=read.integer("maxSequenceJobQueueSize", 1),
        continuous_batching=read.flag("continuousBatching"),
        async_communication=read.flag("asyncCommunication"),
        isolation=read.choice("isolation", ISOLATIONS, None),
        dispatch=read.choice("dispatch", ("torchserve", "eager"), "torchserve"),
        parallel=read.parallel(),
    )
    if not config.sequence_batching:
        read.note_sequences()
    elif not (config.sequence_max_idle_ms or config.continuous_batching):
        read.ignored["sequenceBatching"] = (
            "is true without a sequenceMaxIdleMSec above 0: no request is admitted; set it"
        )
    read.note_spellings()
    return config


def _load_yaml(text: str) -> dict[str, Any]:
    try:
        raw = read_yaml(text)
    except ValueError as err:
        raise InvalidArchive(f"The model config is not valid YAML: {err}") from err
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise InvalidArchive(
            f"The model config is a {type(raw).__name__}, expected a mapping of keys to values"
        )
    return raw


class _Reader:
    """Extracts typed values from the mapping; adds values of the wrong type to `ignored`."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self._read: set[str] = set()
        self.ignored: dict[str, str] = {}

    def _value(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._raw.get(key, default)

    def integer(self, key: str, minimum: int) -> int | None:
        value = self._value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self._ignore(key, "an integer")
            return None
        if value > largest(key):
            raise InvalidArchive(f"{key} in the model config is too large, expected at most {largest(key)}")
        if value >= minimum:
            return value
        if key in _CLAMPED:
            self.ignored[key] = f"is {value}, expected at least {minimum}; it counts as {minimum}"
            return minimum
        if value:  # 0 means not set
            self._ignore(key, f"at least {minimum}")
        return None

    def workers(self) -> tuple[int | None, int | None]:
        """Return minWorkers and maxWorkers, which, as in TorchServe, take effect only if both are set."""
        least, most = self.integer("minWorkers", 1), self.integer("maxWorkers", 0)
        if least and (most or 0) < least:
            self._ignore("minWorkers", "a maxWorkers that is at least as large")
        elif most and not least:
            self._ignore("maxWorkers", "a minWorkers, too")
        return least, most

    def choice(self, key: str, allowed: tuple[str, ...], default: Any) -> Any:
        value = self._value(key)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in allowed:
            return value.lower()
        self._ignore(key, "one of " + ", ".join(allowed))
        return default

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if isinstance(value, bool):
            return value
        self._ignore(key, "true or false")
        return False

    def note_sequences(self) -> None:
        """Note the keys of sequences that are set; without `sequenceBatching` they have no effect."""
        for key in _OF_SEQUENCES:
            if self._raw.get(key) and key not in self.ignored:
                self._ignore(key, "sequenceBatching: true beside it")

    def note_spellings(self) -> None:
        """Note keys that differ from a known key only by capitals and underscores (`batch_size`)."""
        spellings = {key.lower(): key for key in self._read if key not in self._raw}
        for key in self._raw:
            meant = spellings.get(key.replace("_", "").lower()) if isinstance(key, str) else None
            if meant is not None:
                self.ignored[key] = f"is no key of the server; did you mean {meant}?"

    def device_ids(self) -> tuple[int, ...]:
        value = self._value("deviceIds")
        if value is None:
            return ()
        if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
            return tuple(value)
        self._ignore("deviceIds", "a list of integers")
        return ()

    def parallel(self) -> ParallelSettings | None:
        """Return how a worker is spread over ranks: by our section `parallel`, or as TorchServe does it.

        TorchServe needs both a type and a level.
        """
        try:
            split = Split.read(self._raw)
        except ValueError as err:
            raise InvalidArchive(f"The model config is wrong: {err}") from err
        kind = self.choice("parallelType", ("pp", "tp", "pptp", "custom"), None)
        settings = ParallelSettings(kind or "pptp", self.integer("parallelLevel", 1) or 0)
        if (block := self._raw.get("torchrun")) is not None:
            if not isinstance(block, dict):
                self._ignore("torchrun", "a mapping of keys to values")
                return self._of_section(split, ParallelSettings("pptp", 0), kind) if split else None
            torchrun = _Reader({_IN_TORCHRUN.get(str(key), str(key)): value for key, value in block.items()})
            settings = torchrun.torchrun(settings)
            own = {name: key for key, name in _IN_TORCHRUN.items()}
            self.ignored |= {
                f"torchrun.{own.get(key, key)}": remark for key, remark in torchrun.ignored.items()
            }
        if split:
            return self._of_section(split, settings, kind)
        self._note_lost_level(kind, settings.level, block)
        return settings if kind and settings.level else None

    def _of_section(self, split: Split, settings: ParallelSettings, kind: str | None) -> ParallelSettings:
        """Return the settings of the section `parallel`, and note keys of TorchServe's that it overrules."""
        level = _on_each_machine(split.ranks, settings)
        block = self._raw.get("torchrun")
        overruled = {
            "parallelType": None if kind in ("tp", "pptp") else kind,  # in these each rank gets each request
            "parallelLevel": self._raw.get("parallelLevel"),
            "torchrun.nproc-per-node": block.get("nproc-per-node") if isinstance(block, dict) else None,
        }
        for key, value in overruled.items():
            if value not in (None, 0, level):
                remark = f"is {value!r:.80}, and the section parallel wins; it is ignored"
                self.ignored.setdefault(key, remark)
        return replace(settings, kind="pptp", level=level)

    def _note_lost_level(self, kind: str | None, level: int, torchrun: Any) -> None:
        """Note a type or a level without effect: the model is served from one process, or one GPU."""
        if self.ignored.keys() & {"parallelType", "parallelLevel"}:
            return
        own = self._raw.get("parallelLevel")
        if (kind and not level) or (level > 1 and not kind):
            key, lacks = ("parallelType", "parallelLevel") if kind else ("parallelLevel", "parallelType")
            key = key if self._raw.get(key) else "torchrun"
            self.ignored[key] = f"is {self._raw[key]!r:.80}, and {lacks} is not set; it has no effect"
        elif torchrun is not None and "nproc-per-node" not in torchrun and own not in (None, 0, level):
            self.ignored["parallelLevel"] = (
                f"is {own!r:.80}, and torchrun without nproc-per-node means {level}; it is ignored"
            )

    def torchrun(self, settings: ParallelSettings) -> ParallelSettings:
        """Return the settings, changed by the keys of `torchrun`."""
        least, most = self._nnodes()
        conf = dict(part.partition("=")[::2] for part in str(self._raw.get("rdzv-conf", "")).split(","))
        last_call = str(conf.get("last_call_timeout", ""))
        endpoint = str(self._raw.get("rdzv-endpoint", ""))
        port = _number(endpoint.rpartition(":")[2])
        if endpoint and not 0 < port <= MAX_PORT:
            self._ignore("rdzv-endpoint", "HOST:PORT")
            port = 0
        # Both mean the same here; torch's other backends need a server program.
        self.choice("rdzv-backend", ("c10d", "static"), None)
        return replace(
            settings,
            level=self.integer("parallelLevel", 1) or 1,
            threads=self.integer("OMP_NUMBER_THREADS", 1) or 0,
            least_machines=least,
            most_machines=most,
            port=port,
            run_id=str(self._raw.get("rdzv-id", "")),
            last_call_s=float(last_call) if last_call.isdecimal() else settings.last_call_s,
            max_restarts=self.integer("max-restarts", 0),
        )

    def _nnodes(self) -> tuple[int, int]:
        """Return the lowest and highest number of machines: `nnodes` is a number, or a range like `1:3`."""
        value = self._raw.get("nnodes", 1)
        first, _, last = value.partition(":") if isinstance(value, str) else (str(value), "", "")
        least, most = _number(first), _number(last or first)
        if not 1 <= least <= most:
            self._ignore("nnodes", "a number of machines, or MIN:MAX")
            return 1, 1
        if most > largest("nnodes"):
            raise InvalidArchive(
                f"torchrun.nnodes in the model config is too large, expected at most {largest('nnodes')}"
            )
        return least, most

    def _ignore(self, key: str, expected: str) -> None:
        self.ignored[key] = f"is {self._raw[key]!r:.80}, expected {expected}; it is ignored"


def _number(text: str) -> int:
    """Return the number that the digits of `text` spell; 0 for other texts and for too many digits."""
    return int(text) if text.isdecimal() and len(text) <= MAX_NUMBER_CHARACTERS else 0


def _on_each_machine(ranks: int, settings: ParallelSettings) -> int:
    """Return how many ranks of the section `parallel` each machine has.

    Raises:
        InvalidArchive: the number of machines varies, or does not divide that of the ranks.
    """
    machines = settings.most_machines
    if settings.least_machines != machines or ranks % machines:
        raise InvalidArchive(
            f"The model config is wrong: parallel asks for {ranks} ranks, and torchrun.nnodes is "
            f"{settings.least_machines}:{machines}, expected one number that divides them"
        )
    return ranks // machines


_OF_SEQUENCES = (
    *("sequenceMaxIdleMSec", "sequenceTimeoutMSec"),
    *("maxNumSequence", "maxSequenceJobQueueSize"),
)
_IN_TORCHRUN = {"nproc-per-node": "parallelLevel"}  # the names that `largest` knows

# TorchServe replaces lower values by the minimum instead of ignoring them.
_CLAMPED = ("minWorkers", "batchSize", "maxRetryTimeoutInSec")


logger = logging.getLogger(__name__)

# Precedence of the sources of a setting, as in TorchServe: the registration request, the archive's model
# config, the property `models={...}`, the server's defaults. For timeouts the request comes third; those of a
# snapshot come first. The number of executors is that of the model config, else that of the request. A model
# that is loaded at startup has no request; its number is that of the model config, else that of
# `models={...}`, else the default.

# An archive with a model config that sets no timeout gets TorchServe's built-in default, not the server's: in
# TorchServe, `default_response_timeout` does not apply to such a model, so it must not shorten the timeout
# here.
TIMEOUT_WITH_CONFIG_S = 120.0
# Requests inside a worker with `asyncCommunication`, where TorchServe has no limit; the rest wait outside,
# where they are counted, and answered if the worker dies. At most `MAX_LANES`, the cells for begin marks.
ASYNC_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a registration request; None means not given."""

    batch_size: int | None = None
    max_batch_delay_ms: int | None = None
    executors: int = 0
    executors_by_default: bool = False  # at startup: `models={...}` may override `executors`
    response_timeout_s: float | None = None
    startup_timeout_s: float | None = None
    restored: bool = False  # from a snapshot: the timeouts, too, override those of the model config


def effective_settings(
    asked: Asked, config: ModelConfig, defaults: dict[str, object], server: ServerSettings, gpus: int = 0
) -> ModelSettings:
    """Return the effective settings of one version.

    `defaults` is the version's entry of the `models={...}` property, or {}; `gpus` is the number of GPUs,
    of the kind that the config asks for.
    """
    # One run at a time: requests of a sequence run in order, continuous batches together, ranks in step.
    in_turn = config.sequence_batching or config.continuous_batching
    in_turn = in_turn or (config.parallel is not None and config.parallel.is_group)
    batch = BatchSettings(
        max_batch_size=_first(asked.batch_size, config.batch_size, defaults.get("batchSize"), fallback=1),
        max_queue_delay_ms=_first(
            asked.max_batch_delay_ms, config.max_batch_delay_ms, defaults.get("maxBatchDelay"), fallback=100
        ),
        max_queue_size=_first(config.job_queue_size, fallback=server.max_queue_size),
        dispatch=config.dispatch,
        use_tickets=config.use_job_ticket,
        at_once=ASYNC_AT_ONCE if config.async_communication and not in_turn else 1,
    )
    if asked.max_batch_delay_ms == 0:  # in a request 0 means "never wait", elsewhere "not set"
        batch = replace(batch, max_queue_delay_ms=0)
    device_ids = _device_ids(config, gpus)
    min_executors, max_executors = _executors(asked, config, defaults)
    settings = ModelSettings(
        batch=batch,
        response_timeout_s=_timeout(
            asked.response_timeout_s,
            (config.response_timeout_s, defaults.get("responseTimeout")),
            asked.restored,
            TIMEOUT_WITH_CONFIG_S if config.present else server.default_response_timeout_s,
        ),
        startup_timeout_s=_timeout(
            asked.startup_timeout_s,
            (config.startup_timeout_s, defaults.get("startupTimeout")),
            asked.restored,
            TIMEOUT_WITH_CONFIG_S if config.present else server.default_startup_timeout_s,
        ),
        client_timeout_ms=config.client_timeout_ms or 0,
        max_retry_timeout_s=300.0 if config.max_retry_timeout_s is None else config.max_retry_timeout_s,
        isolation=config.isolation or server.default_isolation,
        sequences=_sequences(config, server.sequence_headers),
        sequences_unbounded=config.sequence_batching and not config.sequence_max_idle_ms,
        continuous=config.continuous_batching,
        device_ids=device_ids,
        gpu_ids=() if config.device_type in ("cpu", "mps", "xla") else device_ids or tuple(range(gpus)),
        device_type=config.device_type,
        parallel=config.parallel,
    )
    return settings.scaled(min_executors, max_executors)


def _device_ids(config: ModelConfig, gpus: int) -> tuple[int, ...]:
    """Return the device ids; as in TorchServe, all are ignored if there is no GPU for one of them."""
    if max(config.device_ids, default=-1) < gpus:
        return config.device_ids
    if gpus:
        logger.warning("deviceIds %s are ignored: there are %d GPUs", list(config.device_ids), gpus)
    return ()


def _sequences(config: ModelConfig, headers: SequenceHeaders) -> SequenceSettings | None:
    if not config.sequence_batching or not config.sequence_max_idle_ms:
        return None
    return SequenceSettings(
        max_idle_s=config.sequence_max_idle_ms / 1000,
        timeout_s=(config.sequence_timeout_ms or 0) / 1000,
        max_sequences=config.max_num_sequence or 1,
        max_queue_size=config.max_sequence_job_queue_size or 1,
        headers=headers,
    )


def _first(*candidates: object, fallback: int) -> int:
    """Return the first candidate that is an integer above 0, otherwise `fallback`."""
    return next((value for value in candidates if type(value) is int and value > 0), fallback)


def _executors(asked: Asked, config: ModelConfig, defaults: dict[str, object]) -> tuple[int, int]:
    if config.min_workers and config.max_workers and config.max_workers >= config.min_workers:
        return config.min_workers, config.max_workers
    if not asked.executors_by_default:
        return asked.executors, asked.executors
    low, high = (_first(defaults.get(key), fallback=0) for key in ("minWorkers", "maxWorkers"))
    if low > high > 0:
        high = low  # TorchServe starts minWorkers, too
    # If one of them is set, the other is `asked.executors`, limited so that low <= high.
    return low or min(asked.executors, high or asked.executors), high or max(asked.executors, low)


def _timeout(
    asked_s: float | None, others: tuple[object, ...], asked_first: bool, fallback_s: float
) -> float:
    candidates = (asked_s, *others) if asked_first else (*others, asked_s)
    given = (value for value in candidates if isinstance(value, (int, float)) and value > 0)
    return float(next(given, fallback_s))
