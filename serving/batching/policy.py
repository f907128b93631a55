"""When to dispatch, and how many: a pure function of what waits and what time it is.

Meaning of the settings: `serving/config/server_settings.py`. The delay counts from the oldest waiting
request on a steady clock, so a request never waits longer than `max_queue_delay_ms` for company, however
busy the executors were.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torchere.serving.config.server_settings import BatchSettings


class QueueView(NamedTuple):
    """What the policy may look at."""

    head_run: int  # requests at the head of the queue that may share a batch (see `Request.group`)
    head_closed: bool  # another group waits behind them: waiting longer can't make the batch larger
    oldest_enqueued_s: float
    free_executors: int


class Dispatch(NamedTuple):
    """Run the first `size` requests now."""

    size: int


class WaitUntil(NamedTuple):
    """Ask again at `at_s` (monotonic seconds), or when something changes."""

    at_s: float


class Idle(NamedTuple):
    """Nothing to do until something changes."""


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
