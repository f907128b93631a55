"""Loads each rank's part of weights that stay in S3, without downloading the other parts.

A file stores a weight row by row, so a rank that keeps columns of it would have to download all rows.
Instead, each rank that shares the weight downloads some rows, and the ranks exchange columns.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.names import INDEX_NAME
from torchere.archiver.models.load.s3 import ObjectMissing, Objects
from torchere.archiver.models.load.s3_safetensors import INDEX_NAME as SAFETENSORS_INDEX
from torchere.archiver.models.load.s3_safetensors import Box, S3Weights, SafetensorsInS3, files_of_index
from torchere.archiver.models.spread.tensor import Part

logger = logging.getLogger(__name__)

# Bytes that are read before they go to the device: more would not be faster, and a GPU's part may be larger
# than the memory of the machine.
_BATCH_BYTES = 1 << 30
_UNREAD = -(1 << 62)


def open_weights(url: str) -> S3Weights:
    """Open the weights at an S3 URL. The caller closes their `objects`.

    The URL names a `.safetensors` object, or a folder: a checkpoint of `torch.distributed.checkpoint`, or
    `.safetensors` objects with Hugging Face's index.

    Raises:
        ModelRefused: there are no weights, they are damaged, or they can't be read.
    """
    objects = Objects(url)
    try:
        if url.endswith(".safetensors"):
            return SafetensorsInS3(objects, [""])
        from torchere.archiver.models.load.s3_checkpoint import CheckpointInS3  # noqa: PLC0415 - half a second

        try:
            return CheckpointInS3(objects)
        except ObjectMissing as error:
            missing = error
        try:
            return SafetensorsInS3(objects, files_of_index(objects))
        except ObjectMissing:
            raise ModelRefused(
                f"{missing}; expected {INDEX_NAME} of torch.distributed.checkpoint or {SAFETENSORS_INDEX} in "
                "the folder, or the URL of a .safetensors object"
            ) from None
    except BaseException:
        objects.close()
        raise


class _Wanted(NamedTuple):
    """A weight of the model."""

    stored: str  # its name in S3
    dtype: torch.dtype  # in the model; the stored tensor may have another


class FromS3:
    """The weights of a whole model, which `fill` asks for one by one (`Weights`).

    Args:
        source: the stored weights.
        model: made by `without_weights`, and not cut yet.

    Raises:
        ModelRefused: a weight is missing, has another shape, or does not belong to the model.
    """

    def __init__(self, source: S3Weights, model: torch.nn.Module) -> None:
        self._source = source
        self._parts: Mapping[str, Part] = {}
        self._exchange: Any = None  # see `take_part`
        self._device = torch.device("cpu")
        self._read: dict[str, torch.Tensor] = {}
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict(keep_vars=True)}
        names: dict[int, list[str]] = {}  # by id of the tensor; several if layers share it
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        chosen = {each[0]: _stored_one(each, source.shapes) for each in names.values()}
        stored = source.names(list(chosen.values()))
        self._wanted = {name: _Wanted(stored[other], tensors[name].dtype) for name, other in chosen.items()}
        for name, wanted in self._wanted.items():
            found = source.shapes[wanted.stored][0]
            if found != tensors[name].shape:
                raise ModelRefused(
                    f"{source.objects.url}: {wanted.stored} has the shape {tuple(found)}, and the model's "
                    f"{tuple(tensors[name].shape)}"
                )

    def take_part(
        self,
        model: torch.nn.Module,
        parts: Mapping[str, Part],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Restrict the weights to the parts that this rank keeps; call it before `fill`.

        Args:
            model: cut to this rank's stage.
            parts: the part of each weight that is split, by name.
            group: the ranks that share each layer.
            device: where the weights go.
        """
        self._parts, self._exchange, self._device = parts, _Exchange(group), device
        kept = {**dict(model.named_parameters()), **model.state_dict()}
        self._wanted = {name: wanted for name, wanted in self._wanted.items() if name in kept}
        boxes = [self._box(name, "meta") for name in self._wanted]
        self._source.objects.expected_bytes = sum(box.tensor.nbytes for box in boxes)

    def shapes(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """See `Weights`."""
        return {
            name: (self._source.shapes[wanted.stored][0], wanted.dtype)
            for name, wanted in self._wanted.items()
        }

    def whole(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        if name not in self._read:
            self._read_from(name)
        return self._read.pop(name)

    def part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """See `Weights`; `where` is ignored, because `take_part` has set the part."""
        return self.whole(name)

    def _read_from(self, first: str) -> None:
        """Read this weight and the next ones. All ranks of the group call it with the same names."""
        names = list(self._wanted)
        batch: dict[str, Box] = {}
        batch_bytes = 0
        for name in names[names.index(first) :]:
            batch[name] = self._box(name, "cpu")
            batch_bytes += batch[name].tensor.nbytes
            if batch_bytes >= _BATCH_BYTES:
                break
        self._source.read(
            (self._wanted[name].stored, box) for name, box in batch.items() if box.tensor.numel()
        )
        for name in list(batch):
            tensor = batch.pop(name).tensor.to(self._device)
            part = self._parts.get(name)
            if part is not None and self._is_exchanged(name, part):
                shape = self._source.shapes[self._wanted[name].stored][0]
                tensor = self._exchange.columns(tensor, shape, part)
            self._read[name] = tensor.to(self._wanted[name].dtype)

    def _is_exchanged(self, name: str, part: Part) -> bool:
        return part.dimension != 0 and self._source.is_in_rows(self._wanted[name].stored)

    def _box(self, name: str, device: str) -> Box:
        """Return memory for the part of a weight that this rank reads."""
        shape, dtype = self._source.shapes[self._wanted[name].stored]
        part = self._parts.get(name)
        where = [slice(0, size) for size in shape]
        if part is not None and self._is_exchanged(name, part):
            where[0] = _own_rows(shape[0], part)[part.rank]
        elif part is not None:
            where = list(part.slices(shape))
        sizes = [place.stop - place.start for place in where]
        return Box(torch.empty(sizes, dtype=dtype, device=device), tuple(place.start for place in where))

    def finish(self) -> None:
        """Check that all ranks have read the same version of each object; call it in all ranks.

        Raises:
            ModelRefused: the versions differ.
        """
        objects = self._source.objects
        etags = objects.etags()
        for names in self._source.files():
            differ = _differing([etags.get(name) for name in names], self._device)
            if differ:
                raise ModelRefused(
                    f"{objects.url_of(names[differ[0]])}: it has changed while it was read: ranks have "
                    "different versions of it; write new weights under a new key, and name that in the "
                    "archive"
                )
        logger.info("%s", objects.progress())


def _stored_one(names: Sequence[str], there: Mapping[str, object]) -> str:
    """Return the name under which a shared weight is stored (safetensors stores it once), else the first."""
    ends = {name: f".{name}" for name in names}
    return next(
        (name for name in names if name in there or any(other.endswith(ends[name]) for other in there)),
        names[0],
    )


def _own_rows(rows: int, part: Part) -> list[slice]:
    """Return which rows of an exchanged weight each rank downloads."""
    size = math.ceil(rows / part.ranks)
    return [slice(min(rows, rank * size), min(rows, (rank + 1) * size)) for rank in range(part.ranks)]


class _Exchange:
    """Exchanges rows of weights for columns between the ranks that share the weights."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent = torch.empty(0, dtype=torch.uint8)  # reused, as freeing it leaves holes between weights

    def columns(self, rows: torch.Tensor, shape: torch.Size, part: Part) -> torch.Tensor:
        """Return this rank's columns of a weight of this shape, given the rows that it has downloaded."""
        width = shape[1] // part.ranks
        if self._sent.numel() < rows.nbytes:
            self._sent = torch.empty(rows.nbytes, dtype=torch.uint8, device=rows.device)
        sent = self._sent[: rows.nbytes]
        sent.view(rows.dtype).view(part.ranks, len(rows), width).copy_(
            rows.view(len(rows), part.ranks, width).transpose(0, 1)
        )
        fits = len(rows) * part.ranks == shape[0]  # then the columns take the memory of the rows
        found = rows.view(shape[0], width) if fits else rows.new_empty((shape[0], width))
        counts = [(each.stop - each.start) * width * rows.itemsize for each in _own_rows(shape[0], part)]
        # As bytes, because gloo supports few dtypes.
        dist.all_to_all_single(
            found.view(-1).view(torch.uint8),
            sent,
            counts,
            [counts[part.rank]] * part.ranks,
            group=self._group,
        )
        return found


def _differing(etags: Sequence[str | None], device: torch.device) -> list[int]:
    """Return the indices of objects that ranks read in different versions; None: not read by this rank."""
    numbers = [
        _UNREAD if etag is None else int.from_bytes(hashlib.sha256(etag.encode()).digest()[:7], "big")
        for etag in etags
    ]
    largest = torch.tensor(
        [numbers, [number if number == _UNREAD else -number for number in numbers]], device=device
    )
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [at for at, (most, least) in enumerate(largest.T.tolist()) if most not in (-least, _UNREAD)]
