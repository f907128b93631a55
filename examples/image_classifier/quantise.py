"""The int8 network as `torchere archive --quantize` makes it, and how often it agrees with fp32.

What is done and why stands in docs/quantization.md and README.md, "What the int8 model is made of".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.quantize.methods import Quantised, quantise
from torchere.archiver.signature import Signature, TensorSpec

_SIDE, _CLASSES = 224, 1000
SIGNATURE = Signature(
    (TensorSpec("picture", "FP32", (-1, 3, _SIDE, _SIDE)),), (TensorSpec("scores", "FP32", (-1, _CLASSES)),)
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the int8 network names the same class first as the fp32 network, over the same pictures."""

    same: int
    pictures: int
    # Of these, the fp32 network is sure: more than one half for one class.
    same_of_sure: int
    sure: int

    @property
    def acceptable(self) -> bool:
        """Whether nine of ten answers that the fp32 network is sure of stay the same."""
        return self.same_of_sure >= 0.9 * self.sure


def int8(
    network: nn.Module, calibration: list[torch.Tensor], say: Callable[[str], None] = lambda _line: None
) -> Quantised:
    """The network in int8 on the engine that is fastest here among those that agree; left as it is itself.

    Args:
        network: the architecture with its weights.
        calibration: batches of pictures that the ranges of the activations are taken from.
        say: takes lines about progress.

    Raises:
        ModelRefused: no engine of this machine runs it.
    """
    model = LoadedModel(network, (calibration[0][:1],), SIGNATURE, Path("efficientnet_lite0"))
    return quantise(model, "int8-static", [(batch,) for batch in calibration], say=say)


def agreement(
    fp32: Callable[[torch.Tensor], torch.Tensor],
    quantised: Callable[[torch.Tensor], torch.Tensor],
    batches: list[torch.Tensor],
) -> Agreement:
    """Compare the first class of both networks for every picture."""
    with torch.inference_mode():
        wanted = torch.cat([fp32(batch) for batch in batches])
        found = torch.cat([quantised(batch) for batch in batches])
    same = wanted.argmax(1) == found.argmax(1)
    sure = wanted.softmax(1).amax(1) > 0.5
    return Agreement(int(same.sum()), len(same), int((same & sure).sum()), int(sure.sum()))
