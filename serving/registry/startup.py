"""What to load at the start: a pure reading of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchere.serving.registry.effective import Asked
from torchere.serving.settings import ServerSettings, SnapshotModel


@dataclass(frozen=True, slots=True)
class Wanted:
    """One archive that somebody wants served."""

    url: str
    asked: Asked
    name: str | None = None  # None: the manifest's, or derived from the file name
    handler: str | None = None
    runtime: str | None = None
    at_startup: bool = False


def startup_models(server: ServerSettings, stored: Sequence[str]) -> list[Wanted]:
    """Every model to register at the start, in order.

    Items of `load_models` are `[name=]file`; the single item `all` means everything in `stored`, the names in
    the model store. Models of a snapshot come with the settings they had.
    """
    items = list(server.load_models)
    if [item.lower() for item in items] == ["all"]:
        items = list(stored)
    executors = Asked(executors=server.startup_executors())
    wanted = [_from_item(item, executors) for item in items]
    return wanted + [_from_snapshot(model) for model in server.snapshot_models]


def _from_item(item: str, asked: Asked) -> Wanted:
    name, _, url = item.rpartition("=")
    return Wanted(url, asked, name=name or None, at_startup=True)


def _from_snapshot(model: SnapshotModel) -> Wanted:
    def integer(key: str) -> int | None:
        value = model.settings.get(key)
        return value if type(value) is int and value > 0 else None

    asked = Asked(
        batch_size=integer("batchSize"),
        max_batch_delay_ms=integer("maxBatchDelay"),
        executors=integer("minWorkers") or 0,
        response_timeout_s=integer("responseTimeout"),
        startup_timeout_s=integer("startupTimeout"),
    )
    return Wanted(model.archive, asked, name=model.name, at_startup=True)
