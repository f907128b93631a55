"""Who goes first among the requests that wait for one version.

A request of priority p stands where it would stand had it come p times `HEAD_START_S` earlier. So a more
urgent one overtakes, and no one waits for ever: a request is overtaken only by those that come within the
head start they have over it. Deadlines are unaffected: what is late is dropped, whatever its priority.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchere.serving.batching.request import Request

LOWEST, HIGHEST = -9, 9  # 0 is what a request has that says nothing
HEAD_START_S = 1.0


def rank_s(enqueued_s: float, priority: int) -> float:
    """Where a request stands: the smaller goes first. Monotonic seconds."""
    return enqueued_s - priority * HEAD_START_S


def position(queue: Sequence[Request], request: Request) -> int:
    """How many of a queue in this order go before a request: after its equals."""
    rank = _rank(request)
    at = len(queue)
    while at and _rank(queue[at - 1]) > rank:
        at -= 1
    return at


def _rank(request: Request) -> float:
    return rank_s(request.enqueued_s, request.priority)
