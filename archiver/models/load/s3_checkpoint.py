"""Folders of `torch.distributed.checkpoint` in S3: a rank reads the parts that torch's planner lists.

Each item of a checkpoint's files is a tensor, or a part of a tensor, as torch.save writes it: a zip file with
uncompressed numbers. Small items are read whole. For a large item, its two ends are read first, which give
the offset of the numbers, and then the rows that the rank needs.
"""

from __future__ import annotations

import io
import math
import mmap
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.distributed import (
    MAX_INDEX_BYTES,
    damage_is_refused,
    read_index,
    tensors_in,
)
from torchere.archiver.models.load.names import INDEX_NAME, names_there
from torchere.archiver.models.load.s3 import Objects, Piece
from torchere.archiver.models.load.s3_safetensors import Box, S3Weights, bytes_of

_BUFFER_BYTES = 1 << 20  # for small items, or for rows of which only a part is kept; one buffer per thread
_TINY_BYTES = 1 << 16  # limit of an item that is read whole for a part of it, and of a large item's ends
_LOCAL_HEADER_BYTES = 30  # of an entry in a zip file, without its name


class _Read(NamedTuple):
    """A part of an item, and the memory to read it into."""

    plan: ReadItem
    into: torch.Tensor
    file: str
    offset: int  # of the item in the file
    length: int  # of the whole item, in bytes
    sizes: torch.Size  # of the item's tensor
    dtype: torch.dtype

    @property
    def numbers_bytes(self) -> int:
        """The size of all numbers of the item, in bytes."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def around_bytes(self) -> int:
        """The number of bytes before and after the numbers."""
        return self.length - self.numbers_bytes

    @property
    def is_small(self) -> bool:
        """Whether the item is read whole, as is every item that torch.save does not seem to have written."""
        limit = _BUFFER_BYTES if self.plan.lengths == self.sizes else _TINY_BYTES
        has_ends = 0 < self.around_bytes <= min(_TINY_BYTES, self.numbers_bytes)
        return self.length <= limit or not has_ends

    @torch.inference_mode()  # this thread does not have the mode of the caller's thread
    def put(self, found: torch.Tensor) -> None:
        """Copy this part of `found`, the item's tensor, into `into`."""
        if found.shape != self.sizes:
            raise ValueError(f"a shard has the shape {tuple(found.shape)}, expected {tuple(self.sizes)}")
        self.into.copy_(_narrowed(found, self.plan.storage_offsets, self.plan.lengths))


class _Ends(NamedTuple):
    """The first and the last bytes of an item."""

    head: bytearray
    tail: bytearray


