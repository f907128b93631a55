"""Moves each version step by step to its desired state; the only writer of a version's actual state.

Each version has one task, which runs one step at a time. So the steps of a version never overlap, and a slow
load of one version does not delay another. `next_step` in `version.py` chooses the next step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchere.serving.errors import CutOff, LoadFailed, Unavailable
from torchere.serving.logs.lines import AT_START
from torchere.serving.registry.version import Step, Version, VersionState, next_step

logger = logging.getLogger(__name__)


class Reconciler:
    """Runs the steps of all versions when their desired state changes. Used on the event loop.

    `on_gone` is called when a version is gone, to forget it and to free its files in the store.
    """

    def __init__(self, drain_timeout_s: float, on_gone: Callable[[Version], Awaitable[None]]) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._on_gone = on_gone
        self._tasks: dict[Version, asyncio.Task[None]] = {}
        self._loads: dict[Version, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[bool]] = set()

    def hurry(self) -> None:
        """Cancel running drains and skip later ones: the ports have already drained the requests."""
        self._drain_timeout_s = 0.0
        for drain in self._drains:
            drain.cancel()

    def under_way(self) -> list[Version]:
        """Return the versions that have not reached their desired state, unregistered ones included."""
        return list(self._tasks)

    def wake(self, version: Version) -> None:
        """Reconcile the version after a change of its desired state."""
        version.settled.clear()
        if version in self._loads and not (version.wanted and version.target):
            # Running loads are no longer wanted; executors that are to end finish their requests in a drain.
            self._loads.pop(version).cancel()
        if version not in self._tasks:
            self._tasks[version] = asyncio.ensure_future(self._run(version))

    async def _run(self, version: Version) -> None:
        steps = {
            Step.LOAD: self._load,
            Step.RESIZE: self._resize,
            Step.UNLOAD: self._unload,
            Step.REMOVE: self._remove,
        }
        try:
            if version.state is VersionState.READY and next_step(version) is None:
                version.failure = None  # an earlier request failed: enough executors run for this one
            while (step := next_step(version)) is not None:
                await steps[step](version)
        except Exception:  # top of a task: a bug must be logged, and `settled` must be set for its waiters
            logger.exception("the reconciler failed on %s in state %s", version.key, version.state.value)
        finally:
            del self._tasks[version]
            version.settled.set()

    async def _load(self, version: Version) -> None:
        version.enter(VersionState.LOADING)
        logger.info("loading %s; executors: %d", version.key, version.target, extra=AT_START)
        given_up = not await self._bring_up(version)
        if version.failure is not None:
            await self._fail(version, version.failure)
            return
        if given_up:
            if not version.pool.in_service:  # no executor could answer the queued requests
                version.batcher.fail_queued(Unavailable(version.batcher.refusal))
            await self._unload(version)
            return
        version.enter(VersionState.READY)
        version.batcher.pump()
        logger.info("%s is ready", version.key, extra=AT_START)

    async def _bring_up(self, version: Version) -> bool:
        """Load and warm up the target number of executors; an error is stored in `failure`.

        Return False when the load was cancelled because no executors are wanted any more; executors that had
        started remain.
        """
        version.retry = False
        version.failure = None
        try:
            await self._until_unwanted(version, version.pool.resize(version.target))
            if version.state is VersionState.LOADING:
                version.enter(VersionState.WARMING)
            await self._until_unwanted(version, version.pool.warm_up())
        except LoadFailed as err:
            version.failure = err
        except asyncio.CancelledError:
            if version.wanted:
                return False
            doing = "being scaled" if version.state is VersionState.READY else "loading"
            version.failure = LoadFailed(f"Model {version.key.name} was unregistered.", f"It was {doing}.")
        except Exception as err:  # a bug: it must be seen, and the version must not load for ever
            logger.exception("loading %s failed unexpectedly", version.key)
            key = version.key
            version.failure = LoadFailed.of(key.name, key.version, f"internal error: {err!r}")
        if version.failure is not None:
            level = logging.ERROR if version.wanted else logging.INFO  # INFO: the version is no longer wanted
            text = f"{version.failure.message.removesuffix('.')}: {version.failure.detail}"
            logger.log(level, "%s", text, extra={"model": version.key.name})
        return True

    async def _until_unwanted(self, version: Version, work: Awaitable[None]) -> None:
        self._loads[version] = task = asyncio.ensure_future(work)
        try:
            await task
        finally:
            self._loads.pop(version, None)

    async def _fail(self, version: Version, err: LoadFailed) -> None:
        if version.pool.in_service:  # requests are served as soon as one executor is warm
            version.batcher.close_admission()
            version.batcher.pump()  # the batcher does not know of the first executor yet
            await self._emptied(version)
            version.batcher.open_admission()  # for the next attempt
        await version.pool.close()
        version.batcher.fail_queued(Unavailable(err.message, err.detail))
        version.enter(VersionState.FAILED)

    async def _resize(self, version: Version) -> None:
        target = version.target
        if not await self._bring_up(version):
            await self._unload(version)
            return
        if version.failure is not None and version.target == target:
            if version.wanted and not version.pool.size:  # all executors had given up, and no new one loads
                await self._fail(version, version.failure)
                return
            version.target = version.pool.size  # otherwise the next step would at once retry this change
        elif version.target == version.pool.size:
            version.failure = None  # another call has replaced the request that failed, and is met
        version.batcher.pump()

    async def _unload(self, version: Version) -> None:
        version.enter(VersionState.DRAINING)
        version.batcher.close_admission()
        await self._emptied(version)
        version.enter(VersionState.UNLOADING)
        version.retry = False
        await version.pool.close()
        if version.wanted:
            if version.target == 0:  # no executors are expected again
                version.batcher.fail_queued(Unavailable(version.batcher.refusal))
            version.enter(VersionState.NEW)
            version.batcher.open_admission()
        else:
            await self._remove(version)

    async def _emptied(self, version: Version) -> None:
        """Wait until the version has no requests; those that remain at the time limit are refused."""
        if not await self._drained(version):
            logger.warning("%s still had requests when its time was over", version.key)
            # Answered here: the end of the workers would give 500, which tells clients not to try again.
            text = f"Model {version.key.name} was unloaded before the request was answered."
            version.batcher.fail_queued(Unavailable(text))  # these have not run: clients may send them again
            version.batcher.fail_all(CutOff(text))

    async def _drained(self, version: Version) -> bool:
        drain = asyncio.ensure_future(version.batcher.drain(self._drain_timeout_s))
        self._drains.add(drain)
        try:
            return await drain
        except asyncio.CancelledError:
            if self._drain_timeout_s:  # not cancelled by `hurry`
                raise
            return False
        finally:
            self._drains.discard(drain)

    async def _remove(self, version: Version) -> None:
        version.batcher.close_admission()
        version.batcher.fail_queued(Unavailable(f"Model {version.key.name} was unregistered."))
        version.enter(VersionState.GONE)
        await self._on_gone(version)
