"""One copy of the weights for all handler instances of a version in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

T = TypeVar("T")


class _Slot:
    """Holds one model; `lock` is held while it is loaded, so loading other models is not blocked."""

    __slots__ = ("loaded", "lock", "model")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loaded = False
        self.model: object = None


class SharedModels:
    """Loads each model once, however many threads request it at the same time.

    Thread-safe. Several threads use a stored model at once, so its forward pass must change nothing
    (TorchScript, or an `nn.Module` in eval mode). The object lives as long as its version.
    """

    def __init__(self) -> None:
        self._slots: dict[Hashable, _Slot] = {}
        # False once a model was not shared: such a model may keep state, which one more instance would not
        # have.
        self.shares_all = True
        self._lock = threading.Lock()  # guards _slots; never held while a model loads

    def get_or_load(
        self, key: Hashable, load: Callable[[], T], may_share: Callable[[T], bool] = lambda _: True
    ) -> T:
        """Return the model under `key`; the first caller loads it, the others wait.

        A model that `may_share` refuses belongs to its caller alone; the next caller loads another one.

        Raises:
            Exception: raised by `load`, to the caller that ran it; the next caller tries again.
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