class CheckpointInS3(S3Weights):
    """A folder of `torch.distributed.checkpoint`.

    Raises:
        ObjectMissing: the folder has no index.
        ModelRefused: the index is damaged, or could run code.
    """

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        url = objects.url_of(INDEX_NAME)
        self._index = read_index(objects.read_all(INDEX_NAME, MAX_INDEX_BYTES), url)
        self._tensors = tensors_in(self._index)
        self.shapes = {name: (item.size, item.properties.dtype) for name, item in self._tensors.items()}

    def names(self, wanted: Sequence[str]) -> dict[str, str]:
        """See `S3Weights`; a checkpoint may have further tensors, such as the states of an optimizer."""
        return names_there(wanted, self._tensors, self.objects.url)

    def files(self) -> list[list[str]]:
        """See `S3Weights`."""
        return [[INDEX_NAME], sorted({str(info.relative_path) for info in self._index.storage_data.values()})]

    def is_in_rows(self, name: str) -> bool:
        """See `S3Weights`; False if the ranks that saved the tensor held only parts of its rows."""
        item = self._tensors[name]
        return all(chunk.sizes[1:] == item.size[1:] for chunk in item.chunks)

    def read(self, boxes: Iterable[tuple[str, Box]]) -> None:
        """See `S3Weights`. Whole rows of large items are read into the tensor; all other parts are copied."""
        with damage_is_refused(self.objects.url):
            reads = list(chain.from_iterable(self._planned(name, box) for name, box in boxes))
            large = [read for read in reads if not read.is_small]
            ends = self._ends(large)
            runs = (
                partial(self._take_whole, run) for run in _runs([read for read in reads if read.is_small])
            )
            rows = chain.from_iterable(self._rows(*each) for each in zip(large, ends, strict=True))
            self.objects.run(chain(runs, rows))

    def _planned(self, name: str, box: Box) -> Iterator[_Read]:
        item = self._tensors[name]
        wanted = ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape)
        sizes = {chunk.offsets: chunk.sizes for chunk in item.chunks}
        plans = create_read_items_for_chunk_list(name, item, [wanted])
        if sum(math.prod(plan.lengths) for plan in plans) != box.tensor.numel():
            raise ValueError(f"its index does not cover {name}")
        for plan in plans:
            info: Any = self._index.storage_data[plan.storage_index]
            if getattr(info, "transform_descriptors", None):
                raise ModelRefused(
                    f"{self.objects.url_of(info.relative_path)}: it was saved through "
                    f"{', '.join(info.transform_descriptors)}, and has no ranges; save it without extensions"
                )
            into = _narrowed(box.tensor, plan.dest_offsets, plan.lengths)
            offset: Any = plan.storage_index.offset
            dtype = item.properties.dtype
            yield _Read(plan, into, str(info.relative_path), info.offset, info.length, sizes[offset], dtype)

    def _take_whole(self, reads: Sequence[_Read]) -> None:
        """Read adjacent items in one request."""
        begin, last = reads[0].offset, reads[-1]
        content = bytearray(last.offset + last.length - begin)
        self.objects.fill(last.file, begin, [memoryview(content)])
        for read in reads:
            item = content[read.offset - begin : read.offset - begin + read.length]
            read.put(torch.load(io.BytesIO(item), map_location="cpu", weights_only=True))

    def _ends(self, reads: Sequence[_Read]) -> list[_Ends]:
        """Read the ends of large items; the end of one and the beginning of the next in one request."""
        found, pieces = [], []
        for read in reads:
            ends = _Ends(bytearray(read.around_bytes), bytearray(read.around_bytes))
            found.append(ends)
            pieces.append(Piece(read.file, read.offset, memoryview(ends.head)))
            pieces.append(Piece(read.file, read.offset + read.length - len(ends.tail), memoryview(ends.tail)))
        self.objects.run(self.objects.jobs(pieces))
        return found

    def _rows(self, read: _Read, ends: _Ends) -> Iterator[Callable[[], None]]:
        """Yield jobs that read the needed rows of an item."""
        numbers = _place_of_numbers(read, ends)
        if numbers is None:
            yield partial(self._take_whole, [read])
            return
        row_bytes = math.prod(read.sizes[1:]) * read.dtype.itemsize
        start = numbers + read.plan.storage_offsets[0] * row_bytes
        if read.into.is_contiguous() and read.plan.lengths[1:] == read.sizes[1:]:
            yield from self._bytes(read, ends, start, bytes_of(read.into))
            return
        step = max(1, _BUFFER_BYTES // row_bytes)
        for row in range(0, len(read.into), step):
            yield partial(
                self._take_parts_of_rows, read, ends, start + row * row_bytes, read.into[row:][:step]
            )

    @torch.inference_mode()  # see `put`
    def _take_parts_of_rows(self, read: _Read, ends: _Ends, start: int, into: torch.Tensor) -> None:
        rows = torch.empty((len(into), *read.sizes[1:]), dtype=read.dtype)
        for job in self._bytes(read, ends, start, bytes_of(rows)):
            job()
        into.copy_(_narrowed(rows, (0, *read.plan.storage_offsets[1:]), into.shape))

    def _bytes(self, read: _Read, ends: _Ends, start: int, into: memoryview) -> Iterator[Callable[[], None]]:
        """Copy bytes that lie in the ends of an item, and yield jobs that read the bytes between."""
        end, begin_of_tail = start + len(into), read.length - len(ends.tail)
        first = min(max(start, len(ends.head)), end)
        last = max(min(end, begin_of_tail), first)
        into[: first - start] = ends.head[start:first]
        into[last - start :] = ends.tail[last - begin_of_tail : end - begin_of_tail]
        return self.objects.jobs([Piece(read.file, read.offset + first, into[first - start : last - start])])


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offsets, lengths, strict=True))]


def _runs(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """Yield lists of adjacent items that fit into the buffer together."""
    run: list[_Read] = []
    for read in sorted(reads, key=lambda read: (read.file, read.offset)):
        if run:
            adjoins = (read.file, read.offset) == (run[-1].file, run[-1].offset + run[-1].length)
            if not adjoins or read.offset + read.length - run[0].offset > _BUFFER_BYTES:
                yield run
                run = []
        run.append(read)
    if run:
        yield run


def _place_of_numbers(read: _Read, ends: _Ends) -> int | None:
    """Return the offset of the numbers in an item; None if they are not stored contiguously in one piece."""
    with mmap.mmap(-1, read.length) as item:  # the hole for the numbers takes no memory
        item[: len(ends.head)], item[-len(ends.tail) :] = bytes(ends.head), bytes(ends.tail)
        try:
            file: Any = item
            with zipfile.ZipFile(file) as entries:
                stored = [entry for entry in entries.infolist() if "/data/" in entry.filename]
        except zipfile.BadZipFile:
            return None
        item.seek(0)
        with torch.serialization.skip_data():
            tensor = torch.load(file, map_location="cpu", weights_only=True)
        is_plain = type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.storage_offset()
        if not is_plain or (tensor.shape, tensor.dtype) != (read.sizes, read.dtype):
            return None
        if [(entry.file_size, entry.compress_type) for entry in stored] != [
            (read.numbers_bytes, zipfile.ZIP_STORED)
        ]:
            return None
        begin = stored[0].header_offset
        lengths = item[begin + _LOCAL_HEADER_BYTES - 4 : begin + _LOCAL_HEADER_BYTES]
        return (
            begin + _LOCAL_HEADER_BYTES + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
        )
