"""Finds in a state dict what a model takes, whatever stands in front of its names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from torchere.archiver.errors import ModelRefused

StateDict = dict[str, torch.Tensor]


def fitted(state: StateDict, wanted: Mapping[str, torch.Tensor], source: Path) -> StateDict:
    """The part of `state` that a model with the state dict `wanted` takes, a common prefix taken off.

    Lightning, DistributedDataParallel, torch.compile and training scripts put names in front: `model.`,
    `module.`, `_orig_mod.`. What has another prefix (a loss with weights, an averaged copy) is left out. Of
    names that are one parameter in the model, one is enough: safetensors holds no other.

    Raises:
        ModelRefused: no prefix makes the keys fit, and the text names some; or numbers would be lost.
    """
    keys = set(wanted)
    if not keys:
        return {}
    aliases = _aliases(wanted)
    whole = _completed(state, aliases)
    if keys == whole.keys():
        return _checked(whole, wanted, source)
    probe = max(keys, key=lambda key: (key.count("."), key))
    closest = whole
    for prefix in sorted({one for alias in aliases[probe] for one in _prefixes(state, alias)}, key=len):
        cut = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        cut = _completed(cut, aliases)
        if keys == cut.keys():
            return _checked(cut, wanted, source)
        closest = min(closest, cut, key=lambda one: len(keys ^ one.keys()))
    missing, extra = sorted(keys - closest.keys()), sorted(closest.keys() - keys)
    raise ModelRefused(
        f"{source}: not the weights of this model: missing {_some(missing)}; unexpected {_some(extra)}"
    )


def _prefixes(state: StateDict, probe: str) -> list[str]:
    return [key[: -len(probe)] for key in state if key.endswith(f".{probe}") or key == probe]


def _aliases(wanted: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """For each key all keys that are the same numbers in the model, itself among them."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for key, tensor in wanted.items():
        groups[_place(tensor) or key].append(key)
    return {key: group for group in groups.values() for key in group}


def _place(value: object) -> object:
    """Where numbers lie in memory and how; None for none, and for what else a state dict may hold."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    tensor = cast(torch.Tensor, value)
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _completed(state: StateDict, aliases: Mapping[str, list[str]]) -> StateDict:
    found = dict(state)
    for key, group in aliases.items():
        present = next((one for one in group if one in state), None)
        if present is not None:
            found.setdefault(key, state[present])
    return found


def _checked(state: StateDict, wanted: Mapping[str, torch.Tensor], source: Path) -> StateDict:
    for key, tensor in state.items():
        if _is_complex(tensor) and not _is_complex(wanted[key]):
            raise ModelRefused(
                f"{source}: {key} is {tensor.dtype}, and the model's is {wanted[key].dtype}: its imaginary "
                "parts would be lost; expected real numbers"
            )
    return state


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
