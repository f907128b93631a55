"""N worker processes, one handler each: for archives that carry their own Python.

A worker that is lost answers the batch it was at with `ExecutorDied`, gives those it had not begun back,
keeps its cause, and comes back by the rule of `restart.py`; the others do not notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from torchere.serving.execution.devices import new_places
from torchere.serving.execution.executor import (
    BatchSink,
    ExecutorState,
    ExecutorStatus,
    FreeCallback,
    LoadedCallback,
    LoadSpec,
    LostCallback,
    those_that_stay,
)
from torchere.serving.execution.heartbeat import HeartbeatSettings
from torchere.serving.execution.inflight import InFlight
from torchere.serving.execution.launch import Launcher
from torchere.serving.execution.oom import OomWatch
from torchere.serving.execution.slot import Slot
from torchere.serving.execution.slot_settings import SlotSettings
from torchere.serving.types import InferRequest


class ProcessPool:
    """`ExecutorPool` of worker processes. Methods run on the event loop.

    `depth` is how many batches a worker may hold. With `sends_ahead` and a batch size of 1 the rule of
    `send_ahead.py` takes its place, unless the spec pins batches to executors.
    """

    def __init__(
        self,
        spec: LoadSpec,
        *,
        response_timeout_s: float,
        startup_timeout_s: float,
        max_retry_timeout_s: float,
        next_id: Callable[[], int],
        on_free: FreeCallback,
        on_loaded: LoadedCallback,
        launcher: Launcher,
        now: Callable[[], float] = time.monotonic,
        oom: OomWatch | None = None,
        heartbeat: HeartbeatSettings | None = None,
        on_lost: LostCallback = lambda reason: None,
        depth: int = 1,
        sends_ahead: bool = True,
    ) -> None:
        self._spec = spec
        self._next_id = next_id
        self._on_free = on_free
        self._slots: list[Slot] = []
        self._slot_settings = SlotSettings(
            spec=spec,
            response_timeout_s=response_timeout_s,
            startup_timeout_s=startup_timeout_s,
            max_retry_timeout_s=max_retry_timeout_s,
            launcher=launcher,
            on_free=on_free,
            on_loaded=on_loaded,
            now=now,
            oom=oom or OomWatch(),
            heartbeat=heartbeat or HeartbeatSettings(),
            on_lost=on_lost,
            depth=None if sends_ahead and not spec.pinned and spec.batch_size == 1 else depth,
        )

    @property
    def size(self) -> int:
        """How many executors there are to be."""
        return len(self._slots)

    @property
    def in_service(self) -> int:
        """How many executors are loaded, warm and alive."""
        count = 0
        for slot in self._slots:  # asked for with every request: a generator costs more than what it counts
            count += slot.in_service
        return count

    @property
    def load(self) -> int:
        """How many batches are inside."""
        return sum(slot.load for slot in self._slots)

    @property
    def free(self) -> int:
        """How many batches may be submitted now."""
        room = 0
        for slot in self._slots:  # no generator, as in `in_service`
            room += slot.room
        return room

    @property
    def ahead(self) -> int:
        """None: what a worker was sent can't go to a neighbour that comes free earlier."""
        return 0

    @property
    def on_loop(self) -> bool:
        """Never: workers run beside us."""
        return False

    def portion(self, waiting: int) -> int:
        """All of them: workers run beside the loop, so there is nothing to split for."""
        return waiting

    def idle_ids(self) -> tuple[int, ...]:
        """The executors that are in service and have nothing to do."""
        return tuple(slot.status.executor_id for slot in self._slots if slot.room and not slot.load)

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """A snapshot of every executor, oldest first."""
        return tuple(slot.status for slot in self._slots)

    async def resize(self, count: int) -> None:
        """Start or stop workers; see `ExecutorPool`. A surplus worker finishes its batches first."""
        await self._drop([slot for slot in self._slots if slot.status.state is ExecutorState.FAILED])
        staying = those_that_stay(self._slots, count, [slot.in_service for slot in self._slots])
        surplus = [slot for slot in self._slots if slot not in staying]
        self._slots = staying
        await asyncio.gather(*(slot.retire() for slot in surplus))
        new = count - len(self._slots)
        places = new_places(new, self._next_id, self._spec.gpu_ids, self.statuses())
        fresh = [Slot(self._slot_settings, *place) for place in places]
        self._slots += fresh
        await self._bring_up(fresh, [slot.start() for slot in fresh])

    async def warm_up(self) -> None:
        """Warm up what was loaded and put it in service."""
        fresh = [slot for slot in self._slots if slot.status.state is ExecutorState.STARTING]
        await self._bring_up(fresh, [slot.warm_up() for slot in fresh])
        self._on_free()

    async def _bring_up(self, slots: Sequence[Slot], steps: Sequence[Awaitable[None]]) -> None:
        """Take one step with each slot; those that fail at it are dropped, and the first error raised."""
        results = await asyncio.gather(*steps, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        await self._drop(
            [slot for slot, result in zip(slots, results, strict=True) if isinstance(result, BaseException)]
        )
        if failures:
            raise failures[0]

    async def _drop(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot in self._slots:
                self._slots.remove(slot)
            await slot.close()

    def submit(
        self,
        requests: Sequence[InferRequest],
        sink: BatchSink,
        executor_id: int | None = None,
        *,
        behind: int = 0,
    ) -> None:
        """Run one batch on the executor named, or on the one with the least to do."""
        chosen: Slot | None = None
        for slot in self._slots:
            named = executor_id is None or slot.status.executor_id == executor_id
            if named and slot.room and (chosen is None or slot.load < chosen.load):
                chosen = slot
        if chosen is None:
            raise RuntimeError("submit() without a free executor: the caller must look at `free` first")
        chosen.submit(InFlight(requests, sink))

    async def close(self) -> None:
        """Answer what is inside and stop the workers."""
        slots, self._slots = self._slots, []
        await asyncio.gather(*(slot.close() for slot in slots))
