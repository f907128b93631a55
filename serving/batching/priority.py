"""The order of the waiting requests of one version, by priority and arrival time.

A request of priority p is ordered as if it had arrived p times `HEAD_START_S` earlier. So a more urgent
request overtakes others, but none waits for ever: a request is overtaken only by those that arrive within
their head start over it. Deadlines are unaffected: a late request is dropped at any priority.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchere.serving.batching.request import Request

LOWEST, HIGHEST = -9, 9  # 0 is the default
HEAD_START_S = 1.0


def rank_s(enqueued_s: float, priority: int) -> float:
    """Return the rank of a request in monotonic seconds; the lowest rank goes first."""
    return enqueued_s - priority * HEAD_START_S


def position(queue: Sequence[Request], request: Request) -> int:
    """Return the index at which to insert a request into an ordered queue, after those of equal rank."""
    rank = _rank(request)
    at = len(queue)
    while at and _rank(queue[at - 1]) > rank:
        at -= 1
    return at


def _rank(request: Request) -> float:
    return rank_s(request.enqueued_s, request.priority)
