"""Snapshots: what a server serves, written down after each change, so that the next start serves the same.

The files are TorchServe's: `<log location>/config/<time>-{startup,snapshot,shutdown}.cfg`, Java properties
with the models as JSON under `model_snapshot`. Either server restores what the other wrote.
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

from torchere.serving.config.server_settings import SnapshotModel, SnapshotSettings
from torchere.serving.registry.serving_map import EMPTY, ServingMap
from torchere.serving.registry.version import Version
from torchere.serving.store.scratch import sweep_parts

SnapshotKind = Literal["startup", "snapshot", "shutdown"]

FIRST_LINE = "#Snapshot of torchere"  # tells our files from TorchServe's, which are never deleted
NAME = re.compile(r"([0-9]{17})-(startup|snapshot|shutdown)\.cfg")
_LOOKED_AT = 1000  # of the newest: TorchServe deletes none of its own, and whose one is only its text tells
_DRAFT_PREFIX = ".snapshot-"
_DRAFT_IDLE_S = 60.0  # nobody takes that long over one: a server was killed
_PARTS = re.compile(r"(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)(\d{3})", re.ASCII)
_LAST_BUT_ONE = datetime.max - timedelta(milliseconds=1)
_TO_ESCAPE = re.compile(r"[^ -~]|\\")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}


def model_table(
    serving: ServingMap, lacking: Iterable[SnapshotModel] = ()
) -> dict[str, dict[str, dict[str, Any]]]:
    """By model and version what it takes to have it again; TorchServe's names, and ours where it has none.

    Those that are `lacking` stand as in the snapshot that they come from, behind what is served. What never
    was served is not among them: see `never_served`.
    """
    table = {
        name: {
            number: {"defaultVersion": number == served.default_version, **_version_entry(version)}
            for number, version in served.versions.items()
        }
        for name, served in serving.items()
    }
    for model in lacking:
        if not model.version:
            continue
        versions = table.setdefault(model.name, {})
        if model.version in versions:
            continue
        for entry in versions.values() if model.default_version else ():
            entry["defaultVersion"] = False  # it is so for want of the other
        own = {"defaultVersion": model.default_version, "marName": model.archive}
        versions[model.version] = {**own, **model.settings}
    return table


def never_served(lacking: Iterable[SnapshotModel]) -> list[dict[str, Any]]:
    """What of it has no version, as nobody could read its archive; ours, TorchServe reads past it."""
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
    if origin.handler != named:
        entry["handler"] = origin.handler  # TorchServe forgets it
    if origin.archive.outside_store:
        entry["path"] = origin.archive.url  # likewise
    return entry


def snapshot_text(
    name: str,
    created: datetime,
    properties: Iterable[tuple[str, str]],
    content: Mapping[str, Any],
) -> str:
    """The text of the snapshot file `name`; `content` is what counts of its JSON."""
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
    """One line of a properties file that any Java reads back as this value."""
    text = _TO_ESCAPE.sub(lambda found: _escaped(found[0]), value)
    guard = "\\" if text.startswith(" ") else ""  # blanks after the separator are not part of a value
    return f"{key}={guard}{text}"


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    units = character.encode("utf-16-be", "surrogatepass")  # beyond the basic plane: two halves, two escapes
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def snapshot_name(kind: SnapshotKind, now: datetime, existing: Iterable[str]) -> str:
    """A name later than all existing ones, even when the clock was put back: the latest name is restored."""
    # Behind the very last moment, somebody's own name for a file to be restored always, there is no other.
    times = [moment for name in existing if (moment := _time_of(name)) and moment < _LAST_BUT_ONE]
    latest = max(times, default=datetime.min)
    moment = max(now.replace(tzinfo=None), latest + timedelta(milliseconds=1) if times else latest)
    return f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}-{kind}.cfg"


def _time_of(name: str) -> datetime | None:
    match = NAME.fullmatch(name)
    parts = _PARTS.fullmatch(match.group(1)) if match else None
    if parts is None:
        return None
    *whole, milliseconds = map(int, parts.groups())
    try:
        return datetime(*whole, milliseconds * 1000)  # type: ignore[arg-type, call-arg]  # six whole numbers
    except ValueError:
        return None  # seventeen digits, and no time


def write_snapshot(
    directory: Path,
    kind: SnapshotKind,
    properties: Sequence[tuple[str, str]],
    content: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write one snapshot, whole or not at all, and delete the oldest of ours beyond `keep`.

    Readable by its owner only: values that came from the environment may be among the properties.

    Raises:
        OSError: the directory can't be made or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.now()  # local time without a zone, as in TorchServe's names
    name = snapshot_name(kind, now, os.listdir(directory))
    text = snapshot_text(name, now, properties, content)
    descriptor, temporary = tempfile.mkstemp(prefix=_DRAFT_PREFIX, dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a machine that fails leaves the newest name, and nothing behind it
        os.replace(temporary, directory / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _prune(directory, keep)
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
        return False  # another server deleted it, or it is somebody else's


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
