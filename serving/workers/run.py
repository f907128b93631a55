"""One batch inside a worker: its requests, whom to tell, and how long its lane has been silent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchere.serving.errors import ServingError
from torchere.serving.types import InferResponse
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.lanes import LanePage


class Hold(Protocol):
    """Keeps a lane from sending further parts while a client has many to take; never for long."""

    def when_over(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the lane may send more."""


class RunOwner(Protocol):
    """Dispatches runs and takes them back. Called on the event loop only."""

    def run_part(self, run: Run, index: int, part: InferResponse) -> Hold | None:
        """Take one more part of the streamed answer of request `index`.

        Its body is the part; status and headers are those the handler has set so far, and count in the first
        part only.

        Returns:
            A hold, when the lane is to wait before it sends more.
        """

    def run_done(self, run: Run, report: BatchReport) -> None:
        """Take the report. Exactly one call of this or of `run_returned` ends a run, whatever happens."""

    def run_returned(self, run: Run) -> None:
        """Take back a run that no lane has begun: its requests may be submitted again."""


class Run:
    """A batch from its dispatch to its report. Lives on the event loop.

    Attributes:
        requests: what is asked, in the order of the outcomes; `InferRequest` or what `wire` makes one of.
        executor_id: the executor it is sent to; None: any.
        exclusive: no other run may be inside the same process, because one of its requests may crash it.
        dispatched_s: monotonic seconds when the batcher submitted it.
        shares_process: other versions have runs in the process that it was sent to.
    """

    __slots__ = (
        *("_holds", "_owner", "answered", "dispatched_s", "exclusive", "executor_id", "heard_s", "lane"),
        *("page", "place", "requests", "run_id", "shares_process"),
    )

    def __init__(
        self,
        requests: Sequence[Any],
        owner: RunOwner,
        dispatched_s: float = 0.0,
        executor_id: int | None = None,
        *,
        exclusive: bool = False,
    ) -> None:
        self.requests = requests
        self.executor_id = executor_id
        self.exclusive = exclusive
        self.dispatched_s = dispatched_s
        self.answered = False
        self.shares_process = False
        self.run_id = 0
        self.place = -1
        self.lane: Any = None  # that it is inside of
        self.page: LanePage | None = None  # of the worker that it is inside of
        self.heard_s = -math.inf  # monotonic, when its silence was last interrupted on this side
        self._owner = owner
        self._holds: list[Hold] = []

    @property
    def held(self) -> bool:
        """Whether its lane is kept from sending further parts."""
        return bool(self._holds)

    def cancel(self, index: int) -> None:
        """Have the worker leave request `index` out, or give the run up once no request of it is left."""
        if self.page is not None and not self.answered:
            self.page.cancel(self.place, index)

    def part(self, index: int, part: InferResponse) -> bool:
        """Pass a part of a streamed answer on; late parts are dropped. Returns whether it holds the lane."""
        if self.answered or not 0 <= index < len(self.requests):
            return False
        hold = self._owner.run_part(self, index, part)
        if hold is None or any(one is hold for one in self._holds):
            return False
        self._holds.append(hold)
        hold.when_over(lambda: self._let_go(hold))
        return True

    def _let_go(self, hold: Hold) -> None:
        self._holds = [one for one in self._holds if one is not hold]
        if not self._holds and self.page is not None and not self.answered:
            self.heard_s = time.monotonic()  # its lane was silent because it was held
            self.page.hold(self.place, held=False)

    def done(self, report: BatchReport) -> None:
        """Complete the run; without effect when it is complete."""
        if not self.answered:
            self.answered = True
            self._owner.run_done(self, report)

    def fail(self, error: ServingError) -> None:
        """Complete the run with one error for all its requests."""
        self.done(BatchReport([error] * len(self.requests)))

    def give_back(self) -> None:
        """Return the run, which no lane has begun, to its owner; without effect when it is complete."""
        if not self.answered:
            self.answered = True
            self._owner.run_returned(self)
