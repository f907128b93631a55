"""The messages between the server and a worker process.

A message is one frame (`frames.py`) of MessagePack: a tagged array of fixed layout, decoded by `msgspec`
against the types below, so any other message from a worker is detected at once. Nothing is unpickled. Both
ends are of the same release, so the layout may change between releases.

Values and answers of more than `LARGE_BYTES` follow their frame as raw bytes. Inside the message each would
be copied once more on either side. Smaller values follow the frame, too, if they would make it long: a lane
writes its begin mark after it has read the frame, and before it allocates memory for raw bytes.

The control socket carries load steps and heartbeats, which no batch delays. Each lane has its own data
socket, on which the server sends it batches. With one socket for all lanes, each batch would wake two lanes:
one to run it, and one to wait for the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from torchere.handlers.metrics import MAX_SAMPLES, MetricSample
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    InvalidRequest,
    NoRoom,
    OutOfResources,
    ServingError,
)
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers.executor import BatchReport, LoadSpec, Unfinished
from torchere.serving.workers.frames import HEADER, MAX_FRAME_BYTES, Parts
from torchere.serving.workers.slots import Slots

logger = logging.getLogger(__name__)

LARGE_BYTES = 32_768
_INLINE_BYTES = 2**20  # of values in the frame of a run; further ones are raw
_TINY_BYTES = 64  # values up to this size are never raw: the entry for a raw value takes more memory
# A worker's frames are decoded on the server's event loop, hostile ones in 0.1 us a byte. These limits bound
# that time, and the bytes that the server has to hold.
REPORT_BYTES = 2**22
CONTROL_BYTES = 2**22
_MOST_OUTCOMES = 2 * 65_536  # twice the largest batch size

# A frame with more samples is refused before it is decoded; our own workers keep no more (`MetricsCache`).
Samples = Annotated[tuple[MetricSample, ...], msgspec.Meta(max_length=MAX_SAMPLES)]


class Load(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Control, to the worker: load these lanes; answered by `Loaded` or `LoadError`."""

    spec: LoadSpec
    gpu_ids: tuple[int | None, ...]  # one for each lane; None: on the CPU
    log_token: str = ""  # marks the records of its log: `logs/worker_lines.py`
    config_file: str = ""  # in the archive: the worker reads the model config from it, see `load_of`


