"""Finds tensors that a class makes at random and that its state dict lacks: each load has other ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

_OWN = ("_parameters", "_buffers", "_modules")  # of torch.nn.Module; the state dict has them


def unsaved(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that the module has and its state dict lacks, by name.

    They are plain attributes, items of lists and dicts, weights of layers in these, and buffers that are not
    persistent.
    """
    saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    found = {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, part in module.named_modules()
        for name, tensor in _of(part)
    }
    return {
        name: tensor.detach().clone()
        for name, tensor in found.items()
        if id(tensor) not in saved and _has_values(tensor)
    }


def random_ones(
    made: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], again: Callable[[], torch.nn.Module]
) -> str | None:
    """Return a warning about tensors that differ from one making of the class to the next; None without any.

    Args:
        made: `unsaved` of the module before its weights were loaded.
        loaded: the same afterwards; a class may load such tensors by code of its own.
        again: makes the module anew; it is called if `made` has something.
    """
    kept = [name for name, tensor in made.items() if name in loaded and _equal(tensor, loaded[name])]
    if not kept:
        return None
    others = unsaved(again())
    names = [name for name in kept if name in others and not _equal(made[name], others[name])]
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"warning: the state dict lacks {names[0]!r}{more}, which the class makes at random: each load of it "
        "answers differently. Let it be a buffer or a parameter (register_buffer, nn.Parameter), and layers "
        "stand in nn.ModuleList or nn.ModuleDict, and save the weights anew"
    )


def _of(part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name in part._non_persistent_buffers_set:
        if (buffer := part._buffers.get(name)) is not None:
            yield name, buffer
    if part._forward_pre_hooks:  # of weight_norm, which computes the weight anew before each run
        return
    for name, value in vars(part).items():
        if name not in _OWN:
            yield from _within(name, value)


def _within(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{inner}", tensor
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(item, (torch.Tensor, torch.nn.Module)):
                yield from _within(f"{name}[{key!r}]", item)


def _has_values(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and not tensor.is_meta and not is_lazy(tensor)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = one.dtype is other.dtype and one.shape == other.shape
    return is_alike and bool(((one == other) | (one.isnan() & other.isnan())).all())
