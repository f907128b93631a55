"""Loads and calls one handler by TorchServe's contract. Used by the lanes of a worker.

Contract: data is a list with one dict per request; the handler returns a list of equal length; the failures
and their texts are TorchServe's, because clients compare them.
"""

from __future__ import annotations

import asyncio
import copy
import cProfile
import inspect
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchere.handlers.archive_import import archive_of, give_plain_names
from torchere.handlers.context import Context, RequestProcessor, Unwanted
from torchere.handlers.encode import Lent, decode_input
from torchere.handlers.errors import HandlerLoadError, PredictionException, UnsupportedOutput
from torchere.handlers.loading.devices import gpu_is_usable, kind_of, own_stream
from torchere.handlers.loading.torchscript import spare_memory
from torchere.handlers.loading.weights import SharedModels
from torchere.handlers.metrics import MetricSample, MetricsCache
from torchere.handlers.resolve import EntryPoint, load_entry_point
from torchere.handlers.tensors import TENSOR_TYPE, TensorError, shown
from torchere.handlers.tensors.answer import IN_JSON, AnswerEncoder, read_wish
from torchere.handlers.tensors.enveloped import request_json
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
from torchere.serving.logs.trace_context import trace_of_headers
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers.executor import BatchReport, LoadSpec, Outcome, Unfinished
from torchere.serving.workers.loss import RAISED
from torchere.serving.workers.messages import most_report_bytes
from torchere.serving.workers.plain import (
    goes_on,
    lacks_memory,
    line_of,
    plain_text,
    refusal_of,
    response_of,
    stages_of,
    trace_of,
)

logger = logging.getLogger(__name__)

BENCHMARK = os.environ.get("TS_BENCHMARK", "").lower() == "true"
PROFILE = "tsPythonProfile.prof"
_profiling = threading.Lock()  # Python 3.12 and later allow one profiler at a time
_profiler: cProfile.Profile | None = None
SERVER_VERSION = "0.12.0"  # handlers read it as `server_version`: the TorchServe contract's version
_WARM_UP_RUNS = 3  # TorchScript's profiling executor specialises on the second run, and settles by the third
_HEADERS_BYTES = 2**19  # above the UTF-8 size of all headers in the frame of a part
PartialSink = Callable[[int, InferResponse], object]


