"""Splits the time of a prediction into stages, by the marks (times) in its request. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchere.serving.logs.trace_context import TraceContext

# In order of time. `handler` is the time of handlers that do not report their three stages separately.
STAGES = (
    *("receive", "decode", "queue", "batch_wait", "transfer"),
    *("preprocess", "inference", "postprocess", "handler", "encode", "send"),
)
# Times of a prediction in seconds: total time, waiting time for an executor, and the stages, which add up to
# the total.
COLUMNS = ("total", "wait", *STAGES)
# The numbers of one row for `rows_of`, in this order; `named` is 1.0 if the client named a version.
MARKS = (
    *("started", "read", "enqueued", "dequeued", "company", "preprocess", "inference", "postprocess"),
    *("handler", "answered", "sending", "now", "named"),
)


class Marks(Protocol):
    """The marks of one prediction: monotonic seconds; 0.0 for a point that was not reached."""

    started_s: float  # the request head arrived
    read_s: float  # the body was complete
    enqueued_s: float
    dequeued_s: float
    company_s: float  # the part of the waiting time in which an executor was free but the batch not full
    stages_s: tuple[float, float, float, float]  # preprocess, inference, postprocess, other handler time
    answered_s: float  # the handler answered, or sent the first part
    sending_s: float  # the first byte of the response was written
    named: bool  # the client named a version
    streamed: bool  # the answer was sent in parts
    trace: TraceContext | None


def row_of(request: Marks, now_s: float) -> tuple[float, ...]:
    """Return the values of `COLUMNS` for an answered prediction that ended at `now_s`."""
    started_s, answered_s = request.started_s, request.answered_s
    enqueued_s, dequeued_s = request.enqueued_s, request.dequeued_s
    read_s = request.read_s or started_s
    sending_s = request.sending_s or now_s
    preprocess, inference, postprocess, handler = request.stages_s
    transfer = answered_s - dequeued_s - preprocess - inference - postprocess - handler
    if transfer < 0:  # a stream started before its handler ended: the stages are unknown until then
        transfer, preprocess, inference, postprocess, handler = 0.0, 0.0, 0.0, 0.0, answered_s - dequeued_s
    wait = dequeued_s - enqueued_s
    return (
        now_s - started_s,
        wait,
        read_s - started_s,
        enqueued_s - read_s,
        wait - request.company_s,
        request.company_s,
        transfer,
        preprocess,
        inference,
        postprocess,
        handler,
        sending_s - answered_s,
        now_s - sending_s,
    )


def stages_of(request: Marks, now_s: float) -> tuple[float, ...]:
    """Return the durations of `STAGES` for a prediction that ended at `now_s`, answered or not.

    If it was not answered, the time from its last mark to the end counts for the stage in which it was.
    """
    if request.answered_s:
        return row_of(request, now_s)[-len(STAGES) :]
    read_s = request.read_s or request.started_s
    receive = read_s - request.started_s
    if not request.enqueued_s:
        return (receive, now_s - read_s, *(0.0,) * 9)
    decode = request.enqueued_s - read_s
    if not request.dequeued_s:
        return (receive, decode, now_s - request.enqueued_s, *(0.0,) * 8)
    queue = request.dequeued_s - request.enqueued_s - request.company_s
    handler_s = sum(request.stages_s)
    transfer = now_s - request.dequeued_s - handler_s
    told = (transfer, *request.stages_s)
    if not handler_s or transfer < 0:  # the stages are unknown: all of it counts as handler time
        told = (0.0, 0.0, 0.0, 0.0, now_s - request.dequeued_s)
    return (receive, decode, queue, request.company_s, *told, 0.0, 0.0)


def server_timing(request: Marks, now_s: float) -> str:
    """Return the value of a `Server-Timing` header: the stages so far in milliseconds, and their total."""
    stages = zip(STAGES, stages_of(request, now_s), strict=True)
    told = [(stage, duration_s) for stage, duration_s in stages if duration_s > 0]
    told.append(("total", now_s - request.started_s))
    return ", ".join(f"{stage};dur={duration_s * 1000:.3f}" for stage, duration_s in told)


def rows_of(marks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `row_of` for many predictions at once: maps rows of `MARKS` to rows of `COLUMNS`."""
    started, read, enqueued, dequeued, company, *_, answered, sending, now, _named = marks.T
    read = np.where(read == 0, started, read)
    sending = np.where(sending == 0, now, sending)
    told = marks[:, 5:9]
    transfer = answered - dequeued - told.sum(axis=1)
    streamed = transfer < 0
    rows = np.empty((len(marks), len(COLUMNS)))
    rows[:, 0] = now - started
    rows[:, 1] = dequeued - enqueued
    rows[:, 2] = read - started
    rows[:, 3] = enqueued - read
    rows[:, 4] = rows[:, 1] - company
    rows[:, 5] = company
    rows[:, 6] = transfer
    rows[:, 7:11] = told
    rows[:, 11] = sending - answered
    rows[:, 12] = now - sending
    if streamed.any():
        rows[streamed, 6:10] = 0.0
        rows[streamed, 10] = answered[streamed] - dequeued[streamed]
    return rows
