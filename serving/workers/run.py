"""One batch inside a worker: its requests, its owner, and the silence of its lane."""

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
    """A pause of bounded time for the lane of a streamed response whose client has many unread parts."""

    def when_over(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the lane may send more."""


class RunOwner(Protocol):
    """Dispatches runs and takes them back. Called on the event loop only."""

    def run_part(self, run: Run, index: int, part: InferResponse) -> Hold | None:
        """Take one more part of the streamed answer of request `index`.

        The body of `part` is the part; its status and headers are those that the handler has set so far, and
        are used from the first part only.

        Returns:
            A hold, if the lane must wait before it sends more.
        """

    def run_done(self, run: Run, report: BatchReport) -> None:
        """Take the report. Every run ends with exactly one call of this or of `run_returned`."""

    def run_returned(self, run: Run) -> None:
        """Take back a run that no lane has begun: its requests may be submitted again."""


class Run:
    """A batch from its dispatch to its report. Lives on the event loop.

    Attributes:
        requests: the requests, in the order of the outcomes; they have the attributes of `InferRequest`.
        executor_id: the executor it must run on; None: any.
        exclusive: no other run may be inside the same process, because one of its requests may crash it.
        dispatched_s: monotonic seconds when the batcher submitted it.
        shares_process: other versions may have runs in its process.
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
        self.lane: Any = None  # the lane that it was sent to
        self.page: LanePage | None = None  # the page of its worker
        self.heard_s = -math.inf  # monotonic, when the server last restarted the silence timer
        self._owner = owner
        self._holds: list[Hold] = []

    @property
    def held(self) -> bool:
        """Whether its lane is paused."""
        return bool(self._holds)

    def cancel(self, index: int) -> None:
        """Cancel request `index`: the worker skips it, or stops the run once all requests are cancelled."""
        if self.page is not None and not self.answered:
            self.page.cancel(self.place, index)

    def part(self, index: int, part: InferResponse) -> bool:
        """Forward one part of a streamed response; return whether the executor must pause.

        A part that arrives too late is dropped.
        """
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
        """Complete the run; without effect if it is complete."""
        if not self.answered:
            self.answered = True
            self._owner.run_done(self, report)

    def fail(self, error: ServingError) -> None:
        """Complete the run with one error for all its requests."""
        self.done(BatchReport([error] * len(self.requests)))

    def give_back(self) -> None:
        """Return the run, which no lane has begun, to its owner; without effect if it is complete."""
        if not self.answered:
            self.answered = True
            self._owner.run_returned(self)
