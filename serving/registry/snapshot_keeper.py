"""When a snapshot is written: after the start, after each change that settled, and at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torchere.serving.registry.routing import EMPTY, ServingMap
from torchere.serving.registry.snapshot import SnapshotKind, model_table, never_served, write_snapshot
from torchere.serving.registry.version import Version
from torchere.serving.settings import SnapshotModel, SnapshotSettings

logger = logging.getLogger(__name__)


class SnapshotKeeper:
    """Writes the snapshots of one registry, or none without settings.

    Lives on the event loop; files are written in a thread, one after the other, and changes that wait for
    the same turn share the next one: each holds all models. A snapshot that can't be written is a warning,
    never an error.

    `lacking` are those that this server was to serve from its start and could not register: the next start
    tries them again.
    """

    def __init__(
        self,
        settings: SnapshotSettings | None,
        served: Callable[[], ServingMap],
        lacking: Callable[[], Sequence[SnapshotModel]] = lambda: (),
    ) -> None:
        self._settings = settings
        self._served = served
        self._lacking = lacking
        self._started = False
        self._turn = asyncio.Lock()  # files in the order of the changes
        self._changes: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], Version] = {}  # those of them whose version has not settled
        self._noted: ServingMap = EMPTY  # as it was when a table was made last
        self._begun = 0  # snapshots, in their order
        self._newest = 0  # the last of them that is in the directory

    async def started(self) -> None:
        """The server serves: write the first one, and one for each change from now on."""
        self._started = True
        await self._write("startup")

    def changed(self, version: Version | None = None) -> None:
        """Something that is wanted changed: write a snapshot, once `version` settled."""
        if self._started and self._settings is not None:
            task = asyncio.ensure_future(self._after(version))
            self._changes.add(task)
            task.add_done_callback(self._changes.discard)
            if version is not None:
                self._waiting[task] = version
                task.add_done_callback(self._left_waiting)

    async def written(self) -> None:
        """Wait until each change that has settled is written down, so that it may be called done."""
        settled = [
            task
            for task in self._changes
            if task not in self._waiting or self._waiting[task].settled.is_set()
        ]
        if settled:
            await asyncio.wait(settled)

    async def stopping(self) -> None:
        """The server is about to unload everything: write the last one."""
        if not self._started:
            return
        self._started = False
        for task in self._waiting:
            task.cancel()  # the last snapshot holds the change, too; what is being written is left to end
        await asyncio.gather(*self._changes, return_exceptions=True)
        await self._write("shutdown")

    async def _after(self, version: Version | None) -> None:
        if version is not None:
            await version.settled.wait()
            self._left_waiting(asyncio.current_task())
            if not _holds(self._served(), version) and not _holds(self._noted, version):
                return  # it would not load and was taken back: nothing changed
        await self._write("snapshot")

    def _left_waiting(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._waiting.pop(task, None)

    def _content(self) -> dict[str, Any]:
        self._noted = self._served()
        lacking = self._lacking()
        missing = never_served(lacking)
        return {"models": model_table(self._noted, lacking), **({"missing": missing} if missing else {})}

    async def _write(self, kind: SnapshotKind) -> None:
        if self._settings is None:
            return
        begun = self._begun
        async with self._turn:
            if kind == "snapshot" and self._newest > begun:
                return  # one that was begun after this change holds it
            self._begun = number = self._begun + 1
            content = self._content()
            settings = self._settings
            try:
                await asyncio.to_thread(
                    write_snapshot, settings.directory, kind, settings.properties, content, settings.keep
                )
                self._newest = number
            except OSError as err:
                text = "no snapshot in %s: %s; the next start will not know this state (off: --ncs)"
                logger.warning(text, settings.directory, err)


def _holds(serving: ServingMap, version: Version) -> bool:
    model = serving.get(version.key.name)
    return model is not None and model.versions.get(version.key.version) is version
