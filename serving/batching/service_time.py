"""A running estimate of the service time, used to refuse requests that can't meet their deadline.

Under overload, a first-come, first-served queue with deadlines starts every request just before it expires,
and answers none in time. So a request whose answer would be late is refused on arrival, and one whose
deadline would pass in the executor is not begun.
"""

from __future__ import annotations

_MEMORY = 0.9  # of the running mean, per batch
_FORGET = 0.95  # per request dropped because of the estimate: an estimate that drops all requests must decay
_MARGIN = 1.25  # on the estimate: executor times vary, and sending the answer takes time


class ServiceTime:
    """Estimates the time of a batch in an executor. Not thread-safe: used on the event loop."""

    def __init__(self) -> None:
        self.mean_s = 0.0  # 0: no batch has run yet, so no request is dropped

    def observe(self, batch_s: float) -> None:
        """Record that an executor took `batch_s` seconds for a batch, not counting batches before it."""
        self.mean_s = _MEMORY * self.mean_s + (1 - _MEMORY) * batch_s if self.mean_s else batch_s

    def dropped(self) -> None:
        """Lower the estimate a little, because a request was dropped on account of it."""
        self.mean_s *= _FORGET

    def answer_s(self, batches_before: int, executors: int) -> float:
        """Return the estimated seconds until a request behind `batches_before` full batches is answered."""
        return (1 + batches_before // max(1, executors)) * self.mean_s * _MARGIN
