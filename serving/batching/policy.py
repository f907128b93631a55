"""The dispatch policy: when to run a batch and how large, as a pure function of queue and time.

The settings are described in `serving/config/server_settings.py`. The delay counts from the oldest waiting
request on a monotonic clock, so a request never waits longer than `max_queue_delay_ms` for its batch to fill,
however busy the executors were.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torchere.serving.config.server_settings import BatchSettings


class QueueView(NamedTuple):
    """The input of the policy: a summary of the queue and the free executors."""

    head_run: int  # requests at the head of the queue that may share a batch (see `Request.group`)
    head_closed: bool  # another group waits behind them, so the batch can't grow
    oldest_enqueued_s: float
    free_executors: int


class Dispatch(NamedTuple):
    """Run the first `size` requests now."""

    size: int


class WaitUntil(NamedTuple):
    """Call `plan` again at `at_s` (monotonic seconds), or when the queue or the executors change."""

    at_s: float


class Idle(NamedTuple):
    """Do nothing until the queue or the executors change."""


Action: TypeAlias = Dispatch | WaitUntil | Idle


def plan(view: QueueView, settings: BatchSettings, now_s: float) -> Action:
    """Decide the next step of a batcher."""
    if view.head_run == 0 or view.free_executors == 0:
        return Idle()
    full = view.head_run >= settings.max_batch_size
    if full or view.head_closed or settings.dispatch == "eager":
        return Dispatch(min(view.head_run, settings.max_batch_size))
    due_s = view.oldest_enqueued_s + settings.max_queue_delay_ms / 1000
    return Dispatch(view.head_run) if now_s >= due_s else WaitUntil(due_s)
