"""One copy of the weights for all handler instances of a version in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

T = TypeVar("T")


class _Slot:
    """Holds one model; `lock` is held while it is loaded, so that loads of other models go on."""

    __slots__ = ("loaded", "lock", "model")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loaded = False
        self.model: object = None


class SharedModels:
    """Loads each model once, however many threads ask for it at the same time.

    Thread-safe. What it holds is used by several threads at once: give it only models whose forward pass
    changes nothing (TorchScript, or an `nn.Module` in eval mode). It lives as long as its version.
    """

    def __init__(self) -> None:
        self._slots: dict[Hashable, _Slot] = {}
        # False from the first model on that its caller has for itself: it may keep state, which one more
        # instance would not have.
        self.shares_all = True
        self._lock = threading.Lock()  # guards _slots; never held while a model loads

    def get_or_load(
        self, key: Hashable, load: Callable[[], T], may_share: Callable[[T], bool] = lambda _: True
    ) -> T:
        """The model under `key`; the first caller loads it, the others wait for that.

        One that `may_share` says no to is its caller's alone, and the next one loads another.

        Raises:
            Exception: what `load` raised, to the caller that ran it; the next one tries again.
        """
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
        with slot.lock:
            if not slot.loaded:
                model = load()
                if not may_share(model):
                    self.shares_all = False
                    return model
                slot.model, slot.loaded = model, True
            return cast(T, slot.model)
