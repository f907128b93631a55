"""The dispatch policy: when a batch is due, as a pure function of the queue.

The settings are described in `serving/config/server_settings.py`. The delay counts from the oldest waiting
request on a monotonic clock, so a request never waits longer than `max_queue_delay_ms` for its batch to fill,
however busy the executors were.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torchere.serving.config.server_settings import BatchSettings

NOT_DUE = math.inf  # not before the queue or the executors change


class QueueView(NamedTuple):
    """The input of the policy: a summary of the queue and the free executors."""

    head_run: int  # requests at the head of the queue that may share a batch, at most `max_batch_size`
    head_closed: bool  # another group waits behind them, so the batch can't grow
    oldest_enqueued_s: float
    free_executors: int


def due_s(view: QueueView, settings: BatchSettings) -> float:
    """Return the time from which the requests at the head may run as a batch, monotonic, or `NOT_DUE`."""
    if view.head_run == 0 or view.free_executors == 0:
        return NOT_DUE
    if view.head_run >= settings.max_batch_size or view.head_closed or settings.dispatch == "eager":
        return view.oldest_enqueued_s
    return view.oldest_enqueued_s + settings.max_queue_delay_ms / 1000
