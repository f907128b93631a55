"""Sees to it that what nobody needs any more is freed, also from circles of references.

Those are the handlers of a closed pool, and what was garbage, or has become it, when models were frozen.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref

import torch

from torchere.serving.execution.host import HandlerHost

LET_GO_S = 1.0  # after the last thread said that it ends: by then it has, unless the processors are very busy
TRIES = 3  # the wait before each is four times the one before
WALK_EVERY = 32  # freezes; a version that is gone leaves some 30 kB in circles

_freezes = itertools.count(1)  # of this process, as the collector is


def freeze() -> None:
    """Spare the collector what is loaded and stays: a walk over it holds up the loop for a tenth of a second.

    Garbage goes first, or it would stay as well, with all that handlers left in circles. What was in use when
    it was frozen, and is garbage since, goes with every `WALK_EVERY`th call, which walks over everything. On
    the event loop.
    """
    if gc.isenabled():  # else the server is starting: much to walk over, and nothing was served yet
        if next(_freezes) % WALK_EVERY == 0:
            gc.unfreeze()
        gc.collect()
    gc.freeze()


class LettingGo:
    """Watches the handlers of one pool. Lives on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hosts: weakref.WeakSet[HandlerHost] = weakref.WeakSet()  # those that are still in memory
        self._traces: list[weakref.ref[object]] = []  # to what should be freed; [] until the pool is closed

    def watch(self, host: HandlerHost) -> None:
        """One more handler of the pool."""
        self._hosts.add(host)

    def closed(self) -> None:
        """The pool needs its handlers no more; some may still be in a call."""
        self._traces = [trace for host in self._hosts for trace in host.traces()]

    def none_in_a_call(self) -> None:
        """No thread is in a handler any more: if the pool is closed, free its handlers, soon."""
        if self._traces:
            self._collect_later(self._traces, LET_GO_S, TRIES)
            self._traces = []

    def _collect_later(self, traces: list[weakref.ref[object]], after_s: float, tries: int) -> None:
        def collect() -> None:
            if _collected(traces):
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    self._loop.run_in_executor(None, torch.cuda.empty_cache)  # other processes want it
            elif tries > 1:
                self._collect_later(traces, 4 * after_s, tries - 1)

        self._loop.call_later(after_s, collect)


def _collected(traces: list[weakref.ref[object]]) -> bool:
    """Free what is left in a circle of references, as handlers of archives may be; whether all is gone.

    What was loaded is frozen, so the collector does not look at it by itself. To have it look at everything
    holds the loop up for a tenth of a second, so that is done only when something is left.
    """
    if any(trace() is not None for trace in traces):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    return all(trace() is None for trace in traces)
