"""Keeps a model's buffers from changing while packing runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def unchanged_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restore the values of the module's buffers at block exit, in the tensors that they were in.

    A model may count its runs or keep a mean of its inputs in a buffer: runs of the packer are no requests.
    Plain attributes that hold a tensor, a number or None are restored, too; other state, such as lists, is
    not. Takes the memory of the buffers a second time.

    Args:
        module: a torch.jit.ScriptModule is one, too.
    """
    before = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in (*part.named_buffers(recurse=False), *_attributes(part, torch.Tensor))
        if _is_plain(buffer)
    ]
    numbers = [(part, [*_attributes(part, (int, float, type(None)))]) for part in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, values in before:
                if not torch.equal(buffer, values):  # writing all would copy pages of a mapped file
                    buffer.copy_(values)
                if getattr(part, name) is not buffer:
                    setattr(part, name, buffer)
        for part, values_by_name in numbers:
            vars(part).update(values_by_name)


def assigned_state(module: torch.nn.Module, run: Callable[[], object]) -> list[str]:
    """Return the names of the buffers and attributes that a run assigns anew, with other values than before.

    Changes within a tensor do not count, nor does a cache that gets the value that it had.
    """
    before = _state(module)
    run()
    return [name for name, value in _state(module).items() if _is_other(before.get(name, value), value)]


def _state(module: torch.nn.Module) -> dict[str, object]:
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in module.named_modules()
        for name, value in (
            *part.named_buffers(recurse=False),
            *_attributes(part, (torch.Tensor, int, float, type(None))),
        )
    }


def _attributes(part: torch.nn.Module, kinds: Any) -> list[tuple[str, Any]]:
    """Return the plain attributes of these kinds; those of TorchScript are not Python's."""
    if isinstance(part, torch.jit.ScriptModule):
        return []
    found = vars(part).items()
    return [(name, value) for name, value in found if isinstance(value, kinds) and name != "training"]


def _is_other(before: object, after: object) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        is_alike = before.dtype is after.dtype and before.shape == after.shape and torch.equal(before, after)
        return before is not after and not is_alike
    return type(before) is not type(after) or before != after


def _is_plain(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_quantized
