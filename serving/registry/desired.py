"""Computes the models to load at startup from the settings, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchere.handlers.cgroup import available_cores
from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import OURS, ServerSettings, SnapshotModel, SnapshotWorkflow
from torchere.serving.errors import InvalidSnapshot
from torchere.serving.registry.names import default_model_name
from torchere.serving.store.package import OpenedArchive
from torchere.serving.types import ModelKey

_ONLY_IF_STORED = "onlyIfStored"  # a setting of a snapshot entry that was never served


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to serve one archive: its location and its settings."""

    url: str
    asked: Asked
    name: str | None = None  # None: the name in the manifest, or else one derived from the file name
    handler: str | None = None
    runtime: str | None = None
    at_startup: bool = False
    executor_range: tuple[int, int] | None = None  # (min, max) from a snapshot; overrides all other settings
    restores: SnapshotModel | None = None  # its snapshot entry; None: registered at run time
    archive: OpenedArchive | None = None  # already opened; None: `url` is looked up in the store
    signs: bool = False  # the URL is in S3, and the request for it is signed
    workflow: str = ""  # the workflow that this model is a step of

    @property
    def by_operator(self) -> bool:
        """Whether the operator names the URL; the URL of a step comes from the workflow's archive."""
        return self.at_startup and not self.workflow


def startup_models(
    server: ServerSettings, stored: Callable[[], Sequence[str]], gpus: int = 0
) -> list[Wanted]:
    """Return every model to register at startup, in order.

    Items of `load_models` are `[name=]file`; the single item `all` means every name in the model store, as
    returned by `stored`. Models of a snapshot keep the settings they had; a model that was never served is
    treated like an item. They come first, so that an item that names one of them finds it registered.
    `gpus` is the number of GPUs.
    """
    items, of_all = _listed(server.load_models, stored)
    models = [*_still_meant(server.snapshot_models, stored), *(_from_item(item, of_all) for item in items)]
    executors = server.default_executors or gpus or available_cores()
    asked = Asked(executors=executors, executors_by_default=True)
    return [_served_before(model) if model.version else _never_served(model, asked) for model in models]


def startup_workflows(server: ServerSettings, stored: Callable[[], Sequence[str]]) -> list[SnapshotWorkflow]:
    """Return every workflow to register at startup; `load_workflows` is read as `load_models` is."""
    items, of_all = _listed(server.load_workflows, stored)
    named = [("", item) if of_all else _name_and_url(item) for item in items]
    wanted = [SnapshotWorkflow(url, name or None, only_if_stored=of_all) for name, url in named]
    kept = server.snapshot_workflows
    names = stored() if any(each.only_if_stored for each in kept) else ()
    return [*(each for each in kept if not each.only_if_stored or each.url in names), *wanted]


def _listed(items: Sequence[str], stored: Callable[[], Sequence[str]]) -> tuple[Sequence[str], bool]:
    """Return the items, or the whole store for `all`, and whether they are the whole store."""
    of_all = [item.lower() for item in items] == ["all"]
    return (stored() if of_all else items), of_all


def check_snapshot(models: Sequence[SnapshotModel], has: Callable[[str, bool], bool]) -> None:
    """Reject a snapshot that can't be restored completely, as TorchServe does.

    Failing at startup with a reason is better than silently serving fewer models than before.

    Raises:
        InvalidSnapshot: an archive that the snapshot names is missing, that is, `has(archive, True)` is
            false; the message lists all missing archives.
    """
    missing = [
        f"{location_of(model)} ({model.name} {model.version})"
        for model in models
        if model.version and not has(location_of(model), True)  # without a version it was never served
    ]
    if missing:
        raise InvalidSnapshot(
            f"The model snapshot names archives that are not in the model store: {', '.join(missing)}.",
            "Put them back, take them out of model_snapshot, or start without snapshots (--ncs).",
        )


def _still_meant(models: Sequence[SnapshotModel], stored: Callable[[], Sequence[str]]) -> list[SnapshotModel]:
    """Drop never-served models from `load_models=all` whose archives are no longer in the store."""
    of_all = [model for model in models if model.settings.get(_ONLY_IF_STORED)]
    names = stored() if of_all else ()
    return [model for model in models if model not in of_all or model.archive in names]


def _from_item(item: str, of_all: bool) -> SnapshotModel:
    name, url = ("", item) if of_all else _name_and_url(item)
    return SnapshotModel(name, "", url, False, {_ONLY_IF_STORED: True} if of_all else {})


def _name_and_url(item: str) -> tuple[str, str]:
    name, separator, url = item.partition("=")
    is_named = separator and "/" not in name  # otherwise the `=` is part of a URL's query
    return (name, url) if is_named else ("", item)


def _never_served(model: SnapshotModel, asked: Asked) -> Wanted:
    return Wanted(model.archive, asked, name=model.name or None, at_startup=True, restores=model)