class AddLanes(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Control, to the worker: load further lanes; answered by `Loaded` or `LoadError`."""

    gpu_ids: tuple[int | None, ...]


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Control, to the worker: warm the loaded lanes up and let them serve.

    Answered by `Serving` for each lane, and then by `Loaded` or `LoadError`.
    """


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Control, to the worker: answer with `Pong`."""


class LogLevel(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Control, to the worker: change the level of a logger."""

    logger: str
    level: int


class Run(msgspec.Struct, frozen=True, array_like=True, tag=6):  # also `_RUN_TAG`
    """Data, to the worker: run a batch; answered by any number of `Partial` and one `Done`.

    The answers have the same `run_id`. A lane runs batches in the order they were sent. `place` is the run's
    row in the page (`lanes.py`).
    """

    run_id: int
    place: int
    requests: tuple[InferRequest, ...]
    large: tuple[tuple[int, int, int], ...] = ()  # raw values: request, parameter, bytes
    slot: int = -1  # has the raw values (`slots.py`); -1: they follow the frame


class Join(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """To another rank of the worker: load, and meet the others at this port; answered as `Load` is."""

    host: str  # of the store that rank 0 holds; "": the machine at the other end of the connection
    port: int
    rank: int
    ranks: int  # of all machines
    machine: int  # the place of its machine in the group
    machines: int
    interface: dict[str, str]  # variables that name the network interface; empty: that of the connection
    run_id: str


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Control, to the server: the process is alive.

    It carries the metrics that handlers report outside of a request, for which no `Done` follows; the server
    pings an idle process every 2 s.
    """

    metrics: Samples = ()


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Control, to the server: the requested step is done."""


class LoadError(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Control, to the server: the requested step failed; lanes in service continue."""

    detail: str
    out_of_memory: bool
    needs_own_process: bool = False  # the version must be loaded in its own process


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Control, to the server: one more lane is in service."""


class Partial(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Data, to the server: a part of the streamed answer of request `index`; see `RunOwner.run_part`."""

    run_id: int
    index: int
    part: InferResponse


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The outcome of a request that has no response; the tag of `InferResponse` is 21, of `Unfinished` 22."""

    code: str  # `ServingError.code`
    message: str
    detail: str
    status: int = 0  # `HandlerFailed.status`; 0 for any other error


class Done(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Data, to the server: the batch is over; `outcomes[i]` is that of `requests[i]`."""

    run_id: int
    outcomes: Annotated[
        tuple[InferResponse | Unfinished | Failure, ...], msgspec.Meta(max_length=_MOST_OUTCOMES)
    ]
    began_s: float  # monotonic; all processes of a machine share this clock
    handler_s: float
    metrics: Samples
    stages_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    end_cause: str = ""  # why the worker ends now, and begins no further batch; "": it goes on
    # Raw answers: outcome, bytes
    large: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=_MOST_OUTCOMES)] = ()
    slot: int = -1  # as in `Run`


class RankDone(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """From another rank of the worker: it has run a batch; only rank 0 sends answers."""

    failed: bool  # its handler raised an exception
    end_cause: str = ""  # as in `Done`


class RankLost(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Control, to the server: a rank of the worker is lost, and with it the worker."""

    rank: int
    exit_code: int  # negative: the number of the signal that ended it
    cause: str = ""  # "": the exit code is the cause
    is_cut_off: bool = False  # its machine does not answer, or has not come


class RankPids(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Control, to the server: the process ids of the ranks from 1 on that rank 0 has forked."""

    pids: Annotated[tuple[int, ...], msgspec.Meta(max_length=1024)]


ControlToWorker: TypeAlias = Load | AddLanes | WarmUp | Ping | LogLevel
ControlFromWorker: TypeAlias = Loaded | LoadError | Serving | Pong | RankLost | RankPids
ToRank: TypeAlias = Join | WarmUp | Ping | LogLevel | Run
FromRank: TypeAlias = Loaded | LoadError | Pong | RankDone | RankLost
DataFromWorker: TypeAlias = Partial | Done
Message: TypeAlias = ControlToWorker | ControlFromWorker | DataFromWorker | ToRank | FromRank

_RUN_TAG = 6  # of `Run`
_PARTIAL_BEGINS = b"\x94\x0c"  # an array of four, and the tag of `Partial`

_encoder = msgspec.msgpack.Encoder()
control_to_worker: msgspec.msgpack.Decoder[ControlToWorker] = msgspec.msgpack.Decoder(ControlToWorker)
data_to_worker: msgspec.msgpack.Decoder[Run] = msgspec.msgpack.Decoder(Run)
control_from_worker: msgspec.msgpack.Decoder[ControlFromWorker] = msgspec.msgpack.Decoder(ControlFromWorker)
data_from_worker: msgspec.msgpack.Decoder[DataFromWorker] = msgspec.msgpack.Decoder(DataFromWorker)
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode_frame(message: msgspec.Struct | tuple[Any, ...]) -> bytearray:
    """Encode one message as one frame.

    Raises:
        ValueError: the message is longer than `MAX_FRAME_BYTES`.
    """
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    length = len(frame) - HEADER.size
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes is over the {MAX_FRAME_BYTES} bytes a frame may hold")
    HEADER.pack_into(frame, 0, length)
    return frame


def encode_run(run_id: int, place: int, requests: Sequence[Any], slots: Slots | None = None) -> Parts:
    """Encode a `Run` of requests with the attributes of `InferRequest`, as a frame and raw bytes.

    The raw bytes are put into a slot of `slots`, if one is free.

    It encodes tuples with the array layout of `Run` and `InferRequest`; creating these objects first would
    take three times as long.

    Raises:
        ValueError, MemoryError: the batch is too large to be sent.
    """
    rows, large, raw, left = [], [], [], _INLINE_BYTES
    for index, one in enumerate(requests):
        parameters = one.parameters
        for at, parameter in enumerate(parameters):
            size = len(parameter.value)
            if size > LARGE_BYTES or left < size > _TINY_BYTES:
                large.append((index, at, size))
                raw.append(parameter.value)
                if parameters is one.parameters:
                    parameters = list(parameters)
                parameters[at] = Parameter(parameter.name, b"", parameter.content_type)
            else:
                left -= size
        rows.append((one.request_id, parameters, one.headers, one.deadline_s, one.priority))
    frame = encode_frame((_RUN_TAG, run_id, place, rows, large, -1))
    return _with_raw(frame, raw, _check_sum(large), slots)


def _with_raw(frame: bytearray, raw: Parts, size: int, slots: Slots | None) -> Parts:
    """Put raw bytes into a slot, if one is free, and note it in their frame; return the bytes to send."""
    slot = slots.put(raw, size) if slots is not None and size else -1
    if slot < 0:
        return [frame, *raw]
    frame[-1] = slot  # the last field of `Run` and `Done`: MessagePack has one byte for -1 to 127
    return [frame]


def raw_bytes(message: Run | Done) -> int:
    """Return the number of raw bytes that follow the frame of a message.

    Raises:
        ValueError: the message states invalid sizes.
    """
    return _check_sum(message.large)


def raw_answer_bytes(done: Done, spec: LoadSpec, requests: Sequence[Any] | None) -> int:
    """Do as `raw_bytes` for the report of a batch, and check it, because the worker may be hostile.

    `requests` are those of the batch; None: the batch is not known any more.

    Raises:
        ValueError: as above; or more answers than requests, or one longer than `max_response_bytes`.
    """
    most, longest = spec.max_response_bytes, max([size for _, size in done.large], default=0)
    if longest > most or (requests is not None and len(done.large) > len(requests)):
        raise ValueError(
            f"{len(done.large)} answers of up to {longest} bytes, expected at most {most} for each request"
        )
    return _check_sum(done.large)


def data_of(payload: memoryview, spec: LoadSpec) -> DataFromWorker:
    """Decode a frame of a data socket. Only a part of a streamed answer may be longer than a report.

    Raises:
        msgspec.MsgspecError, RecursionError, ValueError: it is not a message, or too long for it.
    """
    is_report = len(payload) > REPORT_BYTES and payload[:2] != _PARTIAL_BEGINS
    if is_report and len(payload) > (most := _most_done_bytes(spec.most_requests)):
        raise ValueError(f"a report of {len(payload)} bytes, expected at most {most}")
    return data_from_worker.decode(payload)


def _most_done_bytes(requests: int) -> int:
    return REPORT_BYTES + 4 * requests * LARGE_BYTES


def most_report_bytes(spec: LoadSpec) -> int:
    """Return the greatest size of a frame that a worker may send on a data socket.

    A report has an answer of up to `LARGE_BYTES` for each request, headers, and metrics. A part of a streamed
    answer may be longer than `max_response_bytes`, so twice that is added.
    """
    return min(MAX_FRAME_BYTES, _most_done_bytes(spec.most_requests) + 2 * spec.max_response_bytes)


def _check_sum(large: Sequence[tuple[int, ...]]) -> int:
    total = 0
    for each in large:
        if min(each) < 0 or not each[-1]:
            raise ValueError(f"{each} is no large value")
        total += each[-1]
    if total > MAX_FRAME_BYTES:
        raise ValueError(f"large values of {total} bytes, expected at most {MAX_FRAME_BYTES}")
    return total


def run_with_raw(run: Run, raw: memoryview) -> Run:
    """Return a run with the raw values that followed its frame."""
    requests, start = list(run.requests), 0
    for index, of_request in groupby(run.large, lambda each: each[0]):
        parameters = list(requests[index].parameters)
        for _, at, size in of_request:
            value: Any = raw[start : start + size]
            parameters[at] = Parameter(parameters[at].name, value, parameters[at].content_type)
            start += size
        requests[index] = msgspec.structs.replace(requests[index], parameters=tuple(parameters))
    return Run(run.run_id, run.place, tuple(requests))


def done_with_raw(done: Done, raw: memoryview) -> Done:
    """Return a report with the raw answers put in; without outcomes if one belongs to no answer."""
    outcomes, start = list(done.outcomes), 0
    for index, size in done.large:
        outcome = outcomes[index] if index < len(outcomes) else None
        if not isinstance(outcome, InferResponse | Unfinished):
            return msgspec.structs.replace(done, outcomes=())
        outcomes[index] = _with_body(outcome, raw[start : start + size])
        start += size
    return msgspec.structs.replace(done, outcomes=tuple(outcomes))


def _with_body(outcome: InferResponse | Unfinished, body: Any) -> InferResponse | Unfinished:
    if isinstance(outcome, Unfinished):
        return Unfinished(msgspec.structs.replace(outcome.part, body=body))
    return msgspec.structs.replace(outcome, body=body)


def load_of(spec: LoadSpec, gpu_ids: tuple[int | None, ...], log_token: str) -> Load:
    """Return the `Load` message; a model config that MessagePack would change stays in its file.

    For example, dates and sets of YAML would arrive as texts and lists.
    """
    config_file = (spec.manifest.get("model") or {}).get("configFile")
    if not config_file or _survives(spec.model_config):
        return Load(spec, gpu_ids, log_token)
    return Load(replace(spec, model_config={}), gpu_ids, log_token, config_file)


def spec_of(message: Load) -> LoadSpec:
    """Return the spec of a `Load` message, with the model config from its file if it stayed there."""
    if not message.config_file:
        return message.spec
    from torchere.serving.config.bounded_yaml import read_yaml  # noqa: PLC0415 - hardly ever needed

    text = Path(message.spec.archive_dir, message.config_file).read_text(encoding="utf-8")
    return replace(message.spec, model_config=read_yaml(text))


def _survives(values: dict[str, Any]) -> bool:
    try:
        received = msgspec.msgpack.decode(_encoder.encode(values), type=dict[str, Any])
    except msgspec.ValidationError:  # a key that is not a string
        return False
    return repr(received) == repr(values)  # unlike ==, it distinguishes equal times in different time zones


def done_from_report(run_id: int, report: BatchReport, end_cause: str = "") -> Done:
    """Return a worker's report as a message."""
    outcomes = tuple(
        _failure_of(outcome) if isinstance(outcome, ServingError) else outcome for outcome in report.outcomes
    )
    return Done(
        run_id, outcomes, report.began_s, report.handler_s, report.metrics, report.stages_s, end_cause
    )


def pong_of(samples: Sequence[MetricSample]) -> Pong:
    """Return the answer to a `Ping`, with metrics reported outside of a batch as far as they can be sent."""
    kept, cause = tuple(samples[:MAX_SAMPLES]), ""
    for pong in (Pong(kept), Pong(tuple(map(_encodable, kept)))):
        try:
            size = len(encode_frame(pong))
        except (TypeError, ValueError, OverflowError) as err:
            cause = str(err)
            continue
        if size <= CONTROL_BYTES:
            return pong
        cause = f"their texts have {size} bytes"
    logger.error("metrics that a handler reported outside of a batch can't be sent: %s", cause)
    return Pong()


def encode_report(run_id: int, report: BatchReport, end_cause: str = "", slots: Slots | None = None) -> Parts:
    """Encode a worker's report as `encode_run` does a run, even if its content can't be encoded.

    A report that can't be encoded is sent with the texts of its metrics made encodable, or else without its
    metrics, or if that fails too, with errors as outcomes.
    """
    for rest in _ever_less(report):
        try:
            frame, raw, size = _encode_done(done_from_report(run_id, rest, end_cause))
            if len(frame) > _most_done_bytes(len(rest.outcomes)):
                raise ValueError(f"with its texts and metrics it has {len(frame)} bytes")
            return _with_raw(frame, raw, size, slots)
        except (TypeError, ValueError, OverflowError) as err:
            logger.error("the report of a batch can't be sent as it is: %s", err)
    failed = [HandlerFailed(detail="the answer can't be sent; the log says why")] * len(report.outcomes)
    bare = msgspec.structs.replace(report, outcomes=failed, metrics=())
    return [encode_frame(done_from_report(run_id, bare, end_cause))]


def _ever_less(report: BatchReport) -> Iterator[BatchReport]:
    yield report
    yield msgspec.structs.replace(report, metrics=tuple(map(_encodable, report.metrics)))
    yield msgspec.structs.replace(report, metrics=())


def _encodable(sample: MetricSample) -> MetricSample:
    """Return a sample with "?" for characters that UTF-8 can't encode: labels may be from clients' JSON."""
    dimensions = tuple((_utf8(name), _utf8(value)) for name, value in sample.dimensions)
    return sample._replace(name=_utf8(sample.name), unit=_utf8(sample.unit), dimensions=dimensions)


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


def _encode_done(done: Done) -> tuple[bytearray, Parts, int]:
    """Return a report as a frame and raw bytes, and the number of these."""
    large: list[tuple[int, int]] = []
    raw: list[bytes | bytearray | memoryview] = []
    outcomes = list(done.outcomes)
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):
            continue
        response = outcome.part if isinstance(outcome, Unfinished) else outcome
        if len(response.body) > LARGE_BYTES:
            large.append((index, len(response.body)))
            raw.append(response.body)
            outcomes[index] = _with_body(outcome, b"")
    if large:
        done = msgspec.structs.replace(done, outcomes=tuple(outcomes), large=tuple(large))
    return encode_frame(done), raw, _check_sum(large)


def report_from_done(done: Done, expected: int) -> BatchReport:
    """Return a worker's message as a report of `expected` outcomes; a wrong number fails them all."""
    outcomes = [_error_of(each) if isinstance(each, Failure) else each for each in done.outcomes]
    if len(outcomes) != expected:
        cause = f"the worker sent {len(outcomes)} outcomes for a batch of {expected}"
        return BatchReport([ExecutorDied(cause)] * expected)
    return BatchReport(outcomes, done.handler_s, done.metrics, done.stages_s, done.began_s).plausible()


def _failure_of(error: ServingError) -> Failure:
    status = error.status if isinstance(error, HandlerFailed) else 0
    return Failure(error.code, error.message, error.detail, status)


_KINDS: dict[str, type[ServingError]] = {
    kind.code: kind for kind in (OutOfResources, NoRoom, DeadlineExceeded, InvalidRequest)
}


def _error_of(failure: Failure) -> ServingError:
    if failure.code == Cancelled.code:
        return Cancelled()
    if failure.code == ExecutorDied.code:
        return ExecutorDied(failure.detail)
    if (kind := _KINDS.get(failure.code)) is not None:
        return kind(failure.message, failure.detail)
    return HandlerFailed(failure.message, failure.status, failure.detail)
