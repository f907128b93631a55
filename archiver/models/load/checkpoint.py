"""Reads weights without a model: torch.save files, safetensors, Lightning and distributed checkpoints.

Whatever the file, it becomes one flat dict of tensors. Pickles are read by torch's weights-only unpickler,
unless the caller says that the file is to be trusted.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, cast

import torch

from torchere.archiver.container.entries import open_regular
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.distributed import is_distributed_checkpoint, read_distributed
from torchere.archiver.scan.weights import PICKLE, SAFETENSORS, TORCH_SAVE, classify_file

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


_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the file by name, on the CPU.

    Raises:
        ModelRefused: the file is cut off, or its header is wrong or says what is not so.
        OSError: it can't be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            _refuse(path, f"its header is said to have {length} bytes, and the file has {size}")
        header = _header(path, file.read(length))
        room = size - 8 - length
        _check_ranges(path, header, room)
        numbers = torch.empty(room, dtype=torch.uint8)
        if room and file.readinto(numbers.numpy().data) != room:  # type: ignore[attr-defined]
            _refuse(path, "it became shorter while it was read")
    return {name: _tensor(entry, numbers) for name, entry in header.items()}


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path}: not safetensors: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        _refuse(path, "its header is not an object")
    header.pop("__metadata__", None)
    return header


def _check_ranges(path: Path, header: dict[str, Any], room: int) -> None:
    """Refuse ranges that are not as long as their tensors, or do not cover all numbers once.

    The format asks for that; bytes that many tensors share would be as many copies in memory.
    """
    ranges = sorted((*_range(path, name, entry, room), name) for name, entry in header.items())
    cursor = 0
    for begin, end, name in ranges:
        if begin != cursor:
            found = (
                "overlaps another tensor" if begin < cursor else "has bytes before it that are no tensor's"
            )
            _refuse(path, f"{ascii(name)[:60]} {found}")
        cursor = end
    if cursor != room:
        _refuse(path, f"{room - cursor} bytes at its end are no tensor's")


def _range(path: Path, name: str, entry: Any, room: int) -> tuple[int, int]:
    """Where the bytes of a tensor are said to lie."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        _refuse(path, f"{ascii(name)[:60]} has the dtype {ascii(dtype)[:40]}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        _refuse(path, f"{ascii(name)[:60]} has no shape, or no two data_offsets")
    begin, end = offsets
    wanted = math.prod(shape) * _DTYPES[dtype].itemsize
    if not begin <= end <= room or end - begin != wanted:
        _refuse(path, f"{ascii(name)[:60]} has {wanted} bytes, said to lie at {begin} to {end} of {room}")
    return begin, end


def _tensor(entry: dict[str, Any], numbers: torch.Tensor) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    # A copy: an offset need not suit the dtype, and the whole file should not live as long as one tensor.
    return numbers[begin:end].clone().view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ModelRefused(f"{path}: damaged safetensors: {reason}; get the file again")
