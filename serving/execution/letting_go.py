"""The handlers of a closed pool are freed, also those that hold themselves."""

from __future__ import annotations

import asyncio
import gc
import weakref

from torchere.serving.execution.host import HandlerHost

LET_GO_S = 1.0  # after the last thread told its end: by then it is over, unless the processors are very busy
TRIES = 3  # each later than the one before by four times as much


class LettingGo:
    """Watches the handlers of one pool. Lives on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hosts: weakref.WeakSet[HandlerHost] = weakref.WeakSet()  # those that are still in memory
        self._traces: list[weakref.ref[object]] = []  # of what is to be let go of

    def watch(self, host: HandlerHost) -> None:
        """One more handler of the pool."""
        self._hosts.add(host)

    def closed(self) -> None:
        """The pool needs none of them any more, but some may be in a call."""
        self._traces = [trace for host in self._hosts for trace in host.traces()]

    def none_in_a_call(self) -> None:
        """See to it that they are freed, if the pool is closed."""
        if self._traces:
            self._collect_later(self._traces, LET_GO_S, TRIES)
            self._traces = []

    def _collect_later(self, traces: list[weakref.ref[object]], after_s: float, tries: int) -> None:
        def collect() -> None:
            if _collected(traces) or tries == 1:
                return
            self._collect_later(traces, 4 * after_s, tries - 1)

        self._loop.call_later(after_s, collect)


def _collected(traces: list[weakref.ref[object]]) -> bool:
    """Free what holds itself by a circle of references, as handlers of archives may; whether all is gone.

    It was frozen, so no collector looks at it; and looking at all there is holds up the loop for a tenth of a
    second, so that is not done for what is gone.
    """
    if any(trace() is not None for trace in traces):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    return all(trace() is None for trace in traces)
