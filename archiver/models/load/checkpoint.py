"""Reads weights without a model: torch.save files, safetensors, Lightning and distributed checkpoints.

Every format becomes one flat dict of tensors. Pickles are read by torch's weights-only unpickler, unless the
caller trusts the file (`allow_pickle`). `distributed.py` reads folders of torch.distributed.checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.names import WRAPPERS, is_distributed_checkpoint, some
from torchere.archiver.models.load.safetensors import read_safetensors
from torchere.archiver.models.load.weight_only import register_torchao
from torchere.archiver.models.steps import line_of, refusing
from torchere.archiver.scan.weights import PICKLE, SAFETENSORS, TORCH_SAVE, classify_file

_EXPECTED = "expected names and tensors: torch.save(model.state_dict(), ...)"
_DEEPEST = 3  # levels of dicts that are searched for state dicts
_LIGHTNING_KEY = "pytorch-lightning_version"

StateDict = dict[str, Any]
"""Tensors by name; values that are not tensors are settings of int8 layers, or are ignored."""


@dataclass(frozen=True)
class HyperParameters:
    """The arguments that a Lightning checkpoint has for its class.

    `parameter` names the one parameter that takes all arguments, as in `__init__(self, hparams)`; None: each
    argument has a parameter of its own.
    """

    values: Mapping[str, Any]
    parameter: str | None = None


@dataclass(frozen=True)
class Weights:
    """Content of a weights file: its state dicts and, only if pickles are allowed, the module in it.

    `states` maps the path of keys to each state dict (`model.state_dict`; empty for the whole file), the most
    probable ones first. It has at least one entry.
    """

    kind: str
    states: Mapping[str, StateDict]
    module: torch.nn.Module | None = None
    hyper_parameters: HyperParameters | None = None


_MOST_NAMES = 5
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pt2", ".onnx")


def read_weights(path: Path, allow_pickle: bool = False) -> Weights:
    """Read a file or a folder of weights to the CPU.

    Raises:
        ModelRefused: the file is damaged, of another kind, or a pickle of more than tensors.
        OSError: the file can't be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols and a missing process group
        return _read(path, allow_pickle)


def _read(path: Path, allow_pickle: bool) -> Weights:
    if path.is_dir():
        if is_zero_checkpoint(path):
            return Weights("DeepSpeed ZeRO checkpoint", {"": _read_zero(path, allow_pickle)})
        if not is_distributed_checkpoint(path):
            raise ModelRefused(f"{path}: {_about_folder(path)}")
        from torchere.archiver.models.load.distributed import read_distributed  # noqa: PLC0415 - half a second

        return Weights("distributed checkpoint", {"": read_distributed(path)})
    kind = classify_file(path).kind
    if kind == SAFETENSORS:
        return Weights("safetensors", {"": read_safetensors(path)})
    if kind not in (TORCH_SAVE, PICKLE):
        raise ModelRefused(f"{path}: this is {kind}; expected a state dict (torch.save or safetensors)")
    return _weights_of(path, _unpickled(path, allow_pickle))


def _about_folder(path: Path) -> str:
    """Return a text about the files in a folder that is not a model, with advice."""
    names = sorted(file.name for file in path.iterdir())
    weights = next((name for name in names if name.endswith(_WEIGHTS)), None)
    shown = ", ".join(names[:_MOST_NAMES]) or "nothing"
    others = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    advice = f"give {path / weights}, with --model-file if it is weights alone" if weights else "give a file"
    return (
        f"a folder of {shown}{others}, and no model: Hugging Face's have config.json, as save_pretrained "
        f"writes it, and a torch.distributed.checkpoint has .metadata; {advice}"
    )


def _unpickled(path: Path, allow_pickle: bool, known: bool = False) -> Any:
    """Return the content of a file; `known`: the classes of torchao's tensors are registered."""
    try:
        return torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        found = classify_file(path).foreign
        if not known and any(name.startswith("torchao.") for name in found):
            register_torchao()
            return _unpickled(path, allow_pickle, known=True)
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
        raise ModelRefused(f"{path}: damaged, or not written by torch.save: {line_of(error)}") from error


