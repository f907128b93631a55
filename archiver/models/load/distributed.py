"""Reads folders of torch.distributed.checkpoint in one process, without running code in them.

torch's own reader unpickles `.metadata` without restriction. Here only the record types of that format can be
made from it, and only tensors are read; other values (steps, learning rates) are left out.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from torchere.archiver.errors import ModelRefused
from torchere.archiver.scan.pickles import is_plain

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
        found = _unpickled(file)
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _unpickled(file: Path) -> metadata.Metadata:
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
