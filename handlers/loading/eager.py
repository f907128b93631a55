"""Eager models: a class from the archive's model file, and a state dict for it.

The weights are memory-mapped: the pages of the file are read on first use, and one copy of them serves all
processes. Weights on another device are copied from these pages.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.safetensors import read_safetensors
from torchere.archiver.models.steps import line_of
from torchere.archiver.scan.weights import TORCHSCRIPT, classify_file
from torchere.handlers.archive_import import ArchiveModules
from torchere.handlers.loading.weights import WORTH_MAPPING_BYTES, file_to_map
from torchere.handlers.resolve import list_classes_from_module


def load_eager(archive: ArchiveModules, model_file: str, model_pt_path: str | None) -> torch.nn.Module:
    """Construct the model's class, the one `torch.nn.Module` of the model file, and load its weights.

    The model is on the CPU, unless the class creates its tensors elsewhere.

    Args:
        archive: the archive of the model file.
        model_file: its name, as in the manifest.
        model_pt_path: the state dict, of torch.save or safetensors, which must not be truncated while the
            model lives; None keeps the weights that the class creates.

    Raises:
        RuntimeError: the model file is missing, or the weights are not a plain state dict.
        ValueError: the file does not define exactly one such class.
    """
    model: torch.nn.Module = eager_class(archive, model_file)()
    if model_pt_path:
        state = read_state_dict(model_pt_path)
        if _may_replace(model, state):
            _replace(model, state)
        else:
            model.load_state_dict(state)
    return model


def eager_class(archive: ArchiveModules, model_file: str) -> Any:
    """Return the model's class. As in TorchServe it must be the only one: nothing else identifies it.

    Raises: as `load_eager`.
    """
    file = Path(archive.model_dir, model_file)
    if not file.is_file():
        raise RuntimeError(
            f"Missing the model.py file: the manifest names {model_file}, and the archive holds no such file"
        )
    found = list_classes_from_module(archive.load(file.stem))
    classes = list(dict.fromkeys(found))  # a class with several names counts once
    modules = [item for item in classes if issubclass(item, torch.nn.Module)]
    if len(modules or classes) != 1:
        raise ValueError(
            f"Expected only one class as model definition. {modules or classes}: {model_file} must define "
            "the model's class and no other torch.nn.Module; import its parts from a file beside it"
        )
    return (modules or classes)[0]


def _replace(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Give the model's tensors the memory of the file's tensors; copy values if a tensor shares its memory.

    The tensors stay the same objects: the class may hold them by more names than `state_dict` knows.
    """
    own = model.state_dict(keep_vars=True)
    alone = {id(tensor) for tensor in own.values() if _is_alone(tensor)}  # before any gets other memory
    with torch.no_grad():
        for name, tensor in own.items():
            if id(tensor) in alone:
                tensor.data = state[name]
            else:
                _copy(tensor, state[name])


def _copy(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy the values; write repeated elements of an expanded tensor once, as torch refuses to write all."""
    once, given = tensor, values
    for dimension, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.numel():
            once, given = once.narrow(dimension, 0, 1), given.narrow(dimension, 0, 1)
    if once is not tensor and torch.equal(given.expand_as(values), values):
        once.copy_(given)
    else:
        tensor.copy_(values)  # raises torch's error if an expanded tensor has no room for them


def _may_replace(model: torch.nn.Module, state: dict[str, Any]) -> bool:
    """Return whether the model can take the file's tensors one by one.

    If not, torch has to load and convert them, because they differ from the model's tensors, or because the
    class has its own code for loading, for example to rename keys.
    """
    if not all(map(_loads_plainly, model.modules())):
        return False
    own = model.state_dict(keep_vars=True)
    if own.keys() != state.keys() or not all(_is_alike(own[name], state[name]) for name in own):
        return False
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return all(id(tensor) in held for tensor in own.values())  # others exist only in the state dict


def _is_alone(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor shares this one's memory; a view would need the values copied."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    try:
        # The memory of a NumPy array, which NumPy may share, can't be resized.
        return _owners(tensor) == _owners(torch.empty(1)) and tensor.untyped_storage().resizable()
    except (AttributeError, RuntimeError):  # torch's count is private; without it, values are copied
        return False


def _owners(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _loads_plainly(module: torch.nn.Module) -> bool:
    """Return whether loading does no more to the module than to copy its tensors."""
    # torch's own overrides add keys that old files lack.
    return (
        type(module).load_state_dict is torch.nn.Module.load_state_dict
        and type(module).state_dict is torch.nn.Module.state_dict  # an override may lack `keep_vars`
        and module._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
    )


def _is_alike(one: object, other: object) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    )


def read_state_dict(path: str) -> dict[str, Any]:
    """Return a plain state dict, memory-mapped if it is large; raise RuntimeError if the file holds none."""
    # Files of torch before 1.6 are not zip files and can't be mapped; copying a small file is as fast.
    mapped = os.path.getsize(path) >= WORTH_MAPPING_BYTES and zipfile.is_zipfile(path)
    try:
        if path.endswith(".safetensors"):
            return read_safetensors(Path(file_to_map(path)))
        file = file_to_map(path) if mapped else path
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except ModelRefused as err:
        raise RuntimeError(f"No model weights could be loaded: {err}") from err
    except pickle.UnpicklingError as err:
        raise RuntimeError(
            f"{path} holds more than tensors, and is not loaded because unpickling it could run any code "
            f"({line_of(err)}); save the weights alone: torch.save(model.state_dict(), ...)"
        ) from err
    except RuntimeError as err:
        if classify_file(Path(path)).kind == TORCHSCRIPT:
            raise RuntimeError(
                f"{path} is TorchScript, which brings its own code; pack it without --model-file"
            ) from err
        raise
    if not isinstance(state, dict):
        raise RuntimeError(
            f"{path} holds a {type(state).__name__}; expected a state_dict: "
            "torch.save(model.state_dict(), ...)"
        )
    return state


def in_eval_mode(model: Any) -> Any:
    """Return the model, switched to evaluation mode only if it is in training mode.

    It is not switched needlessly, because another thread may be using it.
    """
    return model.eval() if getattr(model, "training", False) else model
