"""Free sizes of a model's inputs, and examples of other sizes made from one example."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.request import BuildOptions
from torchere.archiver.signature import ANY, Signature, TensorSpec, common_limit

Tensors = tuple[torch.Tensor, ...]
LARGEST = 2**31  # the maximum of a size without a limit
_RANGE = re.compile(r"([0-9]+):([0-9]*)(?::([0-9]+))?")
_MULTIPLES = re.compile(r"([0-9]+)\*[a-z_]+")
_SPEC = re.compile(r"(.+)[:.]([0-9]+)=([^=]+)")
BATCH = "batch"
TOKENS, DECODER_TOKENS = "tokens", "decoder_tokens"  # lengths that vary by default for a Hugging Face folder
_FAR = 16  # sizes are tried up to this multiple of the example's size, or up to `_FAR_SIZE`
_FAR_SIZE = 1024
_MOST_ROWS = 64  # limit on the rows of a batch at which models are compared
_MOST_VALUES = 2**24  # limit on the elements of all inputs together in one trial


@dataclass(frozen=True, slots=True)
class FreeSize:
    """One size that may vary from `low` to `high`; every `(input, dimension)` in `places` has the same size.

    The size is always a multiple of `multiple`.
    """

    name: str
    places: tuple[tuple[int, int], ...]
    low: int
    high: int
    multiple: int = 1

    def size_in(self, example: Tensors) -> int:
        """Return the size in the example, which is the same in all places."""
        index, dimension = self.places[0]
        return example[index].shape[dimension]

    def is_batch(self, example: Tensors) -> bool:
        """Return whether this size is the first dimension of every input; its name does not matter."""
        return set(self.places) == {(index, 0) for index in range(len(example))}

    def option(self, names: Sequence[str]) -> str:
        """Return the inputs and the dimension as the option takes them: `ids,mask.1`.

        A size at several dimensions, which the option can't name, gives `a.1 and a.2`.
        """
        dimensions = {dimension for _, dimension in self.places}
        return " and ".join(
            f"{','.join(names[index] for index, its in self.places if its == dimension)}.{dimension}"
            for dimension in sorted(dimensions)
        )

    def takes(self, size: int) -> bool:
        """Return whether this size may have the value `size`."""
        return self.low <= size <= self.high and size % self.multiple == 0

    def smallest(self, least: int) -> int:
        """Return the smallest allowed size of at least `least`, or else the smallest allowed size."""
        sizes = [-(-low // self.multiple) * self.multiple for low in (max(self.low, least), self.low)]
        return next(filter(self.takes, sizes), sizes[-1])

    def other_size(self, example: Tensors) -> int:
        """Return another size than the example's: two steps or one step larger, or one step smaller.

        Return the example's size if none of these is in the range.
        """
        now, step = self.size_in(example), self.multiple
        return next((size for size in (now + 2 * step, now + step, now - step) if self.takes(size)), now)

    def far_sizes(self, example: Tensors) -> list[int]:
        """Return the smallest size, and the largest size to try; without the example's size."""
        now, values = self.size_in(example), sum(tensor.numel() for tensor in example)
        most = min(self.high, max(_FAR * now, _FAR_SIZE), max(now * _MOST_VALUES // max(values, 1), now))
        ends = (self.smallest(self.low), most // self.multiple * self.multiple)
        return [size for size in dict.fromkeys(ends) if size != now]

    def sizes_to_try(self, example: Tensors) -> list[int]:
        """Return a size near the example's size and the sizes of `far_sizes`, but not the example's size."""
        found = dict.fromkeys([self.other_size(example), *self.far_sizes(example)])
        return [size for size in found if size != self.size_in(example)]

    def sizes_to_compare(self, example: Tensors, ends: bool = False) -> list[int]:
        """Return the sizes in `sizes_to_try` at which a packed model is compared with the original.

        For a batch it is one size, because large batches take long; with `ends` also the smallest and the
        largest one, up to 64 rows.
        """
        if not self.is_batch(example):
            return self.sizes_to_try(example)
        most = max(_MOST_ROWS, self.size_in(example) + 2 * self.multiple)
        found = replace(self, high=min(self.high, most)).sizes_to_try(example)
        return found if ends else found[:1]

    @property
    def text(self) -> str:
        """The range as the option takes it: `2:512`, `64:`, `32*k`, `64:1024:32`."""
        high = "" if self.high >= LARGEST else str(self.high)
        if self.multiple == 1:
            return f"{self.low}:{high}"
        plain = not high and self.low <= self.multiple
        return f"{self.multiple}*k" if plain else f"{self.low}:{high}:{self.multiple}"


def parse_range(text: str, what: str) -> tuple[int, int, int]:
    """Parse a range into minimum, maximum and step: `1:64`, `64:` (at least 64), `64:1024:32`, `32*k`.

    Raises:
        ModelRefused: the text has another form, the first number is zero or larger than the second, or no
            multiple of the step lies between them.
    """
    if found := _MULTIPLES.fullmatch(text.strip()):
        text = f"{found[1]}::{found[1]}"
    match = _RANGE.fullmatch(text.strip())
    low, high, step = (int(match[1]), int(match[2] or LARGEST), int(match[3] or 1)) if match else (0, 0, 1)
    if not 1 <= low <= high or step < 1 or -(-low // step) * step > high:
        raise ModelRefused(
            f"{what} is {text!r}; expected the least and the largest size, as 1:64, or 64: (at least 64), or "
            "32*k (multiples of 32), or 64:1024:32"
        )
    return low, high, step


def batch_of(example: Tensors, bounds: tuple[int, ...]) -> FreeSize:
    """Return the first dimension of every input as a free size within `bounds`.

    Raises:
        ModelRefused: an input has no dimension, or the first dimensions differ or are out of bounds.
    """
    return _checked(_batch(len(example), bounds), example)


def _batch(inputs: int, bounds: tuple[int, ...]) -> FreeSize:
    return FreeSize(BATCH, tuple((index, 0) for index in range(inputs)), *bounds)


def parse_free_size(text: str, names: Sequence[str]) -> FreeSize:
    """Parse a free size: `ids,mask:1=2:512` is dimension 1 of `ids` and `mask`, together, from 2 to 512.

    A dot may replace the first colon: `ids,mask.1=2:512`. See `parse_range` for ranges.

    Raises:
        ModelRefused: the text has another form, or names an input that does not exist.
    """
    match = _SPEC.fullmatch(text.strip())
    if not match:
        raise ModelRefused(
            f"--dynamic is {text!r}; expected INPUT[,INPUT].DIMENSION=LEAST:LARGEST, as ids,mask.1=2:512 or "
            "image.2=32*k"
        )
    wanted = [name.strip() for name in match[1].split(",")]
    if unknown := [name for name in wanted if name not in names]:
        raise ModelRefused(f"--dynamic names the input {unknown[0]!r}; expected {', '.join(names)}")
    bounds = parse_range(match[3], f"the range of --dynamic {text!r}")
    places = tuple((names.index(name), int(match[2])) for name in wanted)
    return FreeSize(f"{wanted[0]}_{match[2]}", places, *bounds)


def asked_sizes(options: BuildOptions, names: Sequence[str]) -> list[FreeSize]:
    """Return the sizes that the options let vary, without checking them against an example.

    Raises:
        ModelRefused: an option is wrong.
    """
    found = [parse_free_size(text, names) for text in options.dynamic_sizes]
    if options.dynamic_batch is not None:
        found.append(_batch(len(names), parse_range(options.dynamic_batch, "--dynamic-batch")))
    return found


def sizes_of(
    options: BuildOptions, names: Sequence[str], example: Tensors, default: Sequence[FreeSize] = ()
) -> list[FreeSize]:
    """Return the sizes that the options let vary, and those of `default` whose dimensions no option names.

    Raises:
        ModelRefused: an option is wrong, or does not fit the example.
    """
    found = [_checked(free, example) for free in asked_sizes(options, names)]
    # A server may run a single row, if no other request waits.
    found = [replace(free, low=1) if free.name == BATCH else free for free in found]
    named = {where for free in found for where in free.places}
    return found + [free for free in default if named.isdisjoint(free.places)]


def signed_sizes(signature: Signature) -> list[FreeSize]:
    """Return the free sizes of the signature's inputs, within the signature's limits.

    Dimensions whose limits share a name are one size. The first dimensions of all inputs are also one
    size if they are the batch and their limits have no names.
    """
    inputs = signature.inputs
    are_rows = signature.batched and not any(_name(spec, 0) for spec in inputs)
    groups: dict[object, list[tuple[int, int]]] = {}
    for place, spec in enumerate(inputs):
        for at in (at for at, size in enumerate(spec.shape) if size == ANY):
            alone = 0 if are_rows and at == 0 else (place, at)
            groups.setdefault(_name(spec, at) or alone, []).append((place, at))
    found = [_signed_size(inputs, places) for places in groups.values()]
    if are_rows:
        found[0] = replace(found[0], name=BATCH, low=1)  # a single row is always allowed, as in `sizes_of`
    return found


def _signed_size(inputs: Sequence[TensorSpec], places: Sequence[tuple[int, int]]) -> FreeSize:
    place, at = places[0]
    limit = common_limit([one for index, dimension in places for one in inputs[index].limits_of(dimension)])
    name = _name(inputs[place], at) or f"{inputs[place].name}_{at}"
    return FreeSize(
        identifier(name, places),
        tuple(places),
        limit.least,
        min(limit.most or LARGEST, LARGEST),
        limit.multiple,
    )


def identifier(name: str, places: Sequence[tuple[int, int]]) -> str:
    """Return the name if it is an identifier, as torch.export demands; else one made from the first place."""
    return name if name.isidentifier() else "size_{}_{}".format(*places[0])


def _name(spec: TensorSpec, dimension: int) -> str:
    return next((limit.name for limit in spec.limits_of(dimension)), "")


def resized(example: Tensors, free: FreeSize, size: int) -> Tensors:
    """Return the example with another size, by repeating or dropping slices."""
    picked = torch.arange(size) % free.size_in(example)
    made = list(example)
    for index, dimension in free.places:
        made[index] = made[index].index_select(dimension, picked).contiguous()
    return tuple(made)


def without_ones(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor with its free dimensions of size 1 doubled: torch.export takes 1 for a constant.

    A size of one `multiple` is doubled, too, because a model may reshape the dimension into its multiples,
    and their number would be 1.
    """
    for dimension, wanted in enumerate(spec.shape):
        limit, size = common_limit(spec.limits_of(dimension)), tensor.shape[dimension]
        if wanted == ANY and size == limit.multiple and limit.takes(2 * size):
            tensor = torch.cat([tensor, tensor], dimension)
    return tensor


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
    if not free.takes(sizes[0]):
        expected = f"one of {free.low} to {free.high}" if free.multiple == 1 else f"one of {free.text}"
        raise ModelRefused(f"the size of {free.name} in the example is {sizes[0]}; expected {expected}")
    return free
