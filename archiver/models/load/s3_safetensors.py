"""Weights that stay in S3: the interface for all formats, and safetensors files, which are read by ranges."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.names import names_there, some
from torchere.archiver.models.load.s3 import Objects, Piece

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"BOOL": torch.bool, "C64": torch.complex64},
}


class Box(NamedTuple):
    """A part of a stored tensor, and the memory to read it into."""

    tensor: torch.Tensor  # on the CPU, contiguous, with the dtype of the stored tensor
    offsets: tuple[int, ...]  # of the part in the stored tensor, one for each dimension


class S3Weights(ABC):
    """Weights in S3, each of which is read by its name."""

    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    @abstractmethod
    def names(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return the stored name of each wanted name.

        Raises:
            ModelRefused: a name is missing, or these weights belong to another model.
        """

    @abstractmethod
    def files(self) -> list[list[str]]:
        """Return lists of the objects that the ranks read; those in one list name those in the next one."""

    @abstractmethod
    def is_in_rows(self, name: str) -> bool:
        """Return whether a tensor is stored row by row, so that only whole rows are contiguous bytes."""

    @abstractmethod
    def read(self, boxes: Iterable[tuple[str, Box]]) -> None:
        """Read parts of stored tensors; each box comes with the name under which its tensor is stored.

        Raises:
            ModelRefused: an object is damaged, or can't be read (`Objects.fill`).
        """


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


class _Place(NamedTuple):
    """The place of a tensor in a file, and its shape and dtype."""

    file: str  # its name in `Objects`
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsInS3(S3Weights):
    """Files of safetensors: the constructor reads all headers, and `read` the requested rows.

    Args:
        objects: the folder of the files.
        files: the names of the files; `[""]`: the URL of `objects` is that of the only file.

    Raises:
        ModelRefused: a header is damaged, or describes more bytes than the file has.
    """

    def __init__(self, objects: Objects, files: Sequence[str]) -> None:
        super().__init__(objects)
        self._files = list(files)
        places: list[dict[str, _Place]] = [{} for _ in files]

        def look(at: int) -> None:
            places[at] = _read_header(objects, files[at])

        objects.run(partial(look, at) for at in range(len(files)))
        self._places = {name: place for each in places for name, place in each.items()}
        self.shapes = {name: (place.shape, place.dtype) for name, place in self._places.items()}

    def names(self, wanted: Sequence[str]) -> dict[str, str]:
        """See `S3Weights`."""
        found = names_there(wanted, self._places, self.objects.url)
        if others := sorted(self._places.keys() - {*found.values()}):
            raise ModelRefused(
                f"{self.objects.url}: the model has no {some(others)}; these are of another one"
            )
        return found

    def files(self) -> list[list[str]]:
        """See `S3Weights`."""
        return [self._files] if self._files == [""] else [[INDEX_NAME], self._files]

    def is_in_rows(self, name: str) -> bool:
        """See `S3Weights`."""
        return True

    def read(self, boxes: Iterable[tuple[str, Box]]) -> None:
        """See `S3Weights`; each part must consist of whole rows, which are read into its tensor directly."""
        pieces = []
        for name, (tensor, offsets) in boxes:
            place = self._places[name]
            row_bytes = math.prod(place.shape[1:]) * place.dtype.itemsize
            start = place.start + (offsets[0] * row_bytes if offsets else 0)
            pieces.append(Piece(place.file, start, bytes_of(tensor)))
        self.objects.run(self.objects.jobs(pieces))


def files_of_index(objects: Objects) -> list[str]:
    """Return the files that Hugging Face's index of a folder names.

    Raises:
        ObjectMissing: there is no index.
        ModelRefused: the index is damaged.
    """
    content = objects.read_all(INDEX_NAME, _MAX_HEADER_BYTES)
    try:
        files = sorted(set(json.loads(content)["weight_map"].values()))
        if any("/" in file or not file.endswith(".safetensors") for file in files):
            raise ValueError("it names other files than .safetensors beside it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelRefused(
            f"{objects.url_of(INDEX_NAME)}: damaged index: {error}; upload it again"
        ) from error
    return files


def _read_header(objects: Objects, file: str) -> dict[str, _Place]:
    """Read the header of a file: 8 bytes with its length, and JSON."""
    url, size = objects.url_of(file), objects.size(file)
    length = int.from_bytes(objects.read(file, 0, 8), "little")
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise ModelRefused(
            f"{url}: damaged safetensors: a header of {length} bytes in an object of {size}; upload it again"
        )
    content = objects.read(file, 8, length)
    try:
        header = json.loads(content)
        header.pop("__metadata__", None)
        places = {name: _place(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelRefused(
            f"{url}: damaged safetensors: {type(error).__name__}: {error}; upload it again"
        ) from error
    end = max((place.start + place.bytes for place in places.values()), default=8 + length)
    if end > size:
        raise ModelRefused(f"{url}: it has {size} bytes, and its header speaks of {end}; upload it again")
    return places


def _place(file: str, begin: int, entry: Mapping[str, Any]) -> _Place:
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"the dtype {dtype!r:.20} is not known")
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError("a shape or an offset is no number")
    place = _Place(file, begin + first, torch.Size(shape), _DTYPES[dtype])
    if last - first != place.bytes:
        raise ValueError(f"{last - first} bytes for the shape {shape} of {dtype}")
    return place
