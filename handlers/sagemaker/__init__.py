"""The handler of SageMaker's model folders: a model and `code/inference.py` with functions for its steps.

The contract is that of SageMaker's PyTorch inference containers. The script may define `model_fn`, and either
`transform_fn` or any of `input_fn`, `predict_fn` and `output_fn`; each may take the context as its last
argument. Missing functions have defaults: a TorchScript model, and tensors as JSON, CSV or NPY.
"""

from __future__ import annotations

from torchere.handlers.sagemaker.transformer import (
    DefaultHandlerService,
    Transformer,
    TypedPytorchFunctions,
)


class SageMakerHandler(DefaultHandlerService):
    """Runs the functions of one model folder. Not thread-safe: one executor uses it."""

    def __init__(self) -> None:
        super().__init__(Transformer(TypedPytorchFunctions()))
