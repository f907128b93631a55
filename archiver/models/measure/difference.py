"""Measures how far the outputs of two models differ: pure functions of the outputs."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import Run, flat
from torchere.archiver.models.inputs.sizes import Tensors


@dataclass(frozen=True, slots=True)
class Difference:
    """The outputs of one model compared with those of another over the same samples.

    `drift` is the figure that has a limit: the root mean square of the differences, divided by the root mean
    square of the original's values. For whole numbers and booleans it is the share of values that differ. The
    output with the largest drift counts. 0: equal outputs; 1: outputs without relation to the original's.
    """

    rows: int  # along the first dimension of the first output
    largest_abs: float
    mean_abs: float
    drift: float
    cosine: float | None  # mean over rows, the minimum over all outputs; None without floating-point outputs
    # Share of rows with the largest value at the same index; None unless an output is [rows, 2+].
    top1: float | None
    channel: ChannelDrift | None = None  # None: no channel varies, or there are too few values
    silenced: tuple[Silenced, ...] = ()
    undefined: bool = False  # an output of the original is NaN throughout, so it can't be compared


def flattened(result: Any) -> Tensors:
    """Return the tensors of a model's result in order, from a tuple, list or dict; None is skipped.

    Raises:
        ModelRefused: the result has something other than tensors.
    """
    return tuple(tensor for _, tensor in flat(result))


def answers(model: Run, sample: Tensors) -> Tensors:
    """Run the model on a copy of the sample, and return copies of its outputs, as it may change both."""
    return tuple(tensor.clone() for tensor in flattened(model(*copy.deepcopy(sample))))


def difference(pairs: Iterable[tuple[Tensors, Tensors]]) -> Difference:
    """Compare the outputs of the original with those of the other model, sample by sample.

    Raises:
        ModelRefused: the outputs can't be compared, because their number or shape differs; or there are none.
    """
    tallies: list[_Tally] = []
    for wanted, found in pairs:
        _refuse_other_shapes(wanted, found)
        tallies = tallies or [_Tally(index, one.dim()) for index, one in enumerate(wanted)]
        for tally, one, other in zip(tallies, wanted, found, strict=True):
            tally.add(one, other)
    if not tallies:
        raise ModelRefused("there is nothing to compare: no samples, or models without outputs")
    ranked = next((tally for tally in tallies if tally.ranked_rows), None)
    cosines = [tally.cosine_sum / tally.cosine_rows for tally in tallies if tally.cosine_rows]
    channels = [one for tally in tallies for one in tally.channels]
    return Difference(
        rows=tallies[0].rows,
        largest_abs=max(tally.largest for tally in tallies),
        mean_abs=sum(tally.absolute for tally in tallies) / max(1, sum(tally.values for tally in tallies)),
        drift=max(tally.drift for tally in tallies),
        cosine=min(cosines) if cosines else None,
        top1=ranked.same / ranked.ranked_rows if ranked else None,
        channel=worst_of(channels),
        silenced=tuple(one.silenced for one in channels if one.silenced),
        undefined=any(tally.values and not tally.numbers for tally in tallies),
    )


def are_equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return for each value whether the two are equal; NaN is equal to NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the difference of each value in float64: 0 if equal, infinite if only one is NaN or infinite."""
    one, other = one.double(), other.double()
    apart = torch.where(are_equal(one, other), 0.0, (one - other).abs())
    return apart.nan_to_num(nan=math.inf, posinf=math.inf)


_ULPS = 4  # machine epsilons by which sums in different orders may differ


def at_least_rounding(limit: float, dtype: torch.dtype) -> float:
    """Return `limit` for a relative difference, or a few machine epsilons of the dtype if that is larger."""
    return max(limit, _ULPS * torch.finfo(dtype).eps) if dtype.is_floating_point else limit


def drift_limit(limit: float, module: torch.nn.Module) -> float:
    """Return the drift limit for converted forms of a module: `limit`, or more for 16-bit float weights.

    Folding rounds these weights again. Weights of 8 bits do not count: the module computes in another dtype.
    """
    halves = {one.dtype for one in module.parameters()} & {torch.float16, torch.bfloat16}
    return max([limit, *(at_least_rounding(limit, dtype) for dtype in halves)])


