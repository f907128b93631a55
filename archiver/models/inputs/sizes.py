"""Free sizes of a model's inputs, and examples of other sizes made from one example."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.request import BuildOptions

Tensors = tuple[torch.Tensor, ...]
_RANGE = re.compile(r"([0-9]+):([0-9]+)")
_SPEC = re.compile(r"([^:=]+):([0-9]+)=([0-9]+:[0-9]+)")
BATCH = "batch"


@dataclass(frozen=True, slots=True)
class FreeSize:
    """One size that may vary from `low` to `high`, at every `(input, dimension)` of `places` together."""

    name: str
    places: tuple[tuple[int, int], ...]
    low: int
    high: int

    def size_in(self, example: Tensors) -> int:
        """Return its size in the example; all places have been checked to agree."""
        index, dimension = self.places[0]
        return example[index].shape[dimension]

    def is_batch(self, example: Tensors) -> bool:
        """Return whether it is the first dimension of every input, under any name."""
        return set(self.places) == {(index, 0) for index in range(len(example))}

    def other_size(self, example: Tensors) -> int:
        """Return a size in the range that the example does not have: larger by two or by one, or smaller.

        Returns the example's size when none of these is in the range.
        """
        now = self.size_in(example)
        return next((size for size in (now + 2, now + 1, now - 1) if self.low <= size <= self.high), now)


def parse_range(text: str, what: str) -> tuple[int, int]:
    """Parse a range: `1:64` as (1, 64).

    Raises:
        ModelRefused: the text has another form, or the first number is zero or larger than the second.
    """
    match = _RANGE.fullmatch(text.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ModelRefused(f"{what} is {text!r}; expected the least and the largest size, as 1:64")
    return int(match[1]), int(match[2])


def batch_of(example: Tensors, bounds: tuple[int, int]) -> FreeSize:
    """Return the first dimension of every input as a free size within `bounds`.

    Raises:
        ModelRefused: an input has no dimension, or the first ones differ, or lie outside of the bounds.
    """
    return _checked(FreeSize(BATCH, tuple((index, 0) for index in range(len(example))), *bounds), example)


def parse_free_size(text: str, names: Sequence[str], example: Tensors) -> FreeSize:
    """Parse a free size: `ids,mask:1=2:512` is dimension 1 of `ids` and `mask`, together, from 2 to 512.

    Raises:
        ModelRefused: the text has another form, or names an input or a dimension that does not exist.
    """
    match = _SPEC.fullmatch(text.strip())
    if not match:
        raise ModelRefused(f"--dynamic-size is {text!r}; expected INPUT[,INPUT]:DIMENSION=LEAST:LARGEST")
    wanted = [name.strip() for name in match[1].split(",")]
    if unknown := [name for name in wanted if name not in names]:
        raise ModelRefused(f"--dynamic-size names the input {unknown[0]!r}; expected {', '.join(names)}")
    bounds = parse_range(match[3], f"the range of --dynamic-size {text!r}")
    places = tuple((names.index(name), int(match[2])) for name in wanted)
    return _checked(FreeSize(f"{wanted[0]}_{match[2]}", places, *bounds), example)


def sizes_of(options: BuildOptions, names: Sequence[str], example: Tensors) -> list[FreeSize]:
    """Return the sizes that the options let vary.

    Raises:
        ModelRefused: an option is wrong, or does not fit the example.
    """
    found = [parse_free_size(text, names, example) for text in options.dynamic_sizes]
    if options.dynamic_batch is not None:
        found.append(batch_of(example, parse_range(options.dynamic_batch, "--dynamic-batch")))
    return found


def resized(example: Tensors, free: FreeSize, size: int) -> Tensors:
    """Return the example with another size; its slices are repeated."""
    places = dict(free.places)
    picked = torch.arange(size) % free.size_in(example)
    return tuple(
        tensor.index_select(places[index], picked).contiguous() if index in places else tensor
        for index, tensor in enumerate(example)
    )


def _checked(free: FreeSize, example: Tensors) -> FreeSize:
    sizes = []
    for index, dimension in free.places:
        shape = tuple(example[index].shape)
        if dimension >= len(shape):
            raise ModelRefused(
                f"input {index} of the example has the shape {shape}; expected a dimension {dimension}"
            )
        sizes.append(shape[dimension])
    if len(set(sizes)) > 1:
        raise ModelRefused(
            f"the sizes of {free.name} in the example are {sizes}; expected the same for each input"
        )
    if not free.low <= sizes[0] <= free.high:
        raise ModelRefused(
            f"the size of {free.name} in the example is {sizes[0]}; expected one of {free.low} to {free.high}"
        )
    return free
