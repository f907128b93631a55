"""A worker process beside the event loop, for tiny models that are asked for more than one core can answer.

A batch that runs on the loop (`inline.py`) holds the GIL nearly all the time, so threads would leave all
cores but one idle. While batches pile up, a process, which has a GIL of its own, takes some of them. That
helps only when two are under way: while the process runs one, the loop takes in and answers the requests of
the other. So what fits into one batch, and is enough for two, is split. With less, each would only wait for
the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from torchere.serving.errors import LoadFailed
from torchere.serving.execution.demand import Demand
from torchere.serving.execution.executor import BatchSink, ExecutorState
from torchere.serving.execution.processes import ProcessPool
from torchere.serving.types import InferRequest

logger = logging.getLogger(__name__)

ROOM = 4  # batches of many requests inside the worker at most; 2, 3 and 8 were not clearly better
WORTH_TWO = 16  # requests that are better split; splitting from 8 on cost 8 clients a tenth of their rate
UNUSED_S = 60.0  # with little to do for this long the worker ends; also the wait after a start that failed


class Offload:
    """The worker of one version, there while it is needed. Lives on the event loop.

    Args:
        name: What the log calls the version.
        pool: Empty; its one worker, started when it is needed, may hold `ROOM` batches.
    """

    def __init__(self, name: str, pool: ProcessPool) -> None:
        self._name = name
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._demand = Demand()
        self._not_before_s = 0.0  # the next attempt to start it
        self._wanted = False
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def room(self) -> int:
        """How many batches it takes now."""
        return self._pool.free if self._wanted else 0

    @property
    def busy(self) -> bool:
        """Whether it has a batch."""
        return self._pool.load > 0

    def portion(self, waiting: int) -> int:
        """As `ExecutorPool.portion`: half of what is enough for two, when the process has nothing to do."""
        return waiting // 2 if self._wanted and waiting >= WORTH_TWO and not self.busy else waiting

    def wants(self, size: int, behind: int, work_s: float) -> bool:
        """Whether a batch of `size` requests, with `behind` more waiting, is better run in the worker.

        Counts it as demand, which may start the worker; `work_s` is what the batch would take on the loop.
        """
        now_s, is_piled = self._loop.time(), behind >= size or size >= WORTH_TWO
        if self._demand.add(now_s, work_s, is_piled=is_piled) and now_s >= self._not_before_s:
            self._start()
        return self._wanted and (is_piled or self.busy) and self.room > 0

    def submit(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Run one batch there; it has to have room."""
        self._pool.submit(requests, sink)

    async def close(self) -> None:
        """Stop the worker at once; batches inside are answered with `ExecutorDied`."""
        self._wanted = False
        if self._timer is not None:
            self._timer.cancel()
        if self._starting is not None:
            self._starting.cancel()
        await asyncio.gather(*filter(None, (self._starting, self._stopping)), return_exceptions=True)
        await self._pool.close()

    def _start(self) -> None:
        if self._wanted or self._is_running(self._starting) or self._is_running(self._stopping):
            return
        self._not_before_s = self._loop.time() + UNUSED_S  # if it fails
        self._starting = asyncio.ensure_future(self._bring_up())

    async def _bring_up(self) -> None:
        try:
            await self._pool.resize(1)
            await self._pool.warm_up()
        except LoadFailed as err:
            logger.warning("%s: no worker process helps the event loop: %s", self._name, err.detail)
        except Exception:  # nobody awaits this task; all goes on without the worker
            logger.exception("%s: no worker process helps the event loop", self._name)
        else:
            logger.info(
                "%s is asked for more than the event loop can run: a worker process helps", self._name
            )
            self._wanted = True
            self._look_later()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(UNUSED_S, self._look)

    def _look(self) -> None:
        """End a worker that is not needed any more, or that is dead for good."""
        has_failed = any(status.state is ExecutorState.FAILED for status in self._pool.statuses())
        is_idle = self._demand.low_for_s(self._loop.time()) >= UNUSED_S and not self.busy
        if not (has_failed or is_idle):
            self._look_later()
            return
        self._wanted = False
        self._not_before_s = self._loop.time() + (UNUSED_S if has_failed else 0.0)
        logger.info("%s: its worker process is not needed any more", self._name)
        self._stopping = asyncio.ensure_future(self._pool.close())

    @staticmethod
    def _is_running(task: asyncio.Task[None] | None) -> bool:
        return task is not None and not task.done()
