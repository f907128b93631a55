"""The executors of one version: N lanes of one worker process, or N processes with one lane each.

A lost worker answers the batches that its lanes had begun with `ExecutorDied`, returns the others, records
the cause, and is restarted by the rule of `LossRow`; the other workers are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from torchere.serving.errors import LoadFailed
from torchere.serving.workers.devices import CoreShares, first_devices, new_places
from torchere.serving.workers.executor import ExecutorState, ExecutorStatus, Outage
from torchere.serving.workers.run import Run
from torchere.serving.workers.worker import Worker
from torchere.serving.workers.worker_settings import WorkerSettings


class WorkerPool:
    """The workers of one version. All methods run on the event loop; none blocks it.

    With `spec.shares_weights` the executors are lanes of one worker, otherwise each has its own worker.
    """

    def __init__(
        self, settings: WorkerSettings, next_id: Callable[[], int], cores: CoreShares | None = None
    ) -> None:
        self._cores = cores
        self._settings = settings
        if cores is not None and not settings.spec.is_group:  # ranks set their own threads
            self._settings = replace(settings, threads=lambda: cores.threads)
        self._spec = settings.spec
        self._next_id = next_id
        self._workers: list[Worker] = []
        self._leaving: dict[Worker, float] = {}  # surplus workers, and when they end at the latest, monotonic

    @property
    def has_own_process(self) -> bool:
        """Whether the next process is for this version alone."""
        return self._settings.launcher.has_own_process

    @property
    def size(self) -> int:
        """The number of executors in any state."""
        return sum(len(worker.executor_ids) for worker in self._workers)

    @property
    def in_service(self) -> int:
        """The number of executors that are loaded, warm and alive, busy or not."""
        count = 0
        for worker in self._workers:  # read for every request: a generator costs more than the loop
            count += worker.in_service
        return count

    def outage(self) -> Outage | None:
        """Return the current outage; None while an executor is in service, or loads for the first time."""
        outages = [worker.outage for worker in self._workers if worker.state is not ExecutorState.FAILED]
        down = [outage for outage in outages if outage is not None]
        if not down or len(down) < len(outages):
            return None
        return Outage(max(each.since_s for each in down), min(each.restart_s for each in down))

    @property
    def free(self) -> int:
        """The number of batches that may be submitted for idle executors."""
        free = 0
        for worker in self._workers:  # as in `in_service`
            free += worker.free
        return free

    @property
    def ahead(self) -> int:
        """The number of full batches that may be submitted, including those ahead of a free executor."""
        ahead = 0
        for worker in self._workers:
            ahead += worker.ahead
        return ahead

    @property
    def empty(self) -> int:
        """The number of runs that may be submitted to run alone in their process."""
        return sum(1 for worker in self._workers if worker.free and not worker.load)

    def idle_ids(self) -> tuple[int, ...]:
        """Return the executors in service that are idle; lanes of one process are interchangeable."""
        return tuple(
            executor_id for worker in self._workers for executor_id in worker.executor_ids[: worker.free]
        )

    def leaving_ids(self) -> tuple[int, ...]:
        """Return the idle executors that are about to end, but still take their own unfinished requests.

        They do so for one response time-out, because an answer may take any number of batches.
        """
        now_s = self._settings.now()
        able = (worker for worker, until_s in self._leaving.items() if worker.in_service and now_s < until_s)
        return tuple(worker.first_id for worker in able if not worker.load)

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """Return a snapshot of every executor, oldest first."""
        return tuple(status for worker in self._workers for status in worker.statuses())

    async def resize(self, count: int) -> None:
        """Start or stop executors until there are `count`; new ones are loaded, but not in service yet.

        A surplus executor finishes its batches first, and its unfinished requests (see `leaving_ids`). If
        this call is cancelled, the executor goes on with that until `close`.

        Raises:
            LoadFailed: an executor could not be loaded; running executors stay, and new ones that did load
                enter service, too.
        """
        has_loaded_before = bool(self._workers)
        await self._drop([worker for worker in self._workers if worker.state is ExecutorState.FAILED])
        if self._spec.shares_weights and count and self._workers:
            await self._resize_lanes(self._workers[0], count)
            return
        serving_first = sorted(self._workers, key=lambda worker: not worker.in_service)
        surplus = serving_first[count:]  # those not in service, and then the youngest
        self._workers = [worker for worker in self._workers if worker not in surplus]
        self._leaving |= dict.fromkeys(surplus, self._settings.now() + self._settings.response_timeout_s)
        retired = asyncio.gather(*(worker.retire() for worker in surplus))
        retired.add_done_callback(lambda _: [self._leaving.pop(worker, None) for worker in surplus])
        await asyncio.shield(retired)
        places = self._new_places(count - len(self._workers))
        if self._spec.shares_weights:
            fresh = [Worker(self._settings, places)] if places else []
        else:
            fresh = [Worker(self._settings, [place]) for place in places]
        self._workers += fresh
        self._count()
        try:
            await self._bring_up(fresh, [worker.start() for worker in fresh])
        except LoadFailed:
            if has_loaded_before:  # else the version fails, and its pool is closed
                with suppress(LoadFailed):  # the first failure is the cause
                    await self.warm_up()  # otherwise the others would keep their memory and never serve
            raise

    def _count(self) -> None:
        if self._cores is not None:
            self._cores.take(self, self.size * self._spec.ranks)

    async def _resize_lanes(self, worker: Worker, count: int) -> None:
        size = len(worker.executor_ids)
        if count < size:
            worker.remove(size - count)
        elif count > size:
            await worker.add(self._new_places(count - size))
        self._count()

    def _new_places(self, count: int) -> list[tuple[int, int | None]]:
        gpu_ids = first_devices(self._spec.gpu_ids, self._spec.devices)
        return list(new_places(count, self._next_id, gpu_ids, self.statuses()))

    async def warm_up(self) -> None:
        """Warm the new executors up and put them in service.

        Raises:
            LoadFailed: the warm-up of an executor fails.
        """
        fresh = [worker for worker in self._workers if worker.state is ExecutorState.STARTING]
        await self._bring_up(fresh, [worker.warm_up() for worker in fresh])
        for worker in self._workers:
            if any(status.state is ExecutorState.STARTING for status in worker.statuses()):
                await worker.warm_up_added()
        self._settings.on_free()

    async def _bring_up(self, workers: Sequence[Worker], steps: Sequence[Awaitable[None]]) -> None:
        """Run one step for each worker; drop the workers that fail, and raise the first error."""
        results = await asyncio.gather(*steps, return_exceptions=True)
        failed = [
            (worker, result)
            for worker, result in zip(workers, results, strict=True)
            if isinstance(result, BaseException)
        ]
        await self._drop([worker for worker, _ in failed])
        if failed:
            raise failed[0][1]

    async def _drop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker in self._workers:
                self._workers.remove(worker)
                self._count()
            await worker.close()

    def submit(self, run: Run) -> None:
        """Send a run to the executor it names, or to the least loaded worker.

        Raises:
            RuntimeError: no worker has room; the caller must check `free`, `ahead`, `empty` or
                `leaving_ids` first.
        """
        chosen: Worker | None = None
        for worker in self._workers:
            if run.executor_id is not None:
                fits = run.executor_id in worker.executor_ids and worker.free
            elif run.exclusive:
                fits = worker.free and not worker.load
            else:
                fits = worker.free or worker.ahead
            if fits and (chosen is None or worker.load < chosen.load):
                chosen = worker
        if chosen is None:
            chosen = next((worker for worker in self._leaving if run.executor_id == worker.first_id), None)
        if chosen is None:
            raise RuntimeError("submit() without room: the caller must look at `free` first")
        chosen.submit(run)

    async def close(self) -> None:
        """Answer the runs inside with `ExecutorDied` and stop the workers; `resize` may start others."""
        workers, self._workers = [*self._workers, *self._leaving], []
        self._leaving = {}
        self._count()
        await asyncio.gather(*(worker.close() for worker in workers))
