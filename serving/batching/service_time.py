"""How long a request would take from here: a running estimate, and what follows from it.

Under overload, first come first served with a deadline starts every request just before it expires, and
answers none in time. So a request whose answer would come too late is refused at the door, and one that would
be overtaken by its deadline in the executor is not begun.
"""

from __future__ import annotations

_MEMORY = 0.9  # of the running mean, per batch
_FORGET = 0.95  # per request dropped because of the estimate: one that lets nobody run must not last
_MARGIN = 1.25  # of the estimate: executors take different times, and the answer has a way to go


class ServiceTime:
    """Estimates how long executors take for a batch. Not thread-safe: the event loop asks and tells."""

    def __init__(self) -> None:
        self.mean_s = 0.0  # 0: nothing has run yet, everything is worth a try

    def observe(self, batch_s: float) -> None:
        """An executor took `batch_s` for a batch, the time that others were in front of it left out."""
        self.mean_s = _MEMORY * self.mean_s + (1 - _MEMORY) * batch_s if self.mean_s else batch_s

    def dropped(self) -> None:
        """A request was not run because of the estimate: trust it a little less."""
        self.mean_s *= _FORGET

    def answer_s(self, batches_before: int, executors: int) -> float:
        """How long until the answer of a request that `batches_before` full batches are in front of."""
        return (1 + batches_before // max(1, executors)) * self.mean_s * _MARGIN