def _weights_of(path: Path, found: Any) -> Weights:
    # A checkpoint may contain the whole module, next to the epoch and other values.
    values = found.values() if isinstance(found, dict) else [found]
    module = next((value for value in values if isinstance(value, torch.nn.Module)), None)
    if module is not None:
        return Weights("pickled module", {"": dict(module.state_dict())}, module)
    if not isinstance(found, dict):
        raise ModelRefused(f"{path}: it holds a {type(found).__name__} without a state dict; {_EXPECTED}")
    states = dict(_states_in(found))
    if not states:
        keys = some(list(map(str, found)), 20)
        raise ModelRefused(f"{path}: it holds a dict without a state dict, with the keys {keys}; {_EXPECTED}")
    filled = {name: state for name, state in states.items() if state}
    if _LIGHTNING_KEY not in found:
        return Weights("state dict", filled or states)
    return Weights("Lightning checkpoint", filled or states, hyper_parameters=_hyper_parameters(found))


def _states_in(found: Mapping[Any, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, StateDict]]:
    """Yield the state dicts in nested dicts, each with the path of its keys."""
    if _is_state_dict(found):
        yield path, cast(StateDict, found)  # not a copy, which would lose its `_metadata` (see `fitting.py`)
    if depth == _DEEPEST:
        return
    known = [key for key in WRAPPERS if key in found]
    for key in (*known, *(key for key in found if isinstance(key, str) and key not in known)):
        if isinstance(found[key], Mapping):
            yield from _states_in(found[key], f"{path}.{key}" if path else key, depth + 1)


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    """Return whether the dict is empty (no parameters), or has string keys, some tensors and no dicts."""
    if not all(isinstance(key, str) for key in value) or any(
        isinstance(item, Mapping) for item in value.values()
    ):
        return False
    return not value or any(isinstance(item, torch.Tensor) for item in value.values())


def _hyper_parameters(found: Mapping[str, Any]) -> HyperParameters | None:
    """Return the arguments as Lightning's own loader takes them from a checkpoint."""
    values, name = found.get("hyper_parameters"), found.get("hparams_name")
    if not isinstance(values, Mapping) or not values:
        return None
    return HyperParameters(dict(values), name if isinstance(name, str) and name != "kwargs" else None)


_ZERO_SCRIPT = "zero_to_fp32.py"  # DeepSpeed puts it beside the checkpoint
_ZERO_FILES = "*zero_pp_rank_*_optim_states.pt"


def is_zero_checkpoint(path: Path) -> bool:
    """Return whether DeepSpeed saved the folder with ZeRO, or the subfolder of one training step."""
    return any(any(path.glob(pattern)) for pattern in (_ZERO_FILES, f"*/{_ZERO_FILES}"))


def _read_zero(path: Path, allow_pickle: bool) -> StateDict:
    """Return the weights, merged by DeepSpeed's own code; the script in the folder is not run."""
    by_hand = f"or run `python {_ZERO_SCRIPT} . OUTPUT` in it where it was trained, and give OUTPUT"
    if importlib.util.find_spec("deepspeed") is None:
        raise ModelRefused(
            f"{path}: a checkpoint of DeepSpeed (ZeRO), whose weights lie in pieces among the optimizer's "
            f"states; install deepspeed, which puts them together, {by_hand}"
        )
    if not allow_pickle:
        raise ModelRefused(
            f"{path}: a checkpoint of DeepSpeed (ZeRO), whose files DeepSpeed unpickles, and that could run "
            f"any code; trust it with --allow-pickle, {by_hand}"
        )
    folder, step = (path, None) if any(path.glob(f"*/{_ZERO_FILES}")) else (path.parent, path.name)
    with refusing(f"{path}: putting the pieces together by DeepSpeed"):
        script: Any = importlib.import_module("deepspeed.utils.zero_to_fp32")
        found = script.get_fp32_state_dict_from_zero_checkpoint(str(folder), step)
    return {name: tensor.detach().clone() for name, tensor in found.items()}
