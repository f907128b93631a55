"""Models to quantise; `pythonpath` of pytest leads here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.models.inputs.run import DATATYPES, LoadedModel
from torchere.archiver.models.load.torchscript import supported
from torchere.archiver.models.measure.difference import difference, flattened
from torchere.archiver.signature import Signature, TensorSpec

Tensors = tuple[torch.Tensor, ...]
needs_engine = pytest.mark.skipif(not supported(), reason="this build of torch has no int8 engine")


def model_of(module: torch.nn.Module, *example: torch.Tensor) -> LoadedModel:
    """The module with a signature in which the batch alone is free."""
    inputs = tuple(
        TensorSpec(f"in{index}", DATATYPES[one.dtype], (-1, *one.shape[1:]))
        for index, one in enumerate(example)
    )
    signature = Signature(inputs, (TensorSpec("out", "FP32", (-1, 4)),))
    return LoadedModel(module.eval(), example, signature, Path("model.py"))


def drift(one: Callable[..., Any], other: Callable[..., Any], samples: Sequence[Tensors]) -> float:
    with torch.inference_mode():
        return difference((flattened(one(*each)), flattened(other(*each))) for each in samples).drift
