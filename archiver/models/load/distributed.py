"""Reads folders of torch.distributed.checkpoint: all tensors in one process, or in each rank its part.

torch's own reader unpickles `.metadata` without restriction. Here the pickle can create only the record types
of that format, and only tensors are read, not other values (steps, learning rates). torch's reader takes half
a second to import, so a rank imports this module only for such a folder.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.names import INDEX_NAME, names_there
from torchere.archiver.models.steps import line_of
from torchere.archiver.scan.pickles import is_plain

_AGAIN = "copy the whole folder again, or save the checkpoint again"
MAX_INDEX_BYTES = 2**30
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


def read_distributed(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the checkpoint, merged from their shards, by their flat names.

    Raises:
        ModelRefused: the index is invalid, or a shard is missing or damaged.
    """
    with damage_is_refused(path):
        reader = _Reader(path)
        found = _tensors_in(reader.read_metadata(), path)
        state = {
            name: torch.empty(tuple(item.size), dtype=item.properties.dtype) for name, item in found.items()
        }
        load(dict(state), storage_reader=reader, no_dist=True)
    return state


def read_parts(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Read a checkpoint into the tensors of `state` by name; of a distributed tensor, only this rank's part.

    The checkpoint may have been saved by another number of ranks; its names may have a prefix (`model.`).

    Raises:
        ModelRefused: a name or a shape differs from the checkpoint's; or as `read_distributed`.
    """
    with damage_is_refused(path):
        reader = _Reader(path)
        there = _tensors_in(reader.read_metadata(), path)
        found = names_there(list(state), there, path)
        wanted = {found[name]: tensor for name, tensor in state.items()}
        for name, tensor in wanted.items():
            size = tuple(there[name].size)
            if size != tuple(tensor.shape):
                raise ModelRefused(
                    f"{path}: {name} has the shape {size}, and the model's {tuple(tensor.shape)}"
                )
        load(wanted, storage_reader=reader, no_dist=True)


@contextmanager
def damage_is_refused(where: Path | str) -> Iterator[None]:
    """Turn the errors of torch's readers in the block into one ModelRefused that names the checkpoint."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing process group
            yield
    except ModelRefused:
        raise
    # The errors for a damaged shard differ by torch version; CheckpointException derives from BaseException.
    except (
        CheckpointException,
        pickle.UnpicklingError,
        OSError,
        RuntimeError,
        ValueError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:
        reason = line_of(error, -1)
        raise ModelRefused(f"{where}: damaged distributed checkpoint: {reason}; {_AGAIN}") from error


def tensors_in(index: metadata.Metadata) -> dict[str, metadata.TensorStorageMetadata]:
    """Return the tensors of an index by name; other values (steps, learning rates) are left out."""
    return {
        name: item
        for name, item in index.state_dict_metadata.items()
        if isinstance(item, metadata.TensorStorageMetadata)
    }


def _tensors_in(index: metadata.Metadata, path: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """Return the tensors of an index by name; refuse an index of more bytes than the shards contain."""
    found = tensors_in(index)
    wanted_bytes = sum(math.prod(item.size) * item.properties.dtype.itemsize for item in found.values())
    shards = [file for file in path.rglob("*") if file.is_file() and file.name != INDEX_NAME]
    there_bytes = sum(file.stat().st_size for file in shards)
    if wanted_bytes > there_bytes:
        raise ModelRefused(
            f"{path}: its index speaks of {wanted_bytes} bytes, and its files have {there_bytes}; {_AGAIN}"
        )
    return found


class _Reader(filesystem.FileSystemReader):
    """torch's reader of checkpoint folders, which unpickles the index with the restricted `read_index`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Read the index; the pickle can create only the record types of the format."""
        file = Path(str(self.path), INDEX_NAME)
        if file.stat().st_size > MAX_INDEX_BYTES:
            raise ModelRefused(f"{file}: larger than {MAX_INDEX_BYTES} bytes; {_AGAIN}")
        found = read_index(file.read_bytes(), file)
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def read_index(content: bytes, file: Path | str) -> metadata.Metadata:
    """Return the index of a checkpoint, a pickle that can create only the record types of its format.

    Args:
        content: the bytes of the file `.metadata`.
        file: the name of the file in errors.

    Raises:
        ModelRefused: the index is damaged, imports another type, or names files outside of its folder.
    """
    try:
        found = _IndexUnpickler(io.BytesIO(content)).load()
    except ModelRefused as error:
        raise ModelRefused(f"{file}: {error}") from error
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelRefused(f"{file}: damaged index of a distributed checkpoint: {error}; {_AGAIN}") from error
    if not isinstance(found, metadata.Metadata):
        raise ModelRefused(f"{file}: it holds a {type(found).__name__}; expected the index of a checkpoint")
    for name, item in found.storage_data.items():
        parts = Path(str(getattr(item, "relative_path", ".."))).parts
        if ".." in parts or Path(*parts).is_absolute():
            raise ModelRefused(f"{file}: {ascii(name)[:80]} is said to lie outside of the folder")
    return found


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that creates only the record types of a checkpoint's index."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()) or (is_plain(f"{module}.{name}") and "." not in name):
            return super().find_class(module, name)
        raise ModelRefused(
            f"its index imports {module}.{name}, and reading it could run any code; do not use it"
        )
