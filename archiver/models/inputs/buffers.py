"""Tensors of a module other than its weights: tensors that a run changes, or that its state dict lacks."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import Named, seeded
from torchere.archiver.models.inputs.sizes import Tensors

_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes of torch.nn.Module itself
_CHANGING = (list, dict, OrderedDict, defaultdict, set)  # exact types: a subclass may refuse changes
_PLAIN = (int, float, type(None), tuple, *_CHANGING)
_HOLDING = (torch.Tensor, list, tuple, dict)


@contextmanager
def unchanged_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restore the values of the module's buffers at block exit, in the same tensors.

    A model may count its runs, or keep a mean of its inputs, in a buffer, which the packer's runs must not
    affect. Plain attributes are restored, too; see `unchanged_attributes`. Needs memory for a copy of all
    buffers.

    Args:
        module: may also be a torch.jit.ScriptModule.
    """
    before = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in (*part.named_buffers(recurse=False), *_attributes(part, torch.Tensor))
        if type(buffer) is torch.Tensor and _has_values(buffer)
    ]
    try:
        with unchanged_attributes(module):
            yield
    finally:
        with torch.no_grad():
            for part, name, buffer, values in before:
                if not torch.equal(buffer, values):  # writing all buffers would copy pages of a mapped file
                    buffer.copy_(values)
                if getattr(part, name) is not buffer:
                    setattr(part, name, buffer)


@contextmanager
def unchanged_attributes(module: torch.nn.Module) -> Iterator[None]:
    """Restore numbers, tuples, lists, dicts, sets and None in plain attributes at block exit.

    Attributes that the block adds are deleted: a run may keep a table for one size in an attribute, which
    torch.export would then treat as a constant. Changes within tensors and other objects remain.
    """
    before = [(part, dict(_attributes(part, object)), _registered(part)) for part in module.modules()]
    contents = [(held, copy.copy(held)) for _, named, _ in before for held in _changing(named.values())]
    try:
        yield
    finally:
        for part, named, registered in before:
            _put_back(part, named, registered)
        for held, was in contents:
            held.clear()
            held.extend(was) if isinstance(held, list) else held.update(was)


def _put_back(part: torch.nn.Module, named: Mapping[str, object], registered: Collection[str]) -> None:
    for name, _ in _attributes(part, (torch.Tensor, *_PLAIN)):
        # Keep a tensor with which the run has replaced a parameter: later runs expect it.
        if name not in named and name not in registered:
            del vars(part)[name]
    vars(part).update({name: value for name, value in named.items() if isinstance(value, _PLAIN)})


def _registered(part: torch.nn.Module) -> set[str]:
    found = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    return {name for name, _ in found}


def _changing(values: Iterable[object], depth: int = 3) -> Iterator[Any]:
    """Yield the lists, dicts and sets among and within the values; the depth is limited for cyclic lists."""
    for value in values if depth else ():
        if type(value) in _CHANGING:
            yield value
        if isinstance(value, (list, tuple, dict)):
            yield from _changing(value.values() if isinstance(value, dict) else value, depth - 1)


def refuse_lost_state(
    module: torch.nn.Module, example: Tensors, form: str, keeps: Collection[str] = ()
) -> None:
    """Raise ModelRefused if a module, which has run before, keeps state between runs by assigning new values.

    Args:
        module: its state and its buffers are changed; `unchanged_buffers` restores them.
        example: inputs to run it on.
        form: the compiled form, for the error; it keeps the values that the state has at packing.
        keeps: the names of the state that this form updates as the module does.
    """
    found: list[Named] = []
    names = assigned_state(module, lambda: found.append(seeded(module, example)))
    state = [name for name in names if name not in keeps]
    if not state:
        return
    found.append(seeded(module, example))
    if not all(is_same(one, other) for (_, one), (_, other) in zip(*found, strict=False)):
        raise ModelRefused(
            f"the model keeps state from one run to the next in {state[0]!r}, to which its code assigns, and "
            f"{form} keeps the value of packing; let it be a buffer, and change it in place "
            f"(self.{state[0].rpartition('.')[2]}.copy_(...))"
        )


