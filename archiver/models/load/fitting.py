"""Finds the state dict in a file that fits a module, and loads it.

Training scripts save a state dict under any name, next to other dicts, and put prefixes before its keys.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.checkpoint import StateDict, Weights
from torchere.archiver.models.load.names import some
from torchere.archiver.models.load.weight_only import torchao_weights

# torch.compile wraps modules, at any depth, and saves their weights under this name.
_COMPILED = "_orig_mod."
# The count of training batches of a normalisation; files of torch before 0.4.1 lack it, and torch adds it.
_COUNTER = "num_batches_tracked"
_TRIED = 20  # limit on the prefixes that are tried
_SHOWN = 20  # limit on the keys of each kind that a refusal shows


def load_into(module: torch.nn.Module, weights: Weights, source: Path, strict: bool = True) -> list[str]:
    """Fill the module with the weights; return lines for the user about choices that were made.

    If several state dicts fit, the first in `weights.states` is loaded. If none fits, and the class renames
    keys itself (in a `load_state_dict` of its own or in a hook), it gets the state dicts unchanged.

    Args:
        module: the model.
        weights: the weights in the file `source`.
        source: the file, for messages.
        strict: False: weights without a place in the module are left out, and weights that the file lacks
            keep the values that the class gives them.

    Raises:
        ModelRefused: names or shapes differ from the module's.
    """
    wanted = module.state_dict()
    refusals: list[Mismatch] = []
    fitting: dict[str, StateDict] = {}
    for name, state in weights.states.items():
        try:
            fitting[name] = fitted(state, wanted, source)
        except Mismatch as mismatch:
            refusals.append(mismatch)
    if fitting:
        first, *others = fitting
        _load(module, fitting[first], source)
        return [_chosen(first, others)] if others else []
    if any(_loads_by_itself(module, state, source) for state in weights.states.values()):
        return []
    if not strict:
        return _load_partly(module, weights, source)
    closest = min(refusals, key=lambda refusal: refusal.distance)
    raise ModelRefused(f"{closest}{_about_keys(weights)}")


def _load(module: torch.nn.Module, state: StateDict, source: Path, **options: bool) -> None:
    if torchao_weights(state):  # a copy into fp32 parameters would turn them into fp32
        options["assign"] = True
    try:
        with torch.no_grad():
            module.load_state_dict(copy.copy(state), **options)  # the class's own code may change the dict
    # Broad, because a class may load its weights by code of its own.
    except Exception as error:
        text = " ".join(line.strip() for line in str(error).splitlines())
        raise ModelRefused(
            f"{source}: loading the weights into {type(module).__name__} failed: {text}; "
            "name the class that they were saved from"
        ) from error


def _loads_by_itself(module: torch.nn.Module, state: StateDict, source: Path) -> bool:
    """Load the unchanged state dict if the class renames keys itself; return whether that succeeded."""
    own = type(module).load_state_dict is not torch.nn.Module.load_state_dict
    if not own and not any(_renames(part) for part in module.modules()):
        return False
    try:
        _load(module, state, source)
    except ModelRefused:
        return False
    return True


def _renames(part: Any) -> bool:
    code = type(part)._load_from_state_dict
    return bool(part._load_state_dict_pre_hooks) or not code.__module__.startswith("torch.")


def _load_partly(module: torch.nn.Module, weights: Weights, source: Path) -> list[str]:
    """Load the state dict that, with one of its prefixes removed, shares the most names with the module."""
    wanted = module.state_dict()
    cuts = [cut for state in weights.states.values() for cut in _cuts(state, wanted)]
    names = {key for key in wanted if not key.endswith(_COUNTER)}  # `_cuts` adds these
    best = max(cuts, key=lambda cut: len(cut.keys() & names))
    shared = best.keys() & wanted.keys() if best.keys() & names else set()
    if not shared:
        raise ModelRefused(
            f"{source}: none of its weights has a name of the model's, which --no-strict needs; name "
            "the class that it was saved from"
        )
    missing, extra = sorted(wanted.keys() - shared), sorted(best.keys() - shared)
    _load(module, {key: best[key] for key in shared}, source, strict=False)
    return [
        f"--no-strict: {len(shared)} of {len(wanted)} weights are the file's",
        f"as the class makes them, which may be at random: {some(missing, _SHOWN)}",
        f"left out of the file: {some(extra, _SHOWN)}",
    ]


def _chosen(name: str, others: Sequence[str]) -> str:
    return (
        f"the weights are those under {name!r} of the file; it has others that fit, under "
        f"{', '.join(map(repr, others))}: save the one that you want alone to take it"
    )


def _about_keys(weights: Weights) -> str:
    """Return the keys that a file has, and advice, for the text of a refusal."""
    if is_adapter(weights):
        return f"; {ADAPTER}"
    lines = [
        f"under {name!r}: {some(list(state), _SHOWN)}" if name else some(list(state), _SHOWN)
        for name, state in weights.states.items()
    ]
    return (
        f"; the file has {'; '.join(lines)}; where the others do not matter, --no-strict takes the "
        "weights that have the model's names"
    )


ADAPTER = (
    "these are weights of an adapter (LoRA): merge it into its model with model.merge_and_unload(), and save "
    "that"
)


def is_adapter(weights: Weights) -> bool:
    """Return whether the weights are an adapter of PEFT, by their names."""
    return any(".lora_" in key for state in weights.states.values() for key in state)


class Mismatch(ModelRefused):
    """The keys of a state dict are not those of the model; `distance` is the number of keys that differ."""

    def __init__(self, source: Path, missing: Sequence[str], extra: Sequence[str]) -> None:
        super().__init__(
            f"{source}: not the weights of this model: missing {some(missing, _SHOWN)}; unexpected "
            f"{some(extra, _SHOWN)}"
        )
        self.distance = len(missing) + len(extra)


def fitted(state: StateDict, wanted: Mapping[str, Any], source: Path) -> StateDict:
    """Return the part of `state` that a model with the state dict `wanted` takes, without its prefix.

    Lightning, DistributedDataParallel, torch.compile and training scripts put a prefix before names:
    `model.`, `module.`, `_orig_mod.`. Keys with another prefix (a loss with weights, an averaged copy) are
    left out. If several names in the model refer to one parameter, one name is enough, because safetensors
    stores such a parameter once.

    Raises:
        Mismatch: no prefix makes the keys fit; the text names some of them.
        ModelRefused: the imaginary parts of numbers would be lost.
    """
    keys = set(wanted)
    if not keys:
        return {}
    closest = min(_cuts(state, wanted), key=lambda cut: len(keys ^ cut.keys()))
    if keys != closest.keys():
        raise Mismatch(source, sorted(keys - closest.keys()), sorted(closest.keys() - keys))
    _refuse_complex(closest, wanted, source)
    return closest


def _cuts(state: StateDict, wanted: Mapping[str, Any]) -> list[StateDict]:
    """Return copies of the state dict with the model's names, one for each prefix that its keys may have."""
    names = {key.replace(_COMPILED, ""): key for key in wanted}
    plain = {
        key.replace(_COMPILED, ""): value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) or key in wanted
    }
    aliases = _aliases({key.replace(_COMPILED, ""): value for key, value in wanted.items()})
    cuts = []
    for prefix in _prefixes(plain, names):
        cut = {key[len(prefix) :]: value for key, value in plain.items() if key.startswith(prefix)}
        cut = _completed(cut, aliases, wanted, names)
        renamed: Any = OrderedDict((names.get(key, key), value) for key, value in cut.items())
        renamed._metadata = _versions(state, prefix)
        cuts.append(renamed)
    return cuts


