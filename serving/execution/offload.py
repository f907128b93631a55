"""A worker process beside the event loop, for tiny models that are asked for more than one core can answer.

A batch that runs on the loop (`inline.py`) keeps a whole core busy with what holds the GIL, so threads would
not help, and the other cores are idle. While batches pile up, they run in a process, which has a GIL of its
own. It pays from two full batches at a time on; with less, both would wait for one another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from torchere.serving.errors import LoadFailed
from torchere.serving.execution.inflight import InFlight
from torchere.serving.execution.processes import ProcessPool

logger = logging.getLogger(__name__)

ROOM = 4  # batches of many requests inside the worker at most; with 2 it waits for the loop, 8 gain nothing
CROWDED_S = 0.3  # how long batches pile up before a worker is started: they do for a moment with any burst
PAUSE_S = 0.1  # without a pile, and it counts from the beginning
UNUSED_S = 60.0  # after this long without a pile the worker ends


def depth(batch_size: int) -> int | None:
    """How many batches may be inside a worker; None: as many as `send_ahead.py` says."""
    return ROOM if batch_size > 1 else None


class Offload:
    """The worker of one version, there while it is needed. Lives on the event loop.

    Args:
        name: of the version, for the log.
        make_pool: a pool whose workers take `depth(batch_size)` batches; called once, when it is needed.
    """

    def __init__(self, name: str, make_pool: Callable[[], ProcessPool]) -> None:
        self._name = name
        self._make_pool = make_pool
        self._pool: ProcessPool | None = None
        self._loop = asyncio.get_running_loop()
        self._piling_since_s = 0.0
        self._piled_s = 0.0  # when batches piled up last
        self._not_before_s = 0.0  # a worker is started
        self._wanted = False
        self._change: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def room(self) -> int:
        """How many batches it takes now."""
        return self._pool.free if self._wanted and self._pool is not None else 0

    @property
    def busy(self) -> bool:
        """Whether it has a batch."""
        return self._pool is not None and self._pool.load > 0

    def wants(self, size: int, behind: int) -> bool:
        """Whether a batch of `size` requests, behind which so many wait, is better off there."""
        if behind < size and not self.busy:
            return False
        now_s = self._loop.time()
        if now_s - self._piled_s > PAUSE_S:
            self._piling_since_s = now_s
        self._piled_s = now_s
        begins_s = max(self._piling_since_s + CROWDED_S, self._not_before_s)
        if not self._wanted and self._change is None and now_s >= begins_s:
            self._begin(self._start())
        return self.room > 0

    def submit(self, batch: InFlight) -> None:
        """Run one batch there; it has to have room."""
        if self._pool is None:
            raise RuntimeError("submit() without a worker: the caller must look at `wants` first")
        self._pool.submit(batch.requests, batch.sink)

    async def close(self) -> None:
        """Stop the worker at once; batches inside are answered with `ExecutorDied`."""
        self._wanted = False
        if self._timer is not None:
            self._timer.cancel()
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)
        if self._pool is not None:
            await self._pool.close()

    def _begin(self, change: Coroutine[None, None, None]) -> None:
        self._change = asyncio.ensure_future(change)
        self._change.add_done_callback(self._changed)

    def _changed(self, change: asyncio.Task[None]) -> None:
        self._change = None

    async def _start(self) -> None:
        if self._pool is None:
            self._pool = self._make_pool()
        try:
            await self._pool.resize(1)
            await self._pool.warm_up()
        except LoadFailed as err:
            logger.warning("%s: no worker process helps the event loop: %s", self._name, err.detail)
            self._not_before_s = self._loop.time() + UNUSED_S
            return
        logger.info("%s is asked for more than the event loop can run: a worker process helps", self._name)
        self._wanted = True
        self._look_later()

    async def _stop(self, pool: ProcessPool) -> None:
        logger.info("%s: its worker process is not needed any more", self._name)
        await pool.resize(0)

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(UNUSED_S, self._look)

    def _look(self) -> None:
        if self._loop.time() - self._piled_s < UNUSED_S or self._pool is None:
            self._look_later()
        else:
            self._wanted = False
            self._begin(self._stop(self._pool))