class HandlerHost:
    """A handler instance for one lane. Not thread-safe: one thread loads it and runs it.

    Args:
        spec: the load parameters of the handler.
        gpu_id: the GPU to load it on; None: the CPU.
        shared_models: shared by all hosts of a version in this process, so that weights are loaded once.
        answers: whether the handler's result is checked and sent; False in a group's ranks other than 0.
    """

    def __init__(
        self,
        spec: LoadSpec,
        gpu_id: int | None,
        shared_models: SharedModels,
        *,
        answers: bool = True,
    ) -> None:
        self._spec = spec
        self._metrics = MetricsCache(spec.model_name, spec.declared_metrics)
        self._context = Context(
            model_name=spec.model_name,
            model_dir=spec.archive_dir,
            manifest=spec.manifest,
            gpu=gpu_id,
            batch_size=spec.batch_size,
            mms_version=SERVER_VERSION,
            limit_max_image_pixels=spec.limit_max_image_pixels,
            model_yaml_config=spec.model_config,
            metrics=self._metrics,
            shared_models=shared_models,
        )
        self._entry_point: EntryPoint  # from `load` on
        self._borrows = False  # the handler takes tensors as views of the request's memory
        self._decodes = spec.decode_input
        self._encoder = AnswerEncoder(spec.model_name, spec.model_version, spec.archive_dir)
        self._context.encoder = self._encoder
        self._gpu_id = gpu_id
        self._answers = answers
        self._most_part_bytes = most_report_bytes(spec) - _HEADERS_BYTES
        self.end_cause = ""  # why the process must end after the last report; "": it goes on

    def own_process(self) -> None:
        """Prepare a process that hosts this version only: its modules also get their plain names."""
        if not self._spec.shares_weights:
            spare_memory()
        give_plain_names(archive_of(self._context))

    def load(self) -> None:
        """Resolve and initialise the handler; set the calling thread's intra-op thread count.

        Raises:
            LoadFailed: the handler raised any exception; `detail` has the cause.
        """
        torch.set_num_threads(self._spec.intra_op_threads)
        spec = self._spec
        try:
            if self._gpu_id is not None and spec.shares_weights:  # other lanes use the GPU, too
                own_stream(self._gpu_id, kind_of(spec.model_config))
            self._entry_point = load_entry_point(
                spec.handler,
                self._context,
                envelope=spec.envelope,
                installed=spec.handler_installed,
                runtime=spec.runtime,
            )
        except HandlerLoadError as err:
            logger.error("loading %s failed: %s", spec.model_name, err)
            raise spec.failed(plain_text(err), lacks_memory(err.__cause__ or err)) from err
        except BaseException as err:  # the handler's own code may raise anything, even SystemExit
            logger.exception("loading %s failed in its handler %s", spec.model_name, spec.handler)
            detail = f"handler {spec.handler} raised {line_of(err)}"
            raise spec.failed(detail, lacks_memory(err)) from err
        self._encoder.labels = getattr(self._entry_point.instance, "mapping", None)
        self._borrows = getattr(self._entry_point.instance, "borrows_tensors", False) is True
        # As in TorchServe, a handler's module may set the variable, which has the server's value at first.
        wanted = os.environ.get("TS_DECODE_INPUT_REQUEST", str(spec.decode_input).lower()) == "true"
        self._decodes = wanted and not getattr(self._entry_point.instance, "takes_bytes", False)

    def warm_up(self) -> None:
        """Run the handler's own example rows, if it has any, until lazy initialisation is done.

        Raises:
            LoadFailed: the handler cannot answer its own example.
        """
        of_load = self._metrics.drain()
        try:
            rows = self._entry_point.warmup_data()
            for _ in range(_WARM_UP_RUNS if rows else 0):
                self._context.begin_batch([RequestProcessor({}, "warm-up") for _ in rows or ()], None)
                self._entry_point(list(rows or ()), self._context)
        except BaseException as err:  # as in `load`
            logger.exception("the warm-up of %s failed", self._spec.model_name)
            detail = f"the warm-up request failed with {line_of(err)}"
            raise self._spec.failed(detail, lacks_memory(err)) from err
        self._metrics.drain()  # discard the samples of the warm-up: they belong to no request
        for sample in of_load:
            self._metrics.record(sample)  # reported with the first batch

    def run(
        self,
        requests: Sequence[InferRequest],
        send_partial: PartialSink,
        gone: Sequence[int] = (),
        is_unwanted: Callable[[], bool] | None = None,
    ) -> BatchReport:
        """Run one batch; failures become outcomes, so this does not raise.

        Requests whose deadline passed while they waited for this lane, and those with an index in `gone`, are
        answered without being run. The run is aborted at the next stage or part once `is_unwanted` returns
        True: all its clients have disconnected.
        """
        now_s = time.monotonic()
        self._context.is_unwanted = is_unwanted
        for request in requests:
            if request.deadline_s <= now_s:
                break
        else:
            if not gone:
                return self._run(requests, send_partial, now_s)
        return self._run_some(requests, _left_out(requests, gone, now_s), send_partial, now_s)

    def _run_some(
        self,
        requests: Sequence[InferRequest],
        refusals: Sequence[ServingError | None],
        send_partial: PartialSink,
        now_s: float,
    ) -> BatchReport:
        """Run the requests whose refusal is None as one batch; answer the others with their refusal."""
        places = [place for place, refusal in enumerate(refusals) if refusal is None]
        live = [requests[place] for place in places]

        def send(index: int, part: InferResponse) -> None:
            send_partial(places[index], part)

        report = self._run(live, send, now_s) if live else BatchReport([])
        of_live = iter(report.outcomes)
        outcomes = [refusal or next(of_live) for refusal in refusals]
        return BatchReport(outcomes, report.handler_s, report.metrics, report.stages_s, now_s)

    def _run(self, requests: Sequence[InferRequest], send_partial: PartialSink, now_s: float) -> BatchReport:
        # A batch that fails as a whole runs again request by request, so its values must stay unchanged.
        lent: Lent = "own" if not self._borrows else "write" if len(requests) == 1 else "read"
        read = [self._read(request, lent) for request in requests]
        refusals = [each if isinstance(each, ServingError) else None for each in read]
        if any(refusals):
            read.clear()  # the valid requests are read again: their values must not take memory twice
            return self._run_some(requests, refusals, send_partial, now_s)
        rows = [row for row, _ in read]  # type: ignore[misc]  # none is refused
        processors = [processor for _, processor in read]  # type: ignore[misc]
        self._context.begin_batch(processors, self._parts_of(processors, send_partial))
        started = time.perf_counter()
        failure: ServingError | None = None
        try:
            if BENCHMARK:
                with profiled():
                    answers = self._entry_point(rows, self._context)
            else:
                answers = self._entry_point(rows, self._context)
            handler_s = time.perf_counter() - started
            outcomes = self._outcomes(answers, processors)
        except BaseException as err:
            handler_s = time.perf_counter() - started
            failure = self._failure(err, requests)
        if failure is not None:  # not in the except block: the exception would keep GPU tensors alive
            outcomes = [failure] * len(requests)
            self._end_if_lost(failure)
        self._context.end_batch()
        metrics = tuple(self._metrics.drain())
        return BatchReport(outcomes, handler_s, metrics, stages_of(self._context), now_s)

    async def run_beside(
        self, request: InferRequest, send_partial: PartialSink, is_unwanted: Callable[[], bool]
    ) -> BatchReport:
        """Run one request among others, on `loop`, with its own copy of the context; this does not raise."""
        now_s = time.monotonic()
        (refusal,) = _left_out([request], (), now_s)
        read = refusal or self._read(request, "own")
        if isinstance(read, ServingError):
            return BatchReport([read], began_s=now_s)
        row, processor = read
        started = time.perf_counter()
        context = self._context
        failure: ServingError | None = None
        try:
            context = copy.deepcopy(context)
            context.metrics, context.is_unwanted = self._metrics.beside(), is_unwanted
            context.begin_batch([processor], self._parts_of([processor], send_partial))
            answers = self._entry_point.begin([row], context)
            if inspect.isawaitable(answers):
                answers = await answers
            outcomes = self._outcomes(answers, [processor])
        except asyncio.CancelledError as err:
            failure = Cancelled() if is_unwanted() else HandlerFailed(detail=line_of(err))
        except BaseException as err:
            failure = self._failure(err, [request])
        handler_s = time.perf_counter() - started
        if failure is not None:  # not in the except block, as in `_run`
            outcomes = [failure]
            self._end_if_lost(failure)
        context.end_batch()
        return BatchReport(outcomes, handler_s, tuple(self._metrics.drain()), stages_of(context), now_s)

    def _read(
        self, request: InferRequest, lent: Lent
    ) -> tuple[dict[str, Any], RequestProcessor] | ServingError:
        """Decode a request: return its values by name, and its id and headers; or else the error."""
        try:
            if self._spec.envelope:
                request = self._as_json(request)
            row = row_of(request, self._decodes, lent)
            return row if isinstance(row, InvalidRequest) else (row, processor_of(request))
        except TensorError as err:  # of the translation to JSON
            return InvalidRequest(str(err))
        except Exception as err:
            failure = self._failure(err, [request])
            return NoRoom(failure.message, failure.detail) if isinstance(failure, OutOfResources) else failure

    def _as_json(self, request: InferRequest) -> InferRequest:
        """Return the request with its tensors as JSON if the handler behind the envelope takes them so.

        Raises:
            TensorError: no JSON can hold the tensors.
        """
        given = request.parameters
        if given and not given[0].content_type.startswith(TENSOR_TYPE):
            return request
        wish = read_wish(dict(request.headers).get(IN_JSON) or "{}")
        if wish.json_bytes_as is None:
            return request
        inputs = [(each.name, each.content_type, each.value) for each in given]
        text = request_json(self._spec.model_name, wish.id, inputs, wish.json_bytes_as)
        body = Parameter("body", text, "application/json")
        return msgspec.structs.replace(request, parameters=(body,))

    def _parts_of(
        self, processors: Sequence[RequestProcessor], send_partial: PartialSink
    ) -> Callable[[int, bytes], None]:
        """Return a callback for each part of an answer; it adds the status and headers set by the handler.

        The callback raises `TypeError` for a part that is not bytes, and `ValueError` for one too long for a
        frame: sending such a part would end the worker.
        """

        def send(index: int, chunk: bytes) -> None:
            if not isinstance(chunk, (bytes, bytearray, memoryview)):
                raise TypeError(f"a part of the answer is of type {type(chunk).__name__}, expected bytes")
            if (size := memoryview(chunk).nbytes) > self._most_part_bytes:
                raise ValueError(
                    f"a part of the answer has {size} bytes, expected at most {self._most_part_bytes}; "
                    f"a greater max_response_size={self._spec.max_response_bytes} raises this limit"
                )
            send_partial(int(index), response_of(chunk, processors[index]))

        return send

    def drain_metrics(self) -> tuple[MetricSample, ...]:
        """Return the metrics that the handler reported since the last batch; any thread may call it."""
        return tuple(self._metrics.drain())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the handler's coroutines."""
        return self._entry_point.loop

    def _end_if_lost(self, failure: ServingError) -> None:
        """Set `end_cause` if the process can't go on after this failure."""
        if isinstance(failure, ExecutorDied):
            self.end_cause = failure.detail
        elif not gpu_is_usable(self._gpu_id, isinstance(failure, OutOfResources)):
            self.end_cause = "it lost its GPU"

    def _outcomes(self, answers: object, processors: Sequence[RequestProcessor]) -> list[Outcome]:
        if not self._answers:
            return [InferResponse(b"")] * len(processors)
        if not isinstance(answers, list):
            detail = (
                f"the handler returned {type(answers).__name__}, expected a list with an answer per request"
            )
            return self._all_failed("Invalid model predict output", detail, len(processors))
        if len(answers) != len(processors):
            detail = f"the handler returned {len(answers)} answers for a batch of {len(processors)}"
            return self._all_failed("number of batch response mismatched", detail, len(processors))
        outcomes = list(map(self._outcome, answers, processors))
        if self._context.stopping_criteria:
            for place, outcome in enumerate(outcomes):
                if goes_on(self._context, place, answers[place]) and isinstance(outcome, InferResponse):
                    outcomes[place] = Unfinished(outcome)
        return outcomes

    def _outcome(self, answer: object, processor: RequestProcessor) -> Outcome:
        try:
            body = self._encoder.encode(answer, processor)
        except UnsupportedOutput as err:  # fails this request alone: others of its batch may be streams
            return self._all_failed(err.message, str(err), 1, err.status)[0]
        limit = self._spec.max_response_bytes
        if len(body) > limit:
            return HandlerFailed(
                f"The answer has {len(body)} bytes, more than max_response_size={limit}.", status=500
            )
        return response_of(body, processor)

    def _all_failed(self, message: str, detail: str, count: int, status: int = 503) -> list[Outcome]:
        logger.error("model %s: %s: %s", self._spec.model_name, message, detail)
        return [HandlerFailed(message, status, detail)] * count

    def _failure(self, err: BaseException, requests: Sequence[InferRequest]) -> ServingError:
        if isinstance(err, Unwanted):
            return Cancelled()
        ids = ",".join(request.request_id for request in requests)
        extra = self._log_fields(ids, requests)
        if isinstance(err, PredictionException):
            refusal = refusal_of(err)
            logger.warning("model %s refused %s: %s", self._spec.model_name, ids, refusal, extra=extra)
            return refusal
        _log_failure(f"model {self._spec.model_name} failed on {ids}", err, extra)
        if lacks_memory(err):
            return OutOfResources("Out of resources", line_of(err))
        if not isinstance(err, Exception):  # SystemExit and its like: the handler means to end its process
            return ExecutorDied(f"{RAISED} {line_of(err)}")
        return HandlerFailed(detail=line_of(err))

    def _log_fields(self, ids: str, requests: Sequence[InferRequest]) -> dict[str, str]:
        fields = {"request_id": ids, "model": self._spec.model_name, "version": self._spec.model_version}
        traces = [trace_of_headers(request.headers) for request in requests]
        trace_ids = ",".join(dict.fromkeys(trace.trace_id for trace in traces if trace is not None))
        return fields | ({"trace_id": trace_ids} if trace_ids else {})


