"""Candidates for the int8 model of an archive: by a method, mixed with fp32, measured on every engine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchere.archiver.models.engines import (
    Measured,
    NoUsableEngine,
    choose,
    measured,
    rebuilt,
    saved,
    supported,
    using,
)
from torchere.archiver.models.folding import fold
from torchere.archiver.models.folding_attention import Opened
from torchere.archiver.models.loaded import LoadedModel
from torchere.archiver.models.quantise_dynamic import dynamic, fuse_relu, large_embeddings
from torchere.archiver.models.quantise_mixed import MOST_KEPT, WANTED_DRIFT, Sensitive, search, sensitivities
from torchere.archiver.models.quantise_static import calibrate
from torchere.archiver.models.quantise_traced import Compile, plain_attention
from torchere.archiver.models.quantise_trained import trained
from torchere.archiver.models.verify_outputs import difference, flattened
from torchere.archiver.models.verify_timing import medians_ms, one_thread

Samples = Sequence[tuple[torch.Tensor, ...]]
# Methods that can leave layers in fp32, and layers that they would change.
_MIXABLE: dict[str, tuple[type[nn.Module], ...]] = {
    "int8-dynamic": (nn.Linear,),
    "int8-static": (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
}
_JUDGED = 32  # rows that engines are compared on; the verification later takes all
_RANKED = 4  # samples, of one row each if they have batches, that tell which layers hurt most
_BUDGET_S = 0.6  # of timing, for each engine


@dataclass(frozen=True)
class Candidate:
    """One method applied to the model."""

    packed: bytes  # TorchScript
    measured: tuple[Measured, ...]
    note: str
    kept: tuple[str, ...] = ()  # layers that went back to fp32

    def best(self, max_drift: float) -> Measured | None:
        """What would be chosen if there were no other candidate; None when no engine runs it."""
        try:
            return choose(self.measured, max_drift)
        except NoUsableEngine:
            return None


@dataclass(frozen=True)
class Maker:
    """What all candidates are made of and judged by."""

    model: LoadedModel
    opened: Opened  # the same model with its attention as plain layers; whose layers become int8
    samples: Samples
    compiled: Compile
    judged: Samples
    max_drift: float

    def candidate(self, method: str) -> Candidate:
        """The model by this method; when that drifts too far, with the layers in fp32 that hurt most."""
        packed, note = self._packed(method, frozenset())
        plain = self._measured(method, packed, note)
        best, wanted = plain.best(self.max_drift), min(self.max_drift, WANTED_DRIFT)
        if best is None or best.drift <= wanted or method not in _MIXABLE:
            return plain
        return self._mixed(plain, best, wanted)

    def fp32_ms(self) -> float:
        """Time of the original for one row, on one thread."""
        with one_thread():
            return _timer(_one_row(self.model, self.judged))(self.model.module)

    def _mixed(self, plain: Candidate, best: Measured, wanted: float) -> Candidate:
        made: dict[frozenset[str], tuple[bytes, str]] = {}
        judge = _judge(self.model, self.judged)

        def drift_with(kept: frozenset[str]) -> float:
            made[kept] = self._packed(best.method, kept)
            with torch.inference_mode():
                return judge(rebuilt(made[kept][0], best.engine))

        kept = search(*self._layers(best.method), best.drift, wanted, drift_with)
        if not kept:
            return plain
        packed, note = made[kept]
        told = (
            f"{note}; in fp32, as they hurt most: {', '.join(sorted(kept))} (drift {best.drift:.2g} without)"
        )
        return dataclasses.replace(self._measured(best.method, packed, told), kept=tuple(sorted(kept)))

    def _layers(self, method: str) -> tuple[list[Sensitive], float]:
        """Those that may go back, and how many weights in all."""
        module = self.opened.module
        if method == "int8-static":
            module = fold(module, self.samples[0]).module
        few = _spread(self.judged, _RANKED)
        rows = [tuple(tensor[:1] for tensor in one) for one in few] if self.model.signature.batched else few
        weights = sum(parameter.numel() for parameter in self.model.module.parameters())
        return sensitivities(module, rows, _MIXABLE[method]), MOST_KEPT * weights

    def _packed(self, method: str, kept: Collection[str]) -> tuple[bytes, str]:
        """The TorchScript of the model by this method, with these layers in fp32, and a note."""
        embeddings = large_embeddings(self.opened.module) if method == "int8-dynamic" else frozenset()
        try:
            return self._compiled(method, kept)
        # Broad, because it is the model's own code that finds no tensor as weight, and raises what it likes.
        except Exception:
            if embeddings <= set(kept):
                raise
        packed, note = self._compiled(method, embeddings | set(kept))
        return packed, f"{note}; embeddings in fp32, for the model reads their weights itself"

    def _compiled(self, method: str, kept: Collection[str]) -> tuple[bytes, str]:
        module, note = _converted(self.opened.module, method, self.samples, kept)
        with plain_attention():
            script = self.compiled(module, self.model.example)
        if method == "int8-dynamic":
            fuse_relu(script)
        opened = self.opened.attentions
        return saved(script), f"{note}; attention of {opened} layers opened" if opened else note

    def _measured(self, method: str, packed: bytes, note: str) -> Candidate:
        judge, timer = _judge(self.model, self.judged), _timer(_one_row(self.model, self.judged))
        with one_thread():
            return Candidate(packed, tuple(measured(method, packed, judge, timer)), note)


def _converted(
    model: nn.Module, method: str, samples: Samples, kept: Collection[str]
) -> tuple[nn.Module, str]:
    # Any engine will do to pack with: the weights are packed again when they are loaded.
    with using(supported()[-1]):
        if method == "int8-dynamic":
            module, layers = dynamic(model, kept)
            return module, f"{layers} layers"
        if method == "int8-trained":
            return trained(model), "as it was trained"
        calibrated = calibrate(model, samples, kept)
        folds = f"; folded: {calibrated.note}" if calibrated.note else ""
        return calibrated.convert(), f"{calibrated.layers} layers, {len(samples)} samples{folds}"


def _judge(model: LoadedModel, samples: Samples) -> Callable[[Callable[..., Any]], float]:
    with torch.inference_mode():
        wanted = [flattened(model.module(*copy.deepcopy(sample))) for sample in samples]

    def judge(module: Callable[..., Any]) -> float:
        found = (flattened(module(*sample)) for sample in samples)
        return difference(zip(wanted, found, strict=True)).drift

    return judge


def _timer(row: tuple[torch.Tensor, ...]) -> Callable[[Callable[..., Any]], float]:
    return lambda module: medians_ms([module], row, _BUDGET_S)[0]


def _one_row(model: LoadedModel, samples: Samples) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:1] for tensor in samples[0]) if model.signature.batched else samples[0]


def some_of(model: LoadedModel, samples: Samples) -> list[tuple[torch.Tensor, ...]]:
    """Samples at equal distances, cut if they have batches, so that there are about `_JUDGED` rows in all."""
    chosen = _spread(samples, _JUDGED)
    if not model.signature.batched:
        return list(chosen)
    rows = max(1, _JUDGED // len(chosen))
    return [tuple(tensor[:rows] for tensor in sample) for sample in chosen]


def _spread(samples: Samples, most: int) -> Samples:
    """At most so many of the samples, at equal distances."""
    count = len(samples)
    return samples if count <= most else [samples[index * count // most] for index in range(most)]
