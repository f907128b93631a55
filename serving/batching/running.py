"""A dispatched batch: the sink an executor fills, and whose batch it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchere.serving.batching.pending import Pending
from torchere.serving.batching.unread_parts import UnreadParts
from torchere.serving.execution.executor import BatchReport
from torchere.serving.types import InferResponse


class BatchOwner(Protocol):
    """Who dispatched a batch, and takes it back. Called on the event loop."""

    def batch_done(self, batch: RunningBatch, report: BatchReport) -> None:
        """The executor is through with it."""

    def batch_returned(self, batch: RunningBatch) -> None:
        """No executor began with it."""

    def unread_parts(self, pending: Pending) -> UnreadParts:
        """Where the parts of a streamed answer wait for its client."""


class RunningBatch:
    """`BatchSink` of one dispatched batch; `executor_id` is None when any executor may have it."""

    __slots__ = ("_owner", "ahead", "begun_s", "dispatched_s", "executor_id", "pendings", "rounds")

    def __init__(
        self,
        owner: BatchOwner,
        pendings: list[Pending],
        dispatched_s: float,
        executor_id: int | None = None,
        rounds: int = 1,
        *,
        ahead: bool = False,
    ) -> None:
        self._owner = owner
        self.pendings = pendings
        self.dispatched_s = dispatched_s
        self.executor_id = executor_id
        self.ahead = ahead  # it was submitted while no executor was free
        self.begun_s = 0.0  # monotonic, when an executor thread began with it; 0: not yet, or not known
        self.rounds = rounds  # how many batches, this one the last, its executor has before it is done

    def begun(self, now_s: float) -> Sequence[int]:
        """See `BatchSink.begun`."""
        self.begun_s = now_s
        return [place for place, pending in enumerate(self.pendings) if not pending.open]

    def partial(self, index: int, part: InferResponse) -> UnreadParts | None:
        """Hand on a part of a streamed answer; one for a request that is not in the batch is dropped."""
        if not 0 <= index < len(self.pendings):
            return None
        return self.pendings[index].add_part(part, self._owner.unread_parts)

    def done(self, report: BatchReport) -> None:
        """Tell the owner; what lay ahead waited until it was begun, if in another place."""
        if self.ahead and self.begun_s:
            self.dispatched_s, self.rounds = self.begun_s, 1
            for pending in self.pendings:
                pending.dequeued_s = self.begun_s
        self._owner.batch_done(self, report)

    def returned(self) -> None:
        """Tell the owner."""
        self._owner.batch_returned(self)
