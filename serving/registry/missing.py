"""What is wanted from the start and is not there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchere.serving.registry.names import default_model_name
from torchere.serving.registry.startup import Wanted
from torchere.serving.settings import SnapshotModel
from torchere.serving.types import ModelKey


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
