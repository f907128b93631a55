"""The messages between the server and a worker process, and nothing else.

One frame is a 4-byte big-endian length and that many bytes of MessagePack: a tagged array of fixed layout,
decoded by `msgspec` against the types below, so a worker that sends anything else is found out at once.
Nothing is ever unpickled. Both ends are of the same release: the layout may change with it.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from torchere.handlers.metric_types import MetricSample
from torchere.serving.errors import (
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    InvalidRequest,
    OutOfResources,
)
from torchere.serving.execution.executor import BatchReport, LoadSpec, Outcome, Unfinished
from torchere.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 2**31  # a frame that says it is longer is not a frame


class Load(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Server to worker: load this; answered by `Loaded` or `LoadError`."""

    spec: LoadSpec
    gpu_id: int | None
    log_token: str = ""  # marks the records of its log: `telemetry/worker_lines.py`
    config_file: str = ""  # of the unpacked archive: the worker reads the model config itself, see `load_of`


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Server to worker: run the warm-up rows; answered by `Loaded` or `LoadError`."""


class Run(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Server to worker: run a batch; answered by any number of `Partial` and one `Done` of the same `run_id`.

    A worker runs batches in the order they came; the next may be sent while one runs.
    """

    run_id: int
    requests: tuple[InferRequest, ...]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Server to worker: are you there? Answered by `Pong`, after the batches that were sent before."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Worker to server: a sign of life."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Worker to server: the step asked for is done."""


class LoadError(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Worker to server: the step asked for failed; the worker ends."""

    detail: str
    out_of_memory: bool


class Partial(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Worker to server: a part of the streamed answer of request `index`; see `BatchSink.partial`."""

    run_id: int
    index: int
    part: InferResponse


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The outcome of a request that has no response."""

    code: str  # `ServingError.code`
    message: str
    detail: str
    status: int = 0  # `HandlerFailed.status`; 0 for any other error


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The outcome of a request that was answered."""

    response: InferResponse


class More(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The outcome of a request that goes on: see `Unfinished`."""

    part: InferResponse


class Done(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Worker to server: the batch is over; `outcomes[i]` is that of `requests[i]`."""

    run_id: int
    outcomes: tuple[Answer | More | Failure, ...]
    handler_s: float
    metrics: tuple[MetricSample, ...]
    stages_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    is_last: bool = False  # the worker ends now, and begins none of those that were sent behind this one


ToWorker: TypeAlias = Load | WarmUp | Run | Ping
FromWorker: TypeAlias = Loaded | LoadError | Partial | Done | Pong

_encoder = msgspec.msgpack.Encoder()
to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(Load | WarmUp | Run | Ping)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(
    Loaded | LoadError | Partial | Done | Pong
)


def encode_frame(message: ToWorker | FromWorker) -> bytearray:
    """One message as one frame.

    Raises:
        ValueError: it is longer than `MAX_FRAME_BYTES`.
    """
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    length = len(frame) - HEADER.size
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes is over the {MAX_FRAME_BYTES} bytes a frame may hold")
    HEADER.pack_into(frame, 0, length)
    return frame


def load_of(spec: LoadSpec, gpu_id: int | None, log_token: str) -> Load:
    """The message that loads this; a model config of which a frame would make another is left in its file.

    Dates and sets of YAML, say, would come as texts and lists.
    """
    config_file = (spec.manifest.get("model") or {}).get("configFile")
    if not config_file or _survives(spec.model_config):
        return Load(spec, gpu_id, log_token)
    return Load(replace(spec, model_config={}), gpu_id, log_token, config_file)


def _survives(values: dict[str, Any]) -> bool:
    try:
        received = msgspec.msgpack.decode(_encoder.encode(values), type=dict[str, Any])
    except msgspec.ValidationError:  # a name that is no text
        return False
    return repr(received) == repr(values)  # unlike ==, it tells a time from the same one in another zone


def done_from_report(run_id: int, report: BatchReport, is_last: bool = False) -> Done:
    """A worker's report as a message."""
    outcomes = tuple(_encode_outcome(outcome) for outcome in report.outcomes)
    return Done(run_id, outcomes, report.handler_s, report.metrics, report.stages_s, is_last)


def encode_report(run_id: int, report: BatchReport, is_last: bool = False) -> bytearray:
    """A worker's report as a frame, whatever is in it.

    One that can't be sent goes without its metrics, or if that does not help, with errors for answers.
    """
    for rest in (report, BatchReport(report.outcomes, report.handler_s)):
        try:
            return encode_frame(done_from_report(run_id, rest, is_last))
        except (TypeError, ValueError, OverflowError) as err:
            logger.error("what came of a batch can't be sent as it is: %s", err)
    failed = [HandlerFailed(detail="the answer can't be sent; the log says why")] * len(report.outcomes)
    return encode_frame(done_from_report(run_id, BatchReport(failed, report.handler_s), is_last))


def report_from_done(done: Done, expected: int) -> BatchReport:
    """A worker's message as a report of `expected` outcomes; a wrong number fails them all."""
    outcomes = [_decode_outcome(outcome) for outcome in done.outcomes]
    if len(outcomes) != expected:
        cause = f"the worker sent {len(outcomes)} outcomes for a batch of {expected}"
        return BatchReport([ExecutorDied(cause)] * expected)
    return BatchReport(outcomes, done.handler_s, done.metrics, stages_s=done.stages_s)


def _encode_outcome(outcome: Outcome) -> Answer | More | Failure:
    if isinstance(outcome, InferResponse):
        return Answer(outcome)
    if isinstance(outcome, Unfinished):
        return More(outcome.part)
    if isinstance(outcome, HandlerFailed):
        return Failure(outcome.code, outcome.message, outcome.detail, outcome.status)
    return Failure(outcome.code, outcome.message, outcome.detail)


def _decode_outcome(outcome: Answer | More | Failure) -> Outcome:
    if isinstance(outcome, Answer):
        return outcome.response
    if isinstance(outcome, More):
        return Unfinished(outcome.part)
    if outcome.code == OutOfResources.code:
        return OutOfResources(outcome.message, outcome.detail)
    if outcome.code == DeadlineExceeded.code:
        return DeadlineExceeded(outcome.message, outcome.detail)
    if outcome.code == InvalidRequest.code:
        return InvalidRequest(outcome.message, outcome.detail)
    return HandlerFailed(outcome.message, outcome.status, outcome.detail)