def assigned_state(module: torch.nn.Module, run: Callable[[], object]) -> list[str]:
    """Return the names of the buffers and attributes to which a run assigns different values.

    A tensor or number in a list, tuple or dict counts as part of the attribute that holds it. Changes within
    a tensor do not count, and neither does a new value that is equal to the old one.
    """
    before = _by_name(module, _held)
    run()
    after = _by_name(module, _held)
    changed = [name for name in {**before, **after} if _is_other(before.get(name), after.get(name))]
    return list(dict.fromkeys(name.partition("[")[0] for name in changed))


def _held(part: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from part.named_buffers(recurse=False)
    for name, value in _attributes(part, (int, float, *_HOLDING)):
        yield from ((inner, item) for inner, item in _nested(name, value) if isinstance(item, (int, float)))
        yield from _within(name, value)


def _by_name(
    module: torch.nn.Module, held: Callable[[torch.nn.Module], Iterable[tuple[str, Any]]]
) -> dict[str, Any]:
    """Return the values that `held` yields for the module and for each submodule, by their full names."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in module.named_modules()
        for name, value in held(part)
    }


def _attributes(part: torch.nn.Module, kinds: Any) -> list[tuple[str, Any]]:
    """Return the plain attributes of these types; none for TorchScript, whose `__dict__` lacks them."""
    if isinstance(part, torch.jit.ScriptModule):
        return []
    found = vars(part).items()
    return [(name, value) for name, value in found if isinstance(value, kinds) and name not in _OF_MODULES]


def _is_other(before: object, after: object) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before is not after and not is_same(before, after)
    return type(before) is not type(after) or before != after


def unsaved(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the module's tensors that its state dict lacks, by name.

    Such tensors are plain attributes, items of lists and dicts in attributes, weights of layers in such lists
    and dicts, and non-persistent buffers.
    """
    saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    return {
        name: tensor.detach().clone()
        for name, tensor in _by_name(module, _outside_state).items()
        if id(tensor) not in saved and _has_values(tensor)
    }


def random_ones(
    made: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], again: Callable[[], torch.nn.Module]
) -> str | None:
    """Return a warning about tensors that differ in each new instance of the class; None if there are none.

    Args:
        made: `unsaved` of the module before its weights were loaded.
        loaded: `unsaved` afterwards; a class may load such tensors with code of its own.
        again: creates a new instance of the module; called only if loading left tensors of `made` unchanged.
    """
    kept = [name for name, tensor in made.items() if name in loaded and is_same(tensor, loaded[name])]
    if not kept:
        return None
    others = unsaved(again())
    names = [name for name in kept if name in others and not is_same(made[name], others[name])]
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"warning: the state dict lacks {names[0]!r}{more}, which the class makes at random: each load of it "
        "answers differently. Let it be a buffer or a parameter (register_buffer, nn.Parameter), and layers "
        "stand in nn.ModuleList or nn.ModuleDict, and save the weights anew"
    )


def _outside_state(part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name in part._non_persistent_buffers_set:
        if (buffer := part._buffers.get(name)) is not None:
            yield name, buffer
    if part._forward_pre_hooks:  # such as that of weight_norm, which computes the weight before each run
        return
    for name, value in _attributes(part, object):
        yield from _within(name, value)


def _within(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the value, also those of layers in it."""
    for inner, item in _nested(name, value):
        if isinstance(item, torch.Tensor):
            yield inner, item
        elif isinstance(item, torch.nn.Module):
            for own, tensor in (*item.named_parameters(), *item.named_buffers()):
                yield f"{inner}.{own}", tensor


def _nested(name: str, value: object, depth: int = 2) -> Iterator[tuple[str, object]]:
    """Yield the value and its items, also nested ones; the depth is limited, because lists may be cyclic."""
    yield name, value
    if depth and isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(item, (torch.nn.Module, int, float, *_HOLDING)):
                yield from _nested(f"{name}[{key!r}]", item, depth - 1)


def _has_values(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and not tensor.is_meta and not is_lazy(tensor)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and values; NaN is equal to NaN."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) if one.is_quantized else torch.allclose(one, other, 0, 0, equal_nan=True)
