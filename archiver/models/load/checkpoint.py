"""Reads weights without a model: torch.save files, safetensors, Lightning and distributed checkpoints.

Every format becomes one flat dict of tensors. Pickles are read by torch's weights-only unpickler, unless the
caller says that the file is to be trusted. Folders of torch.distributed.checkpoint are read in one process:
torch's own reader unpickles `.metadata` without restriction, so here only the record types of that format
can be made from it, and only tensors are read; other values (steps, learning rates) are left out.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.safetensors import read_safetensors
from torchere.archiver.scan.pickles import is_plain
from torchere.archiver.scan.weights import PICKLE, SAFETENSORS, TORCH_SAVE, classify_file

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # keys under which training scripts save it
_LIGHTNING_KEY = "pytorch-lightning_version"


@dataclass(frozen=True)
class Weights:
    """Content of a weights file: a state dict and, only if pickles are allowed, the module it belongs to."""

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
        warnings.simplefilter("ignore")  # about pickle protocols and a missing process group
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
    """Return the part of `state` that a model with the state dict `wanted` takes, without its prefix.

    Lightning, DistributedDataParallel, torch.compile and training scripts put a prefix before names:
    `model.`, `module.`, `_orig_mod.`. Keys with another prefix (a loss with weights, an averaged copy) are
    left out. If several names are one parameter in the model, one of them is enough: safetensors stores only
    one.

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
    """Return, for each key, all keys that are the same numbers in the model, including itself."""
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


_METADATA = ".metadata"
_MAX_METADATA_BYTES = 2**30
_RECORDS: dict[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath", "PurePosixPath", "Path", "PurePath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}


def is_distributed_checkpoint(path: Path) -> bool:
    """Return whether the folder is a distributed checkpoint: it has a `.metadata`."""
    return (path / _METADATA).is_file()


def read_distributed(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the checkpoint, merged from their shards, by their flat names.

    Raises:
        ModelRefused: its index is not a valid one, or a shard is missing or damaged.
    """
    reader = _Reader(path)
    try:
        index = reader.read_metadata()
        state = _room_for(index, path)
        load(dict(state), storage_reader=reader, no_dist=True)
    except ModelRefused:
        raise
    # The errors for a damaged shard differ by torch version; CheckpointException derives from BaseException.
    except (
        CheckpointException,
        OSError,
        RuntimeError,
        ValueError,
        AttributeError,
        KeyError,
    ) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ModelRefused(f"{path}: damaged distributed checkpoint: {first[:200]}") from error
    return state


def _room_for(index: metadata.Metadata, path: Path) -> dict[str, torch.Tensor]:
    """Return empty tensors to read into; refuse an index with more bytes than the shards have."""
    found = {
        name: item
        for name, item in index.state_dict_metadata.items()
        if isinstance(item, metadata.TensorStorageMetadata)
    }
    wanted_bytes = sum(math.prod(item.size) * item.properties.dtype.itemsize for item in found.values())
    shards = [file for file in path.rglob("*") if file.is_file() and file.name != _METADATA]
    there_bytes = sum(file.stat().st_size for file in shards)
    if wanted_bytes > there_bytes:
        raise ModelRefused(
            f"{path}: its index speaks of {wanted_bytes} bytes, and its files have {there_bytes}"
        )
    return {name: torch.empty(tuple(item.size), dtype=item.properties.dtype) for name, item in found.items()}


class _Reader(filesystem.FileSystemReader):
    """torch's reader of such folders, with a restricted reader of the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Read the index; only its own record types can be made."""
        file = Path(str(self.path), _METADATA)
        if file.stat().st_size > _MAX_METADATA_BYTES:
            raise ModelRefused(f"{file}: larger than {_MAX_METADATA_BYTES} bytes")
        found = _read_metadata(file)
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _read_metadata(file: Path) -> metadata.Metadata:
    try:
        found = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
    except ModelRefused as error:
        raise ModelRefused(f"{file}: {error}") from error
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
    ) as error:
        raise ModelRefused(f"{file}: damaged index of a distributed checkpoint: {error}") from error
    if not isinstance(found, metadata.Metadata):
        raise ModelRefused(f"{file}: it holds a {type(found).__name__}; expected the index of a checkpoint")
    for name, item in found.storage_data.items():
        parts = Path(str(getattr(item, "relative_path", ".."))).parts
        if ".." in parts or Path(*parts).is_absolute():
            raise ModelRefused(f"{file}: {ascii(name)[:80]} is said to lie outside of the folder")
    return found


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that makes only the records of a checkpoint's index."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()) or (is_plain(f"{module}.{name}") and "." not in name):
            return super().find_class(module, name)
        raise ModelRefused(
            f"its index imports {module}.{name}, and reading it could run any code; do not use it"
        )