@contextmanager
def profiled() -> Iterator[None]:
    """Profile the block and write the sums of all blocks, as TorchServe's worker does with `TS_BENCHMARK`.

    The file is `PROFILE` in the temporary folder; each worker overwrites it. If blocks overlap in threads of
    one process, only one of them is profiled.
    """
    global _profiler  # noqa: PLW0603 - one for each process
    if not _profiling.acquire(blocking=False):
        yield
        return
    try:
        _profiler = _profiler or cProfile.Profile()
        with suppress(ValueError):  # the handler has a profiler of its own
            _profiler.enable()
        try:
            yield
        finally:
            _profiler.disable()
            file = Path(tempfile.gettempdir(), PROFILE)
            part = file.with_suffix(f".{os.getpid()}")
            try:
                _profiler.dump_stats(part)
                part.replace(file)
            except OSError as err:
                logger.warning("TS_BENCHMARK: %s can't be written: %s", file, err.strerror)
    finally:
        _profiling.release()


def _left_out(
    requests: Sequence[InferRequest], gone: Sequence[int], now_s: float
) -> list[ServingError | None]:
    late = DeadlineExceeded("The deadline of the request passed before it was run.")
    refusals: list[ServingError | None] = [late if each.deadline_s <= now_s else None for each in requests]
    for place in gone:
        refusals[place] = Cancelled()
    return refusals


