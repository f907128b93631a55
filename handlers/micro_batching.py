"""Pipeline one batch through a handler's stages, so that they overlap."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torchere.handlers.metrics import add_handler_time
from torchere.handlers.rows import first_row, rows_of

STAGES = ("preprocess", "inference", "postprocess")


class _Run(NamedTuple):
    """The run of one part through the stages; `answers` is set after the last stage."""

    part: int  # index of the part
    context: contextvars.Context
    answers: Future[Any]


class MicroBatching:
    """Splits a batch into parts and runs each stage of the handler in threads of its own.

    Assign it to the handler's `handle`: `self.handle = MicroBatching(self, micro_batch_size=4)`. It is called
    with one batch at a time.

    Args:
        parent_handler: a `BaseHandler`; its three stages must be safe to run at the same time.
        micro_batch_size: requests per part.
        parallelism: threads per stage, 1 for the stages not named.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; expected 1 or more")
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self._parallelism: dict[str, int] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._part = threading.local()
        self.parallelism = dict(parallelism or {})

    @property
    def parallelism(self) -> dict[str, int]:
        """Threads per stage, for the stages that were named; set it to change them between batches.

        Raises:
            AssertionError: when set with a stage that does not exist, or with less than one thread.
        """
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        for stage, threads in parallelism.items():
            if stage not in STAGES or threads < 1:
                # TorchServe's contract names this class of error.
                raise AssertionError(f"parallelism {stage!r}: {threads}; expected 1 or more, for {STAGES}")
        self._parallelism.update(parallelism)
        self.shutdown()
        self._pools = {
            stage: ThreadPoolExecutor(self._parallelism.get(stage, 1), thread_name_prefix=f"micro-{stage}")
            for stage in STAGES
        }

    def shutdown(self) -> None:
        """Stop the threads, after running stages have finished."""
        for pool in self._pools.values():
            pool.shutdown()

    def get_micro_batch_idx(self) -> int | None:
        """Return the index of the part that the calling stage works on; None if the batch is not split."""
        index: int | None = getattr(self._part, "index", None)
        return index

    def handle(self, data: Any) -> list[Any]:
        """Answer one batch.

        Raises:
            PredictionException: an envelope handed on a value without rows; see `rows_of`.
            Exception: raised by the first part that failed, after all parts have ended.
        """
        size, rows = self.micro_batch_size, rows_of(data)
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        batch_context = contextvars.copy_context()  # has the collector of `emit_metrics`
        runs = [_Run(index, batch_context, Future()) for index in range(len(parts))]
        for run, part in zip(runs, parts, strict=True):
            self._advance(run, 0, part)
        results: list[Any] = [run.answers.exception() or run.answers.result() for run in runs]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [answer for result in results for answer in result]

    def __call__(self, data: Any, context: Any) -> Any:
        """Answer one batch in place of the handler's own `handle`; describe and explain are not split."""
        started = time.perf_counter()
        handler = self.handler
        handler.context = context
        if handler._is_describe():
            output = [handler.describe_handle()]
        elif os.environ.get("ENABLE_TORCH_PROFILER"):
            output, _ = handler._infer_with_profiler(data=data)
        elif handler._is_explain():
            output = handler.explain_handle(handler.preprocess(data), data)
        else:
            output = self.handle(data)
        add_handler_time(context, started)
        return output

    def _advance(self, run: _Run, position: int, value: Any) -> None:
        """Queue a stage of a part; when it is done, its thread queues the next stage."""
        if position == len(STAGES):
            run.answers.set_result(value)
            return
        stage = STAGES[position]
        # A copy for each stage: two threads can't enter one context at the same time.
        in_context = run.context.copy().run
        try:
            future = self._pools[stage].submit(in_context, self._run_stage, stage, run.part, value)
        except RuntimeError as err:  # the threads were stopped meanwhile
            run.answers.set_exception(err)
            return
        future.add_done_callback(lambda done: self._stage_done(run, position, done))

    def _stage_done(self, run: _Run, position: int, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            run.answers.set_exception(error)
        else:
            self._advance(run, position + 1, done.result())

    def _run_stage(self, stage: str, index: int, value: Any) -> Any:
        self._part.index = index
        first_row.set(index * self.micro_batch_size)  # in the stage's own copy of the context
        try:
            return getattr(self.handler, stage)(value)
        finally:
            self._part.index = None
