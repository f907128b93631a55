"""One batch inside an executor: who waits for it, and how long the executor may stay silent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from torchere.serving.errors import ServingError
from torchere.serving.execution.executor import BatchReport, BatchSink, Hold
from torchere.serving.silence import was_late
from torchere.serving.types import InferRequest, InferResponse


class InFlight:
    """A submitted batch. Lives on the event loop; answered once, whoever comes first."""

    __slots__ = (
        "_holds",
        "_timer",
        "_watch",
        "_when_free",
        "answered",
        "gone",
        "overdue",
        "requests",
        "sink",
        "taken_s",
        "taker",
    )

    def __init__(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.requests = requests
        self.sink = sink
        self.answered = False
        self.gone: Sequence[int] = ()  # places of the requests that nobody waited for when it was begun
        self.overdue = False  # it was answered because the executor did not come back
        self.taker: object = None  # the executor thread that runs it, once one does
        self.taken_s = math.inf  # monotonic, when it took it
        self._timer: asyncio.TimerHandle | None = None
        self._holds: tuple[Hold, ...] = ()
        self._when_free: tuple[Callable[[], None], ...] = ()
        self._watch: Callable[[], None] | None = None  # goes on when it is not held any more

    def take(self, taker: object) -> bool:
        """An executor thread begins with it, and tells in its own thread; False: nobody wants it any more."""
        self.taker, self.taken_s = taker, time.monotonic()
        if self.answered:
            return False
        self.gone = self.sink.begun(self.taken_s)
        return len(self.gone) < len(self.requests)

    @property
    def held(self) -> bool:
        """Whether its executor is to make no more parts for now."""
        return bool(self._holds)

    def when_free(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it is not held (any more)."""
        if self._holds:
            self._when_free += (go_on,)
        else:
            go_on()

    def _let_go(self, hold: Hold) -> None:
        self._holds = tuple(one for one in self._holds if one is not hold)
        if self._holds:
            return
        watch, self._watch = self._watch, None
        if watch is not None:
            watch()
        waiting, self._when_free = self._when_free, ()
        for go_on in waiting:
            go_on()

    def watch(self, timeout_s: float, on_silence: Callable[[InFlight], None]) -> None:
        """Call `on_silence` unless the batch is answered, or watched anew, within `timeout_s`.

        While it is held, which has nothing to do with the executor's silence, the time does not run; where
        the loop stood still at its end, it begins anew, once.
        """
        self._stop_watching()
        if self._holds:
            self._watch = lambda: self.watch(timeout_s, on_silence)
        elif not self.answered:
            due_s = time.monotonic() + timeout_s
            self._timer = asyncio.get_running_loop().call_later(
                timeout_s, self._look, due_s, timeout_s, on_silence
            )

    def _look(self, due_s: float, timeout_s: float, on_silence: Callable[[InFlight], None]) -> None:
        if was_late(due_s):
            self._timer = asyncio.get_running_loop().call_later(timeout_s, on_silence, self)
        else:
            on_silence(self)

    def partial(self, index: int, part: InferResponse) -> None:
        """Pass a part of a streamed answer on; parts that come too late are dropped."""
        if not self.answered and 0 <= index < len(self.requests):
            hold = self.sink.partial(index, part)
            if hold is not None and hold not in self._holds:
                self._holds += (hold,)
                hold.when_over(lambda: self._let_go(hold))

    def answer(self, report: BatchReport) -> None:
        """Complete the batch; a no-op when it is answered already."""
        self._stop_watching()
        if not self.answered:
            self.answered = True
            self.sink.done(report)

    def fail(self, error: ServingError) -> None:
        """Complete the batch with one error for all its requests."""
        self.answer(BatchReport([error] * len(self.requests)))

    def give_back(self) -> None:
        """The executor never began with it: let its owner submit it again."""
        self._stop_watching()
        if not self.answered:
            self.answered = True
            self.sink.returned()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
