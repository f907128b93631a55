"""Trees of tensors between ranks: from one stage of a pipeline to the next, and the answer to all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchere.archiver.split import SECTION

_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class _Form:
    """Stands for a tensor in a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OtherStageFailed(RuntimeError):
    """The sender has failed; the text is that of its error."""


class Wire:
    """One direction between ranks. Each message is a number, and the content that it announces.

    A tree is sent as its tensors, behind its structure unless that is the one of the message before (number
    0). A negative number announces the text of an error.

    Args:
        put: sends a tensor, or begins to.
        get: receives into a tensor.
        device: where the backend wants tensors.
    """

    def __init__(
        self,
        put: Callable[[torch.Tensor], object],
        get: Callable[[torch.Tensor], object],
        device: torch.device,
    ) -> None:
        self._put, self._get, self._device = put, get, device
        self._last: tuple[Any, list[Any]] | None = None  # structure and leaves of the message before

    def send(self, tree: Any) -> None:
        """Send a tree of tensors and plain values.

        Raises:
            ValueError: it has other values; nothing was sent.
        """
        leaves, spec = pytree.tree_flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise ValueError(
                    f"{SECTION}: a {type(leaf).__name__} can't be sent from one stage to the next"
                )
        form = (spec, [_Form(tuple(leaf.shape), leaf.dtype) if _is_tensor(leaf) else leaf for leaf in leaves])
        if form == self._last:
            self._announce(0)
        else:
            self._last = form
            self._put_bytes(json.dumps([pytree.treespec_dumps(spec), list(map(_told, form[1]))]).encode(), 1)
        for leaf in filter(_is_tensor, leaves):
            self._put(leaf.to(self._device).contiguous())

    def send_failure(self, error: Exception) -> None:
        """Send the text of an error in place of a tree."""
        self._put_bytes(f"{type(error).__name__}: {error}".encode(), -1)

    def receive(self) -> Any:
        """Return a tree.

        Raises:
            OtherStageFailed: the sender has failed.
        """
        number = torch.empty(1, dtype=torch.int64, device=self._device)
        self._get(number)
        if size := int(number):
            content = torch.empty(abs(size), dtype=torch.uint8, device=self._device)
            self._get(content)
            data = content.cpu().numpy().tobytes()
            if size < 0:
                raise OtherStageFailed(f"in another stage of the pipeline: {data.decode()}")
            spec, forms = json.loads(data)
            self._last = (pytree.treespec_loads(spec), list(map(_form_of, forms)))
        if self._last is None:
            raise OtherStageFailed("another stage of the pipeline is out of step")
        spec, forms = self._last
        return pytree.tree_unflatten([self._taken(form) for form in forms], spec)

    def _taken(self, form: Any) -> Any:
        if not isinstance(form, _Form):
            return form
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        self._get(tensor)
        return tensor

    def _announce(self, number: int) -> None:
        self._put(torch.tensor([number], dtype=torch.int64, device=self._device))

    def _put_bytes(self, data: bytes, sign: int) -> None:
        self._announce(sign * len(data))
        self._put(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device))


def _told(form: Any) -> Any:
    """Return a form as JSON has it; a pickle would let one machine run code on another."""
    return [list(form.shape), str(form.dtype).removeprefix("torch.")] if isinstance(form, _Form) else form


def _form_of(told: Any) -> Any:
    return _Form(tuple(told[0]), getattr(torch, told[1])) if isinstance(told, list) else told


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
