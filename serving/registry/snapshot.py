"""Snapshots: the served models, written to a file after each change and restored by the next start.

The files are TorchServe's: `<log location>/config/<time>-{startup,snapshot,shutdown}.cfg`, Java properties
with the models as JSON under `model_snapshot`. torchere and TorchServe can each restore snapshots that the
other wrote.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from torchere.serving.config.server_settings import OURS, SnapshotModel, SnapshotSettings
from torchere.serving.registry.serving_map import EMPTY, ServingMap
from torchere.serving.registry.version import Version
from torchere.serving.store.scratch import sweep_parts

SnapshotKind = Literal["startup", "snapshot", "shutdown"]

FIRST_LINE = "#Snapshot of torchere"  # tells our files from TorchServe's, which are never deleted
NAME = re.compile(
    r"(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)(\d{3})-(?:startup|snapshot|shutdown)\.cfg", re.ASCII
)
_LOOKED_AT = 1000  # newest files checked by a prune: TorchServe's files, which it never deletes, may be many
_DRAFT_PREFIX = ".snapshot-"
_DRAFT_IDLE_S = 60.0  # a write takes less: an older draft is from a killed server
_LAST_BUT_ONE = datetime.max - timedelta(milliseconds=1)
_TO_ESCAPE = re.compile(r"[^ -~]|\\")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}


def model_table(
    serving: ServingMap, lacking: Iterable[SnapshotModel] = ()
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the settings that restore each version, by model and version.

    The keys are TorchServe's names, and our own where it has none. Models in `lacking` follow the served
    ones, with the settings of the snapshot that they come from. Left out are models that were never served
    (see `never_served`) and the steps of workflows, which are restored with their workflow.
    """
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for name, served in serving.items():
        for number, version in served.versions.items():
            if not version.origin.workflow:
                entry = {"defaultVersion": number == served.default_version, **_version_entry(version)}
                table.setdefault(name, {})[number] = entry
    for model in lacking:
        if not model.version:
            continue
        versions = table.setdefault(model.name, {})
        if model.version in versions:
            continue
        for entry in versions.values() if model.default_version else ():
            entry["defaultVersion"] = False  # it was the default only because `model` is missing
        own = {"defaultVersion": model.default_version, "marName": model.archive}
        versions[model.version] = {**own, **model.settings}
    return table


def never_served(lacking: Iterable[SnapshotModel]) -> list[dict[str, Any]]:
    """Return the entries of models without a known version, because their archives were never read.

    This list is our extension of the format; TorchServe ignores it.
    """
    return [
        {"marName": model.archive, **({"modelName": model.name} if model.name else {}), **model.settings}
        for model in lacking
        if not model.version
    ]


def _version_entry(version: Version) -> dict[str, Any]:
    settings, origin = version.settings, version.origin
    named = (origin.archive.manifest.get("model") or {}).get("handler")
    entry = {
        "marName": origin.archive.file_name,
        "minWorkers": settings.min_executors,
        "maxWorkers": settings.max_executors,
        "batchSize": settings.batch.max_batch_size,
        "maxBatchDelay": settings.batch.max_queue_delay_ms,
        "responseTimeout": math.ceil(settings.response_timeout_s),
        "startupTimeout": math.ceil(settings.startup_timeout_s),
        "runtimeType": origin.runtime,
    }
    if settings.parallel:
        entry["parallelLevel"] = settings.parallel.level
    ours = {}
    if origin.handler != named:
        ours["handler"] = origin.handler  # TorchServe's snapshots lose it
    if origin.archive.outside_store:
        ours["path"] = origin.archive.url
    return {**entry, OURS: ours} if ours else entry