def _versions(state: StateDict, prefix: str) -> dict[str, Any]:
    """Return the format version of each module, by its name; torch attaches them to a state dict."""
    versions: Mapping[str, Any] = getattr(state, "_metadata", {})
    return {
        name[len(prefix) :]: version
        for name, version in versions.items()
        if f"{name}.".startswith(prefix) or not prefix
    }


def _prefixes(state: Collection[str], wanted: Collection[str]) -> list[str]:
    """Return "" and the most frequent prefixes of the model's keys in the file, shortest first."""
    found: Counter[str] = Counter()
    for key in state:
        parts = key.split(".")
        for at in range(1, len(parts)):
            if ".".join(parts[at:]) in wanted:
                found[".".join(parts[:at]) + "."] += 1
    return ["", *sorted((prefix for prefix, _ in found.most_common(_TRIED)), key=len)]


def _aliases(wanted: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, for each key, all keys that refer to the same memory in the model, including itself."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for key, tensor in wanted.items():
        groups[_place(tensor) or key].append(key)
    return {key: group for group in groups.values() for key in group}


def _place(value: object) -> object:
    """Return a tensor's address, dtype, shape and strides; None for a value that has no such address."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    tensor = cast(torch.Tensor, value)
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _completed(
    state: StateDict, aliases: Mapping[str, list[str]], wanted: Mapping[str, Any], names: Mapping[str, str]
) -> StateDict:
    """Add shared weights under their other names, and `num_batches_tracked` where an old file lacks it."""
    found = dict(state)
    for key, group in aliases.items():
        present = next((one for one in group if one in state), None)
        if present is not None:
            found.setdefault(key, state[present])
        elif key.rpartition(".")[2] == _COUNTER:
            found.setdefault(key, wanted[names[key]])
    return found


def _refuse_complex(state: StateDict, wanted: Mapping[str, Any], source: Path) -> None:
    for key, tensor in state.items():
        if _is_complex(tensor) and not _is_complex(wanted[key]):
            raise ModelRefused(
                f"{source}: {key} is {tensor.dtype}, and the model's is {wanted[key].dtype}: its imaginary "
                "parts would be lost; expected real numbers"
            )


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


# Wrappers for training, which the wrapped module does not need when it is served.


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module without the wrappers of torch.compile, data parallelism, averaging and PEFT.

    Adapters of PEFT are merged into the weights. Parts of the module are unwrapped in place.

    Raises:
        ModelRefused: adapters can't be merged.
    """
    module = _without_wrapper(module)
    for part in list(module.modules()):
        for name, inner in part._modules.items():
            if inner is not None:
                part._modules[name] = _without_wrapper(inner)
    return module


def _without_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    while True:
        inner: Any = None
        if "_orig_mod" in module._modules:  # torch.compile's; its class takes a second to import
            inner = module._orig_mod
        elif isinstance(module, _AROUND):
            inner = module.module
        elif hasattr(module, "peft_config") and hasattr(module, "merge_and_unload"):
            inner = _merged(module)
        if inner is None:
            return module
        module = inner


_AROUND = (
    torch.nn.DataParallel,
    torch.nn.parallel.DistributedDataParallel,
    torch.optim.swa_utils.AveragedModel,
)


def _merged(module: Any) -> Any:
    try:
        return module.merge_and_unload()
    # Broad, because another library merges the adapters.
    except Exception as error:
        raise ModelRefused(
            f"{type(module).__name__}: its adapters can't be merged into the model: {error}; call "
            "model.merge_and_unload() where the model is made, and give the result"
        ) from error
