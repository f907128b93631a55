"""Reads weights without a model: torch.save files, safetensors, Lightning and distributed checkpoints.

Whatever the file, it becomes one flat dict of tensors. Pickles are read by torch's weights-only unpickler,
unless the caller says that the file is to be trusted.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.distributed import is_distributed_checkpoint, read_distributed
from torchere.archiver.models.safetensors import read_safetensors
from torchere.archiver.models.state_fitting import StateDict
from torchere.archiver.weights import PICKLE, SAFETENSORS, TORCH_SAVE, classify_file

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # where training scripts put it
_LIGHTNING_KEY = "pytorch-lightning_version"


@dataclass(frozen=True)
class Weights:
    """What a file of weights holds: a state dict, and (only if pickles are allowed) the module it is of."""

    kind: str
    tensors: StateDict
    module: torch.nn.Module | None = None


def read_weights(path: Path, allow_pickle: bool = False) -> Weights:
    """Read a file or a folder of weights to the CPU.

    Raises:
        ModelRefused: it is damaged, of another kind, or a pickle of more than tensors.
        OSError: it can't be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # protocols of pickles, lack of a process group
        return _read(path, allow_pickle)


def _read(path: Path, allow_pickle: bool) -> Weights:
    if path.is_dir():
        if not is_distributed_checkpoint(path):
            raise ModelRefused(f"{path}: a folder without .metadata; expected a torch.distributed.checkpoint")
        return Weights("distributed checkpoint", read_distributed(path))
    kind = classify_file(path).kind
    if kind == SAFETENSORS:
        return Weights("safetensors", read_safetensors(path))
    if kind not in (TORCH_SAVE, PICKLE):
        raise ModelRefused(f"{path}: this is {kind}; expected a state dict (torch.save or safetensors)")
    return _weights_of(path, _unpickled(path, allow_pickle))


def _unpickled(path: Path, allow_pickle: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        found = classify_file(path).foreign
        names = f" (it imports {', '.join(found[:3])})" if found else ""
        raise ModelRefused(
            f"{path}: its pickle holds more than tensors{names}, and reading it could run any code; save the "
            "weights alone with torch.save(model.state_dict(), ...), or trust the file with --allow-pickle"
        ) from error
    except (ImportError, AttributeError) as error:
        raise ModelRefused(
            f"{path}: the code of what was pickled is not here: {error}; set PYTHONPATH to its folder, or, "
            "where it was a notebook or a script (__main__), save the weights alone with "
            "torch.save(model.state_dict(), ...) and give --model-file"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ModelRefused(f"{path}: damaged, or not written by torch.save: {first[:200]}") from error


def _weights_of(path: Path, found: Any) -> Weights:
    if isinstance(found, torch.nn.Module):
        return Weights("pickled module", dict(found.state_dict()), found)
    if isinstance(found, dict):
        kind = "Lightning checkpoint" if _LIGHTNING_KEY in found else "state dict"
        inner = [found.get(key) for key in _WRAPPERS]
        candidates = [one for one in (found, *inner) if _is_state_dict(one)]
        if candidates:  # an empty one is that of a model without parameters
            return Weights(kind, dict(next(filter(None, candidates), candidates[0])))
    raise ModelRefused(
        f"{path}: it holds a {type(found).__name__} without a state dict; expected names and tensors: "
        "torch.save(model.state_dict(), ...)"
    )


def _is_state_dict(value: Any) -> TypeGuard[StateDict]:
    return isinstance(value, dict) and all(
        isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items()
    )
