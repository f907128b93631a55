"""How far each channel of an output drifts, measured by what varies in this channel alone.

One figure over a whole output does not see scores beside boxes: where boxes are 640 times as large, a model
whose scores are all zero drifts by half a percent. Channels are the last dimension of an output, and
dimension 1, too, where it has three or more, as detectors are laid out both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_FEWEST = 8  # values of a channel that tell whether it varies
_VARIES = 0.05  # spread over root mean square; what varies less is near constant anyway
# Of the channels that vary, what share went silent for it to count: with few samples, a rare and small
# activation that int8 rounds to zero leaves a channel constant now and then, and that is no harm.
_SHARE = 0.05
_CARRYING = 4.0  # values that carry the error of all silent channels; one or two outliers do not count
_NAMED = 3


@dataclass(frozen=True, slots=True)
class ChannelDrift:
    """The channel that drifts most: root of the mean squared difference over its own standard deviation."""

    output: int  # its place among the outputs
    dimension: int
    channel: int
    drift: float

    @property
    def note(self) -> str:
        """For people."""
        where = f"channel {self.channel} of dimension {self.dimension}, output {self.output}"
        return f"worst channel: drift {self.drift:.3g} of what varies in it ({where})"


@dataclass(frozen=True, slots=True)
class Silenced:
    """Channels of one output that vary in the original, and have one and the same value in the other."""

    output: int
    dimension: int
    count: int
    of: int  # channels that vary
    first: tuple[int, ...]  # some of them

    @property
    def note(self) -> str:
        """For people."""
        named = ", ".join(map(str, self.first)) + (", ..." if self.count > len(self.first) else "")
        return (
            f"of output {self.output}, {self.count} of {self.of} channels (dimension {self.dimension}: "
            f"{named}) have the same value always, and vary in the original"
        )


def channels_of(dimensions: int) -> tuple[int, ...]:
    """Which dimensions of an output may be channels: the last one, and 1."""
    return tuple(sorted({1, dimensions - 1})) if dimensions > 2 else (dimensions - 1,) * (dimensions > 0)


class ChannelTally:
    """Sums over the samples for each channel along one dimension of one output."""

    def __init__(self, output: int, dimension: int) -> None:
        self._output, self._dimension = output, dimension
        self._count = 0
        self._fits = True  # every sample has as many channels
        self._mean = self._squares = self._apart = self._apart_squared = torch.zeros(0)
        self._constant, self._first = torch.zeros(0, dtype=torch.bool), torch.zeros(0)

    def add(self, wanted: torch.Tensor, found: torch.Tensor, apart: torch.Tensor) -> None:
        """Count one sample in: outputs as doubles, not-a-number as 0, and how far each value is apart."""
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
        """The channel that drifts most; None when none varies, or there are too few values to tell."""
        varies = self._varies()
        if not bool(varies.any()):
            return None
        drifts = torch.where(varies, (self._apart_squared / self._squares).sqrt(), -1.0)
        channel = int(drifts.argmax())
        return ChannelDrift(self._output, self._dimension, channel, float(drifts[channel]))

    @property
    def silenced(self) -> Silenced | None:
        """The channels that no longer vary, if they are enough to matter."""
        varies = self._varies()
        silent = varies & self._constant
        places = silent.nonzero().flatten().tolist()
        if not places or len(places) < _SHARE * int(varies.sum()):
            return None
        carrying = (self._apart.square() / self._apart_squared)[silent].sum()  # as many values, if all alike
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
        """Mean and squares about it, of what was and what comes (Chan's formula, which cancels nothing)."""
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
    """The channel that drifts most of all."""
    found = [tally.worst for tally in tallies]
    return max((one for one in found if one is not None), key=lambda one: one.drift, default=None)