def snapshot_text(
    name: str,
    created: datetime,
    properties: Iterable[tuple[str, str]],
    content: Mapping[str, Any],
) -> str:
    """Return the text of the snapshot file `name`; `content` holds the model entries of its JSON."""
    record = {
        "name": name,
        "modelCount": sum(len(versions) for versions in content["models"].values()),
        "created": int(created.timestamp() * 1000),
        **content,
    }
    lines = [FIRST_LINE, f"#{created.astimezone().isoformat(timespec='seconds')}"]
    lines += [property_line(key, value) for key, value in properties]
    return "\n".join([*lines, property_line("model_snapshot", json.dumps(record, indent=2)), ""])


def property_line(key: str, value: str) -> str:
    """Return a properties file line that every Java version parses to this value."""
    text = _TO_ESCAPE.sub(lambda found: _escaped(found[0]), value)
    guard = "\\" if text.startswith(" ") else ""  # blanks after the separator are not part of a value
    return f"{key}={guard}{text}"


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    units = character.encode("utf-16-be", "surrogatepass")  # outside the BMP: a surrogate pair, two escapes
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def snapshot_name(kind: SnapshotKind, now: datetime, existing: Iterable[str]) -> str:
    """Return a file name later than all existing ones, even after the clock was set back.

    The next start restores the file with the latest name.
    """
    # The latest possible time is ignored: no name sorts after it, and an operator may use it to pin a file.
    times = [moment for name in existing if (moment := _time_of(name)) and moment < _LAST_BUT_ONE]
    latest = max(times, default=datetime.min)
    moment = max(now.replace(tzinfo=None), latest + timedelta(milliseconds=1) if times else latest)
    return f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}-{kind}.cfg"


def _time_of(name: str) -> datetime | None:
    match = NAME.fullmatch(name)
    if match is None:
        return None
    *whole, milliseconds = map(int, match.groups())
    try:
        return datetime(*whole, milliseconds * 1000)  # type: ignore[arg-type, call-arg]  # six whole numbers
    except ValueError:
        return None  # seventeen digits that are not a valid time