def _log_failure(message: str, err: BaseException, extra: dict[str, str]) -> None:
    if not logger.isEnabledFor(logging.ERROR):
        return
    # Not `exc_info=err`: a log handler that keeps the record would keep the GPU tensors of its frames alive.
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None, extra=extra)
    record.exc_text = trace_of(err)
    logger.handle(record)


def row_of(request: InferRequest, decode: bool, lent: Lent) -> dict[str, Any] | InvalidRequest:
    """Return the decoded values of a request by name, or an `InvalidRequest` if a tensor is invalid."""
    row: dict[str, Any] = {}
    for parameter in request.parameters:
        try:
            row[parameter.name] = decode_input(parameter.value, parameter.content_type, decode, lent)
        except TensorError as err:
            return InvalidRequest(f"Input {shown(parameter.name)} is wrong: {err}")
    return row


def processor_of(request: InferRequest) -> RequestProcessor:
    """Return a request's id and headers: each value's content type under its name, then its own headers.

    A handler has no other way to get the content type of an uploaded file.
    """
    headers: dict[str, Any] = {}
    for parameter in request.parameters:
        if parameter.name[:1] != ":":  # ":" begins the server's own headers, which no client may set
            headers[parameter.name] = {"content-type": parameter.content_type}
    headers.update(request.headers)
    return RequestProcessor(headers, request.request_id)