def _served_before(model: SnapshotModel) -> Wanted:
    def integer(key: str) -> int | None:
        value = model.settings.get(key)
        return value if type(value) is int and value > 0 else None

    def text(key: str) -> str | None:
        value = model.settings.get(key)
        return value if isinstance(value, str) and value else None

    handler = _ours(model).get("handler")
    asked = Asked(
        batch_size=integer("batchSize"),
        max_batch_delay_ms=0 if model.settings.get("maxBatchDelay") == 0 else integer("maxBatchDelay"),
        executors=integer("minWorkers") or 0,
        response_timeout_s=integer("responseTimeout"),
        startup_timeout_s=integer("startupTimeout"),
        restored=True,
    )
    low, high = integer("minWorkers") or 0, integer("maxWorkers") or 0
    return Wanted(
        location_of(model),
        asked,
        name=model.name,
        handler=handler if isinstance(handler, str) and handler else None,
        runtime=text("runtimeType"),
        at_startup=True,
        executor_range=(low, max(low, high)),
        restores=model,
    )


def _ours(model: SnapshotModel) -> dict[str, object]:
    """Return the part of a model's entry that only torchere writes."""
    found = model.settings.get(OURS)
    return found if isinstance(found, dict) else {}


def location_of(model: SnapshotModel) -> str:
    """Return the URL by which a model of a snapshot is found: for a folder outside of the store, its path."""
    path = _ours(model).get("path")
    return path if isinstance(path, str) and path else model.archive


@dataclass(slots=True, eq=False)
class _Absent:
    """A wanted model that could not be registered."""

    wanted: Wanted
    restores: SnapshotModel
    instead: ModelKey | None = None  # the operator's replacement, which may still fail to load

    @property
    def name(self) -> str:
        return self.wanted.name or default_model_name(self.wanted.url.partition("?")[0])  # hides the query


class Missing:
    """Startup models that could not be registered, until an operator registers or unregisters their name.

    Used on the event loop.
    """

    def __init__(self) -> None:
        self._absent: list[_Absent] = []

    def add(self, wanted: Wanted) -> None:
        """Record that `wanted`, one of `startup_models`, could not be registered."""
        if wanted.restores is not None and all(one.wanted != wanted for one in self._absent):
            self._absent.append(_Absent(wanted, wanted.restores))

    def lacks(self, wanted: Wanted) -> bool:
        """Return whether a model that was added is still missing, and no other is registered in its place."""
        return any(one.wanted == wanted for one in self._lacking())

    def names(self) -> tuple[str, ...]:
        """Return the names of the missing models, derived from the file name where none is given."""
        return tuple([one.name for one in self._lacking()])

    def to_restore(self) -> list[SnapshotModel]:
        """Return the models that the next start retries; those without a version were never served."""
        return [one.restores for one in self._lacking()]

    def registered(self, wanted: Wanted, key: ModelKey) -> None:
        """Record that `wanted` is registered as `key`, and mark the missing models that it replaces.

        A model registered by an operator replaces the missing model with its URL or version; without such a
        match it replaces all missing models of its name. A step of a workflow replaces none.
        """

        def has_name(one: _Absent) -> bool:
            return one.name == key.name or (not one.restores.version and one.wanted.url == wanted.url)

        def is_it(one: _Absent) -> bool:
            return one.wanted.url == wanted.url or one.restores.version == key.version

        if wanted.workflow:
            return
        if wanted.at_startup:  # named twice, and the first attempt failed
            self._forget([one for one in self._absent if one.wanted == wanted])
            return
        named = list(filter(has_name, self._lacking()))
        for one in list(filter(is_it, named)) or named:
            one.instead = key

    def already_registered(self, wanted: Wanted, key: ModelKey) -> bool:
        """Record that `wanted` turned out to be `key`, which is registered; return whether it was missing."""
        found = [one for one in self._lacking() if one.wanted == wanted]
        for one in found:
            one.instead = key
        return bool(found)

    def is_replaced_by(self, key: ModelKey) -> bool:
        """Return whether an operator registered `key` instead of a missing model."""
        return any(one.instead == key for one in self._absent)

    def taken_back(self, key: ModelKey) -> None:
        """Record that the replacement `key` failed to load: the models it replaced are missing again."""
        for one in self._absent:
            if one.instead == key:
                one.instead = None

    def unregistered(self, model: str, version: str | None) -> bool:
        """Forget a missing version (None: all of the model); return whether any was missing."""
        named = [one for one in self._lacking() if one.name == model]
        return self._forget([one for one in named if version in (None, one.restores.version or None)])

    def left(self, key: ModelKey) -> None:
        """Forget the models that `key` replaced: it was unregistered."""
        self._forget([one for one in self._absent if one.instead == key])

    def has_other_default(self, model: str) -> None:
        """Record that the default version of a model is a registered one, not a missing one."""
        for one in self._absent:
            if one.restores.name == model:
                one.restores = replace(one.restores, default_version=False)

    def _lacking(self) -> list[_Absent]:
        return [one for one in self._absent if one.instead is None]

    def _forget(self, gone: list[_Absent]) -> bool:
        self._absent = [one for one in self._absent if one not in gone]
        return bool(gone)
