"""The original while another model is compared with it: is it something to compare with?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchere.archiver.models.verify_outputs import Outputs, answers, difference
from torchere.archiver.models.verify_timing import Samples

_UNSTEADY = 1e-4  # drift of a model from itself; threads may add up in another order


class Original:
    """A model and its samples. Runs as its caller says, in inference mode; for one thread."""

    def __init__(self, run: Callable[..., Any], samples: Samples) -> None:
        self._run, self._samples = run, samples
        self._first: Outputs | None = None
        self._constant = self._empty = True

    def beside(self, packed: Callable[..., Any]) -> Iterator[tuple[Outputs, Outputs]]:
        """The answers of both to each sample."""
        for sample in self._samples:
            wanted = answers(self._run, sample)
            self._first = self._first or wanted
            self._empty = self._empty and not any(one.numel() for one in wanted)
            self._constant = self._constant and _alike(self._first, wanted)
            yield wanted, answers(packed, sample)

    def doubts(self) -> tuple[str, ...]:
        """What makes a comparison say little, for people; after all of `beside` was taken."""
        found = []
        if self._first is not None and (off := self._from_itself(self._first)) > _UNSTEADY:
            found.append(
                f"the original itself drifts by {off:.3g} between two runs on one input: something in it is "
                "random (F.dropout without training=self.training, noise), or it keeps state"
            )
        if self._empty:
            found.append(
                "the original gives nothing for these samples, so that nothing was compared: give --samples "
                "in which it finds something"
            )
            return tuple(found)
        differ = any(not _alike(self._samples[0], sample) for sample in self._samples)
        if differ and self._constant:
            found.append(
                "the original gives the same answer to samples that differ, so that they show little: are "
                "these its weights, and are the samples like real requests?"
            )
        return tuple(found)

    def _from_itself(self, first: Outputs) -> float:
        return difference([(first, answers(self._run, self._samples[0]))]).drift


def _alike(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )
