"""What to load at the start: a pure reading of the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchere.serving.errors import InvalidSnapshot
from torchere.serving.registry.effective import Asked
from torchere.serving.settings import ServerSettings, SnapshotModel
from torchere.serving.telemetry.cgroup import available_cores

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