class _Tally:
    """Sums over all samples for one output."""

    def __init__(self, output: int, dimensions: int) -> None:
        self.channels = [ChannelTally(output, dimension) for dimension in channels_of(dimensions)]
        self.rows = self.values = self.numbers = self._unequal = 0
        self.largest = self.absolute = 0.0
        self._squares = self._scale = 0.0
        self.cosine_sum, self.cosine_rows = 0.0, 0
        self.same = self.ranked_rows = 0

    @property
    def drift(self) -> float:
        """See Difference."""
        if self._squares == 0.0:
            return self._unequal / self.values if self.values else 0.0
        return math.sqrt(self._squares / self._scale) if self._scale else math.inf

    def add(self, wanted: torch.Tensor, found: torch.Tensor) -> None:
        """Add one sample."""
        one, other = wanted.detach().double(), found.detach().double()
        apart = distances(one, other)
        self.rows += wanted.shape[0] if wanted.dim() else 1
        self.values += apart.numel()
        self.numbers += apart.numel() - int(one.isnan().sum())
        self.largest = max(self.largest, float(apart.max()) if apart.numel() else 0.0)
        self.absolute += float(apart.sum())
        if not wanted.is_floating_point():
            self._unequal += int(apart.count_nonzero())
            return
        self._squares += float(apart.square().sum())
        finite = one.nan_to_num(posinf=0.0, neginf=0.0)
        self._scale += float(finite.square().sum())
        for channels in self.channels:
            channels.add(finite, other, apart)
        self._add_directions(one, other)

    def _add_directions(self, one: torch.Tensor, other: torch.Tensor) -> None:
        if not one.numel():
            return
        rows, others = (
            tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1) for tensor in (one, other)
        )
        if rows.shape[1] > 1:
            lengths = rows.norm(dim=1) * others.norm(dim=1)
            cosines = torch.where(
                lengths > 0, (rows * others).sum(1) / lengths, (rows == others).all(1).double()
            )
            self.cosine_sum += float(cosines.nan_to_num().sum())
            self.cosine_rows += len(rows)
        if one.dim() == 2 and one.shape[1] > 1:
            self.same += int((one.argmax(1) == other.argmax(1)).sum())
            self.ranked_rows += len(one)


def _refuse_other_shapes(wanted: Tensors, found: Tensors) -> None:
    shapes = [[tuple(tensor.shape) for tensor in outputs] for outputs in (wanted, found)]
    if shapes[0] != shapes[1]:
        raise ModelRefused(
            f"can't compare the models: one's outputs have the shapes {shapes[0]}, the other's {shapes[1]}; "
            "expected two forms of one model"
        )


# Drift of each channel of an output, relative to the variation within this channel.
#
# One figure over a whole output hides an error in the scores when boxes are in the same tensor: where boxes
# are 640 times as large, a model whose scores are all zero drifts by half a percent. Channels are taken along
# the last dimension of an output, and also along dimension 1 if the output has three or more dimensions,
# because detectors use both layouts.

_FEWEST = 8  # minimum number of values that show whether a channel varies
_CLEARLY = 0.25  # spread from which a channel's drift counts in full
_VARIES = 0.05  # spread divided by root mean square; a channel below it is nearly constant
# Minimum share of silent channels among the varying ones for a report: with few samples, a rare and small
# activation that int8 rounds to zero may make a channel constant, which does no harm.
_SHARE = 0.05
_CARRYING = 4.0  # minimum number of values that carry the silent channels' error; one or two are outliers
_NAMED = 3


@dataclass(frozen=True, slots=True)
class ChannelDrift:
    """The channel that drifts most. `drift`: root mean square of its differences, divided by its deviation.

    The deviation is the standard deviation of the channel in the original.
    """

    output: int  # its place among the outputs
    dimension: int
    channel: int
    drift: float
    # The same difference divided by the deviation, or by a quarter of the channel's root mean square if that
    # is more: a channel that hardly varies over the samples has a large drift for a small difference.
    weighed: float = 0.0
    chance: float = 1.0  # factor by which the worst of so many channels exceeds the others by chance alone

    @property
    def beyond_chance(self) -> float:
        """The weighed drift without the factor that choosing the worst channel adds; limits apply to it."""
        return self.weighed / self.chance

    @property
    def note(self) -> str:
        """One line for people."""
        where = f"channel {self.channel} of dimension {self.dimension}, output {self.output}"
        return f"worst channel: drift {self.drift:.3g} of its variation ({where})"


@dataclass(frozen=True, slots=True)
class Silenced:
    """Channels of one output that vary in the original, and have one constant value in the other model."""

    output: int
    dimension: int
    count: int
    of: int  # channels that vary
    first: tuple[int, ...]  # the first silent channels

    @property
    def note(self) -> str:
        """One line for people."""
        named = ", ".join(map(str, self.first)) + (", ..." if self.count > len(self.first) else "")
        return (
            f"of output {self.output}, {self.count} of {self.of} channels (dimension {self.dimension}: "
            f"{named}) have the same value always, and vary in the original"
        )


