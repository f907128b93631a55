"""What to load at the start, which is a pure reading of the settings, and what of it is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchere.serving.errors import InvalidSnapshot
from torchere.serving.registry.effective import Asked
from torchere.serving.registry.names import default_model_name
from torchere.serving.settings import ServerSettings, SnapshotModel
from torchere.serving.types import ModelKey


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
    restores: SnapshotModel | None = None  # where it stands in a snapshot


def startup_models(
    server: ServerSettings, stored: Callable[[], Sequence[str]], gpus: int = 0
) -> list[Wanted]:
    """Every model to register at the start, in order.

    Items of `load_models` are `[name=]file`; the single item `all` means everything in `stored`, the names in
    the model store, which are asked for then only. Models of a snapshot come with the settings they had.
    `gpus` is how many there are.
    """
    items = list(server.load_models)
    if [item.lower() for item in items] == ["all"]:
        items = list(stored())
    executors = Asked(executors=server.startup_executors(gpus), executors_by_default=True)
    wanted = [_from_item(item, executors) for item in items]
    return wanted + [_from_snapshot(model) for model in server.snapshot_models]


def check_snapshot(models: Sequence[SnapshotModel], has: Callable[[str, bool], bool]) -> None:
    """Refuse a snapshot that can't be restored whole, as TorchServe does.

    A server that comes up without a model it served before is worse than one that says why it does not.

    Raises:
        InvalidSnapshot: `has(archive, True)` is false for an archive of it; the text names them all.
    """
    missing = [
        f"{_location(model)} ({model.name} {model.version})"
        for model in models
        if not has(_location(model), True)
    ]
    if missing:
        raise InvalidSnapshot(
            f"The model snapshot names archives that are not in the model store: {', '.join(missing)}.",
            "Put them back, take them out of model_snapshot, or start without snapshots (--ncs).",
        )


def _from_item(item: str, asked: Asked) -> Wanted:
    name, separator, url = item.partition("=")
    if not separator or "/" in name:  # the sign stands in the query of a URL
        name, url = "", item
    return Wanted(url, asked, name=name or None, at_startup=True)


def _from_snapshot(model: SnapshotModel) -> Wanted:
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


class Missing:
    """What is wanted from the start and could not be registered, until an operator takes its name in hand.

    Lives on the event loop.
    """

    def __init__(self) -> None:
        self._wanted: list[Wanted] = []

    def add(self, wanted: Wanted) -> None:
        """It could not be registered."""
        if wanted not in self._wanted:
            self._wanted.append(wanted)

    def names(self) -> tuple[str, ...]:
        """The models, as they are called, or would be by the names of their files."""
        return tuple(map(_name_of, self._wanted))

    def to_restore(self) -> list[SnapshotModel]:
        """Those that come from a snapshot."""
        return [wanted.restores for wanted in self._wanted if wanted.restores is not None]

    def registered(self, wanted: Wanted, key: ModelKey) -> None:
        """This is there now. What an operator registers that was not missing stands for all of its name."""

        def has_name(one: Wanted) -> bool:
            return _name_of(one) == key.name or (one.restores is None and one.url == wanted.url)

        def is_it(one: Wanted) -> bool:
            return one.url == wanted.url or (one.restores is not None and one.restores.version == key.version)

        if wanted.at_startup:
            there = [one for one in self._wanted if one == wanted]
        else:
            named = [one for one in self._wanted if has_name(one)]
            there = [one for one in named if is_it(one)] or named
        self._wanted = [one for one in self._wanted if one not in there]

    def unregistered(self, model: str, version: str | None) -> bool:
        """Nobody wants this version, or any, of a model any more; whether it was missing."""

        def is_meant(one: Wanted) -> bool:
            number = one.restores.version if one.restores is not None else None
            return _name_of(one) == model and version in (None, number)

        before = len(self._wanted)
        self._wanted = [one for one in self._wanted if not is_meant(one)]
        return len(self._wanted) < before

    def has_other_default(self, model: str) -> None:
        """The default version of a model is none of the missing ones any more."""
        for at, one in enumerate(self._wanted):
            if one.restores is not None and one.restores.name == model:
                self._wanted[at] = replace(one, restores=replace(one.restores, default_version=False))


def _name_of(wanted: Wanted) -> str:
    return wanted.name or default_model_name(wanted.url.partition("?")[0])  # the rest may be a secret
