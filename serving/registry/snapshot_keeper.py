"""When a snapshot is written: after the start, after each change that settled, and at the end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from torchere.serving.crash_journal import Journal
from torchere.serving.registry.routing import ServingMap
from torchere.serving.registry.snapshot import SnapshotKind, model_table, write_snapshot
from torchere.serving.registry.version import Version
from torchere.serving.settings import SnapshotSettings

logger = logging.getLogger(__name__)


class SnapshotKeeper:
    """Writes the snapshots of one registry, or none without settings.

    Lives on the event loop; files are written in a thread, one after the other. A snapshot that can't be
    written is a warning, never an error. A supervised server's models are in its journal, too.
    """

    def __init__(
        self,
        settings: SnapshotSettings | None,
        served: Callable[[], ServingMap],
        journal: Journal | None = None,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._served = served
        self._started = False
        self._turn = asyncio.Lock()  # files in the order of the changes
        self._changes: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[None]] = set()  # those of them whose version has not settled

    async def started(self) -> None:
        """The server serves: write the first one, and one for each change from now on."""
        self._started = True
        await self._write("startup")

    def changed(self, version: Version | None = None) -> None:
        """Something that is wanted changed: write a snapshot, once `version` settled."""
        if self._started and (self._settings is not None or self._journal is not None):
            task = asyncio.ensure_future(self._after(version))
            for tasks in (self._changes, self._waiting):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

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
            self._left_waiting()
            model = self._served().get(version.key.name)
            if model is None or model.versions.get(version.key.version) is not version:
                return  # it would not load and was taken back: nothing changed
        await self._write("snapshot")

    def _left_waiting(self) -> None:
        if (task := asyncio.current_task()) is not None:
            self._waiting.discard(task)

    async def _write(self, kind: SnapshotKind) -> None:
        if self._journal is not None and kind != "shutdown":
            self._journal.models = json.dumps({"models": model_table(self._served())})
        if self._settings is None:
            return
        async with self._turn:
            table = model_table(self._served())
            settings = self._settings
            try:
                await asyncio.to_thread(
                    write_snapshot, settings.directory, kind, settings.properties, table, settings.keep
                )
            except OSError as err:
                text = "no snapshot in %s: %s; the next start will not know this state (off: --ncs)"
                logger.warning(text, settings.directory, err)