def write_snapshot(settings: SnapshotSettings, kind: SnapshotKind, content: Mapping[str, Any]) -> Path:
    """Write one snapshot atomically, and delete the oldest of our own beyond `settings.keep`.

    The file is readable by its owner only: its properties may hold values from the environment.

    Raises:
        OSError: the directory can't be created or written.
    """
    directory = settings.directory
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.now()  # local time without a zone, as in TorchServe's names
    name = snapshot_name(kind, now, os.listdir(directory))
    text = snapshot_text(name, now, settings.properties, content)
    descriptor, temporary = tempfile.mkstemp(prefix=_DRAFT_PREFIX, dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty newest file
        os.replace(temporary, directory / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _prune(directory, settings.keep)
    sweep_parts(directory, _DRAFT_PREFIX, _DRAFT_IDLE_S)
    return directory / name


def _prune(directory: Path, keep: int) -> None:
    names = sorted(name for name in os.listdir(directory) if NAME.fullmatch(name))
    ours = [name for name in names[-_LOOKED_AT:] if _is_ours(directory / name)]
    for name in ours[:-keep]:
        (directory / name).unlink(missing_ok=True)


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(FIRST_LINE)) == FIRST_LINE.encode("ascii")
    except OSError:
        return False  # deleted by another server, or owned by another user


logger = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # after failed writes in a row; the last one repeats


class SnapshotKeeper:
    """Writes the snapshots of one registry; writes none if snapshots are not configured.

    Used on the event loop; files are written in a thread, one after the other. Changes that wait while a file
    is written share the next one, as each file holds all models. A failed write is a warning, never an error;
    it is retried until a write succeeds, because the disk may have room later.

    `lacking` returns the startup models that this server could not register: the next start retries them.
    `workflows` returns the entries of the workflows, which TorchServe ignores.
    """

    def __init__(
        self,
        settings: SnapshotSettings | None,
        served: Callable[[], ServingMap],
        lacking: Callable[[], Sequence[SnapshotModel]] = lambda: (),
        workflows: Callable[[], Sequence[dict[str, Any]]] = lambda: (),
    ) -> None:
        self._settings = settings
        self._served = served
        self._lacking = lacking
        self._workflows = workflows
        self._started = False
        self._turn = asyncio.Lock()  # writes files in the order of the changes
        self._changes: dict[asyncio.Task[None], Version | None] = {}  # and the version it waits for
        self._noted: ServingMap = EMPTY  # the map in the snapshot begun last
        self._on_disk: dict[str, dict[str, dict[str, Any]]] = {}  # the models in the snapshot written last
        self._begun = 0  # number of snapshots begun
        self._newest = 0  # number of the last snapshot written to disk
        self._failures = 0  # failed writes in a row
        self._retry: asyncio.TimerHandle | None = None

    async def started(self) -> None:
        """Write the startup snapshot, and one for each change from now on."""
        self._started = True
        await self._write("startup")

    def changed(self, version: Version | None = None) -> None:
        """Write a snapshot after a change of the desired state, once `version` has settled."""
        if self._started and self._settings is not None:
            task = asyncio.ensure_future(self._after(version))
            self._changes[task] = version
            task.add_done_callback(self._changes.pop)

    def discarded(self, version: Version) -> None:
        """Write a snapshot without a version that failed to load, if the last snapshot begun names it."""
        if _holds(self._noted, version):
            self.changed()

    async def written(self) -> None:
        """Wait until every settled change is written to disk, so that it may be reported as done."""
        settled = [
            task for task, version in self._changes.items() if version is None or version.settled.is_set()
        ]
        if settled:
            await asyncio.wait(settled)

    def needs(self, archive: str) -> bool:
        """Return whether the newest snapshot on disk, which the next start restores, names the archive."""
        models = self._on_disk.values()
        return any(entry["marName"] == archive for versions in models for entry in versions.values())

    async def stopping(self) -> None:
        """Write the shutdown snapshot, before the server unloads all models."""
        if not self._started:
            return
        self._started = False
        self._cancel_retry()
        for task, version in self._changes.items():
            if version is not None:
                task.cancel()  # the shutdown snapshot holds the change, too; a running write continues
        await asyncio.gather(*self._changes, return_exceptions=True)
        await self._write("shutdown")

    async def _after(self, version: Version | None) -> None:
        if version is not None:
            await version.settled.wait()
            task = asyncio.current_task()
            assert task is not None
            self._changes[task] = None
            if not _holds(self._served(), version) and not _holds(self._noted, version):
                return  # it failed to load and was discarded: nothing changed
        await self._write("snapshot")

    def _content(self) -> dict[str, Any]:
        self._noted = self._served()
        lacking = self._lacking()
        missing = never_served(lacking)
        lists = {"missing": missing, "workflows": list(self._workflows())}
        ours = {name: entries for name, entries in lists.items() if entries}
        return {"models": model_table(self._noted, lacking), **({OURS: ours} if ours else {})}

    async def _write(self, kind: SnapshotKind) -> None:
        settings = self._settings
        if settings is None:
            return
        begun = self._begun
        async with self._turn:
            if kind == "snapshot" and self._newest > begun:
                return  # a snapshot that began after this change includes it
            self._begun = number = self._begun + 1
            content = self._content()
            try:
                await asyncio.to_thread(write_snapshot, settings, kind, content)
            except OSError as err:
                text = "no snapshot in %s: %s; the next start will not know this state (off: --ncs)"
                logger.warning(text, settings.directory, err)
                self._try_later()
            else:
                self._newest = number
                self._on_disk = content["models"]
                self._failures = 0
                self._cancel_retry()

    def _try_later(self) -> None:
        self._cancel_retry()
        if self._started:
            delay_s = RETRY_S[min(self._failures, len(RETRY_S) - 1)]
            self._failures += 1
            self._retry = asyncio.get_running_loop().call_later(delay_s, self.changed)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None


def _holds(serving: ServingMap, version: Version) -> bool:
    model = serving.get(version.key.name)
    return model is not None and model.versions.get(version.key.version) is version
