"""The only one that changes what a version is: brings it, step by step, to what is wanted of it.

One task per version carries out one step after the other, so the steps of a version never overlap, and a slow
load of one does not hold up another. Which step comes next is `policy.py`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchere.serving.errors import LoadFailed, Unavailable
from torchere.serving.registry.version import Step, Version, VersionState, VersionView, next_step

logger = logging.getLogger(__name__)


class Reconciler:
    """Wakes on a change of what is wanted. Lives on the event loop.

    `on_gone` is called when a version is gone, to forget it and to free what the store holds for it.
    """

    def __init__(self, drain_timeout_s: float, on_gone: Callable[[Version], Awaitable[None]]) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._on_gone = on_gone
        self._tasks: dict[Version, asyncio.Task[None]] = {}
        self._loads: dict[Version, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[bool]] = set()

    def hurry(self) -> None:
        """End what is in versions that leave, now and from now on: requests had their time at the ports."""
        self._drain_timeout_s = 0.0
        for drain in self._drains:
            drain.cancel()

    def wake(self, version: Version) -> None:
        """Something that is wanted of the version changed."""
        version.settled.clear()
        if version in self._loads and not (version.wanted and version.target):
            self._loads.pop(version).cancel()  # what loads now is not wanted any more
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
            while (step := next_step(_view(version))) is not None:
                await steps[step](version)
        except Exception:  # the top of a task: a bug here must be seen, and nobody may wait for ever
            logger.exception("the reconciler failed on %s in state %s", version.key, version.state.value)
        finally:
            del self._tasks[version]
            version.settled.set()

    async def _load(self, version: Version) -> None:
        version.enter(VersionState.LOADING)
        logger.info("loading %s with %d executors", version.key, version.target)
        given_up = not await self._bring_up(version)
        if version.failure is not None:
            await self._fail(version, version.failure)
            return
        if given_up:
            if not version.pool.in_service:  # nobody is there who could answer them
                version.batcher.fail_queued(Unavailable(version.batcher.refusal))
            await self._unload(version)
            return
        version.enter(VersionState.READY)
        version.batcher.pump()
        logger.info("%s is ready", version.key)

    async def _bring_up(self, version: Version) -> bool:
        """Have as many executors as wanted, loaded and warm; `failure` says what is in the way.

        False: it was given up, as none are wanted any more. What had begun to load is there still.
        """
        version.retry = False
        version.failure = None
        # Executors that start may be given up; those that are taken away have requests to finish.
        starts = version.target >= version.pool.size
        try:
            await self._until_unwanted(version, version.pool.resize(version.target), starts)
            if version.state is VersionState.LOADING:
                version.enter(VersionState.WARMING)
            await self._until_unwanted(version, version.pool.warm_up(), starts)
        except LoadFailed as err:
            version.failure = err
        except asyncio.CancelledError:
            if version.wanted:
                return False
            version.failure = LoadFailed(f"Model {version.key.name} was unregistered.", "It was loading.")
        except Exception as err:  # a bug: it must be seen, and the version must not load for ever
            logger.exception("loading %s failed unexpectedly", version.key)
            key = version.key
            version.failure = LoadFailed.of(key.name, key.version, f"internal error: {err!r}")
        if version.failure is not None:
            level = logging.ERROR if version.wanted else logging.INFO  # as far as nobody minds any more
            text = f"{version.failure.message.removesuffix('.')}: {version.failure.detail}"
            logger.log(level, "%s", text, extra={"model": version.key.name})
        return True

    async def _until_unwanted(self, version: Version, work: Awaitable[None], may_end: bool) -> None:
        task = asyncio.ensure_future(work)
        if may_end:
            self._loads[version] = task
        try:
            await task
        finally:
            self._loads.pop(version, None)

    async def _fail(self, version: Version, err: LoadFailed) -> None:
        if version.pool.in_service:  # executors serve from the first one on that is warm
            version.batcher.close_admission()
            version.batcher.pump()  # nobody told who waits that there is one
            await self._drained(version)
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
            version.target = version.pool.size  # or the next step would try the same again at once
        version.batcher.pump()

    async def _unload(self, version: Version) -> None:
        version.enter(VersionState.DRAINING)
        version.batcher.close_admission()
        if not await self._drained(version):
            logger.warning("%s still had requests when its time was over", version.key)
        version.enter(VersionState.UNLOADING)
        version.retry = False
        await version.pool.close()
        if version.wanted:
            if version.target == 0:  # nothing says that there will be executors again
                version.batcher.fail_queued(Unavailable(version.batcher.refusal))
            version.enter(VersionState.NEW)
            version.batcher.open_admission()
        else:
            await self._remove(version)

    async def _drained(self, version: Version) -> bool:
        drain = asyncio.ensure_future(version.batcher.drain(self._drain_timeout_s))
        self._drains.add(drain)
        try:
            return await drain
        except asyncio.CancelledError:
            if self._drain_timeout_s:  # not by `hurry`
                raise
            return False
        finally:
            self._drains.discard(drain)

    async def _remove(self, version: Version) -> None:
        version.batcher.close_admission()
        version.batcher.fail_queued(Unavailable(f"Model {version.key.name} was unregistered."))
        version.enter(VersionState.GONE)
        await self._on_gone(version)


def _view(version: Version) -> VersionView:
    return VersionView(version.state, version.wanted, version.target, version.pool.size, version.retry)
