"""What to load at the start: a pure reading of the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import ServerSettings, SnapshotModel
from torchere.serving.errors import InvalidSnapshot
from torchere.serving.process.cgroup import available_cores
from torchere.serving.registry.names import default_model_name
from torchere.serving.types import ModelKey

_ONLY_IF_STORED = "onlyIfStored"  # a setting of what stands in a snapshot and never was served


@dataclass(frozen=True, slots=True)
class Wanted:
    """One archive that somebody wants served."""

    url: str
    asked: Asked
    name: str | None = None  # None: the manifest's, or derived from the file name
    handler: str | None = None
    runtime: str | None = None
    at_startup: bool = False
    executor_range: tuple[int, int] | None = None  # (min, max) that a snapshot holds; nothing comes before it
    restores: SnapshotModel | None = None  # as snapshots hold it; None: an operator's, from a running server


def startup_models(
    server: ServerSettings, stored: Callable[[], Sequence[str]], gpus: int = 0
) -> list[Wanted]:
    """Every model to register at the start, in order.

    Items of `load_models` are `[name=]file`; the single item `all` means everything in `stored`, the names in
    the model store, which are asked for then only. Models of a snapshot come with the settings they had, or
    like items when they never were there. `gpus` is how many there are.
    """
    items = list(server.load_models)
    of_all = [item.lower() for item in items] == ["all"]
    if of_all:
        items = list(stored())
    executors = Asked(executors=server.startup_executors(gpus, available_cores()), executors_by_default=True)
    wanted = [_from_item(item, executors, of_all) for item in items]
    restored = _still_meant(server.snapshot_models, stored)
    return wanted + [_from_snapshot(model, executors) for model in restored]


def check_snapshot(models: Sequence[SnapshotModel], has: Callable[[str, bool], bool]) -> None:
    """Refuse a snapshot that can't be restored whole, as TorchServe does.

    A server that comes up without a model it served before is worse than one that says why it does not.

    Raises:
        InvalidSnapshot: `has(archive, True)` is false for an archive of it; the text names them all.
    """
    missing = [
        f"{_location(model)} ({model.name} {model.version})"
        for model in models
        if model.version and not has(_location(model), True)  # what was not served before can't be lacked
    ]
    if missing:
        raise InvalidSnapshot(
            f"The model snapshot names archives that are not in the model store: {', '.join(missing)}.",
            "Put them back, take them out of model_snapshot, or start without snapshots (--ncs).",
        )


def _still_meant(models: Sequence[SnapshotModel], stored: Callable[[], Sequence[str]]) -> list[SnapshotModel]:
    """Without what `all` meant, never was there, and is not in the store any more."""
    of_all = [model for model in models if model.settings.get(_ONLY_IF_STORED)]
    names = stored() if of_all else ()
    return [model for model in models if model not in of_all or model.archive in names]


def _from_item(item: str, asked: Asked, of_all: bool) -> Wanted:
    name, separator, url = item.partition("=")
    if not separator or "/" in name or of_all:  # the sign stands in the query of a URL
        name, url = "", item
    held = SnapshotModel(name, "", url, False, {_ONLY_IF_STORED: True} if of_all else {})
    return Wanted(url, asked, name=name or None, at_startup=True, restores=held)


def _from_snapshot(model: SnapshotModel, executors: Asked) -> Wanted:
    if not model.version:
        return Wanted(model.archive, executors, name=model.name or None, at_startup=True, restores=model)
    return _served_before(model)


def _served_before(model: SnapshotModel) -> Wanted:
    def integer(key: str) -> int | None:
        value = model.settings.get(key)
        return value if type(value) is int and value > 0 else None

    def text(key: str) -> str | None:
        value = model.settings.get(key)
        return value if isinstance(value, str) and value else None

    asked = Asked(
        batch_size=integer("batchSize"),
        max_batch_delay_ms=0 if model.settings.get("maxBatchDelay") == 0 else integer("maxBatchDelay"),
        executors=integer("minWorkers") or 0,
        response_timeout_s=integer("responseTimeout"),
        startup_timeout_s=integer("startupTimeout"),
    )
    low, high = integer("minWorkers") or 0, integer("maxWorkers") or 0
    return Wanted(
        _location(model),
        asked,
        name=model.name,
        handler=text("handler"),
        runtime=text("runtimeType"),
        at_startup=True,
        executor_range=(low, max(low, high)),
        restores=model,
    )


def _location(model: SnapshotModel) -> str:
    path = model.settings.get("path")  # ours: a folder outside of the store
    return path if isinstance(path, str) and path else model.archive


@dataclass(slots=True, eq=False)
class _Absent:
    """One that could not be registered."""

    wanted: Wanted
    restores: SnapshotModel
    instead: ModelKey | None = None  # what an operator registered, which may fail to load yet

    @property
    def name(self) -> str:
        return self.wanted.name or default_model_name(self.wanted.url.partition("?")[0])  # or: a secret


class Missing:
    """What is wanted from the start and could not be registered, until an operator takes its name in hand.

    Lives on the event loop.
    """

    def __init__(self) -> None:
        self._absent: list[_Absent] = []

    def add(self, wanted: Wanted) -> None:
        """It could not be registered; it is one of `startup_models`."""
        if wanted.restores is not None and all(one.wanted != wanted for one in self._absent):
            self._absent.append(_Absent(wanted, wanted.restores))

    def names(self) -> tuple[str, ...]:
        """The models, as they are called, or would be by the names of their files."""
        return tuple([one.name for one in self._absent if one.instead is None])

    def to_restore(self) -> list[SnapshotModel]:
        """What the next start is to try again; without a version is what never was served."""
        return [one.restores for one in self._absent if one.instead is None]

    def registered(self, wanted: Wanted, key: ModelKey) -> None:
        """This is registered. What an operator registers that was not missing stands for all of its name."""

        def has_name(one: _Absent) -> bool:
            return one.name == key.name or (not one.restores.version and one.wanted.url == wanted.url)

        def is_it(one: _Absent) -> bool:
            return one.wanted.url == wanted.url or one.restores.version == key.version

        if wanted.at_startup:  # named twice, and the first attempt went wrong
            self._forget([one for one in self._absent if one.wanted == wanted])
            return
        named = [one for one in self._absent if one.instead is None and has_name(one)]
        for one in [one for one in named if is_it(one)] or named:
            one.instead = key

    def taken_back(self, key: ModelKey) -> None:
        """What an operator registered would not load: what it stood for is missing as before."""
        for one in self._absent:
            if one.instead == key:
                one.instead = None

    def unregistered(self, model: str, version: str | None) -> bool:
        """Nobody wants this version, or any, of a model any more; whether it was missing."""

        def is_meant(one: _Absent) -> bool:
            return one.name == model and version in (None, one.restores.version or None)

        return self._forget([one for one in self._absent if one.instead is None and is_meant(one)])

    def left(self, key: ModelKey) -> None:
        """This is not wanted any more, nor is what it stood for."""
        self._forget([one for one in self._absent if one.instead == key])

    def has_other_default(self, model: str) -> None:
        """The default version of a model is none of the missing ones any more."""
        for one in self._absent:
            if one.restores.name == model:
                one.restores = replace(one.restores, default_version=False)

    def _forget(self, gone: list[_Absent]) -> bool:
        self._absent = [one for one in self._absent if one not in gone]
        return bool(gone)