def channels_of(dimensions: int) -> tuple[int, ...]:
    """Return the dimensions of an output that may be channels: dimension 1 and the last one."""
    return tuple(sorted({1, dimensions - 1})) if dimensions > 2 else (dimensions - 1,) * (dimensions > 0)


class ChannelTally:
    """Per-channel sums over all samples, for one dimension of one output."""

    def __init__(self, output: int, dimension: int) -> None:
        self._output, self._dimension = output, dimension
        self._count = 0
        self._fits = True  # every sample has the same number of channels
        self._mean = self._squares = self._apart = self._apart_squared = torch.zeros(0)
        self._constant, self._first = torch.zeros(0, dtype=torch.bool), torch.zeros(0)

    def add(self, wanted: torch.Tensor, found: torch.Tensor, apart: torch.Tensor) -> None:
        """Add one sample, in doubles: both outputs and, as `apart`, the absolute difference of each value.

        Not-a-number is 0 in `wanted`.
        """
        self._fits = self._fits and wanted.dim() > self._dimension
        if not self._fits or not wanted.numel():
            return
        one, other, off = (self._rows(tensor) for tensor in (wanted, found, apart))
        if not self._count:
            self._start(other)
        self._fits = one.shape[1:] == self._first.shape
        if not self._fits:
            return
        self._apart += off.sum(0)
        self._apart_squared += off.square().sum(0)
        self._constant &= (other == self._first).all(0)
        self._merge(one)

    @property
    def worst(self) -> ChannelDrift | None:
        """The channel with the largest drift; None if no channel varies, or there are too few values."""
        varies = self._varies()
        if not bool(varies.any()):
            return None
        deviation = self._squares.sqrt()
        size = (self._squares + self._count * self._mean.square()).sqrt()
        apart = self._apart_squared.sqrt()
        weighed = torch.where(varies, apart / torch.maximum(deviation, _CLEARLY * size), -1.0)
        channel = int(weighed.argmax())
        return ChannelDrift(
            self._output,
            self._dimension,
            channel,
            drift=float(apart[channel] / deviation[channel]),
            weighed=float(weighed[channel]),
            chance=chance_of_worst(int(varies.sum()), self._count),
        )

    @property
    def silenced(self) -> Silenced | None:
        """The channels that no longer vary; None if they are too few to matter."""
        varies = self._varies()
        silent = varies & self._constant
        places = silent.nonzero().flatten().tolist()
        if not places or len(places) < _SHARE * int(varies.sum()):
            return None
        carrying = (self._apart.square() / self._apart_squared)[silent].sum()  # effective number of values
        if not float(carrying) >= _CARRYING:
            return None
        return Silenced(self._output, self._dimension, len(places), int(varies.sum()), tuple(places[:_NAMED]))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(self._dimension, -1).reshape(-1, tensor.shape[self._dimension])

    def _start(self, other: torch.Tensor) -> None:
        self._first = other[0].clone()
        self._constant = torch.ones_like(self._first, dtype=torch.bool)
        self._mean, self._squares, self._apart, self._apart_squared = (
            torch.zeros_like(self._first) for _ in range(4)
        )

    def _merge(self, one: torch.Tensor) -> None:
        """Merge new rows into the running mean and sum of squares (Chan's formula, without cancellation)."""
        count, mean = len(one), one.mean(0)
        step, total = mean - self._mean, self._count + count
        self._squares += (one - mean).square().sum(0) + step.square() * (self._count * count / total)
        self._mean += step * (count / total)
        self._count = total

    def _varies(self) -> torch.Tensor:
        if not self._fits or self._count < _FEWEST:
            return torch.zeros_like(self._constant)
        variance = self._squares / self._count
        return variance > _VARIES**2 * (variance + self._mean.square())


def worst_of(tallies: Sequence[ChannelTally]) -> ChannelDrift | None:
    """Return the channel of all tallies with the largest `beyond_chance`; None if no channel varies."""
    found = [tally.worst for tally in tallies]
    return max((one for one in found if one is not None), key=lambda one: one.beyond_chance, default=None)


def chance_of_worst(channels: int, values: int) -> float:
    """Return the factor by which the worst of equally good channels exceeds a typical one by chance alone.

    The worst channel stays below it in 19 of 20 cases.

    The drift of a channel is the root of a ratio of two mean squares, each over `values` numbers. Such a
    ratio follows Fisher's F distribution, whose logarithm is about normal, with the variance
    2 / n + 2 / (n - 1). With 1000 channels of 13 values each, the worst may drift 3.0 times as far as a
    typical one by chance; with many values the factor approaches 1.
    """
    if values < 2:
        return 1.0
    quantile = statistics.NormalDist().inv_cdf(1 - 0.05 / max(1, channels))
    return math.exp(quantile * math.sqrt((1 / values + 1 / (values - 1)) / 2))
