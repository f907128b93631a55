"""One batch inside an executor: who waits for it, and how long the executor may stay silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from torchere.serving.errors import ServingError
from torchere.serving.execution.executor import BatchReport, BatchSink
from torchere.serving.types import InferRequest, InferResponse


class InFlight:
    """A submitted batch. Lives on the event loop; answered once, whoever comes first."""

    __slots__ = ("_timer", "answered", "overdue", "requests", "sink", "taker")

    def __init__(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.requests = requests
        self.sink = sink
        self.answered = False
        self.overdue = False  # it was answered because the executor did not come back
        self.taker: object = None  # the executor thread that runs it, once one does
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, timeout_s: float, on_silence: Callable[[InFlight], None]) -> None:
        """Call `on_silence` unless the batch is answered, or watched anew, within `timeout_s`."""
        self._stop_watching()
        if not self.answered:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, on_silence, self)

    def partial(self, index: int, part: InferResponse) -> None:
        """Pass a part of a streamed answer on; parts that come too late are dropped."""
        if not self.answered and 0 <= index < len(self.requests):
            self.sink.partial(index, part)

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
