"""Reads samples: examples that are like real requests, to calibrate on and to verify with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.dynamic import Tensors
from torchere.archiver.models.examples import TORCH_TYPES, Example, read_example
from torchere.archiver.signature import ANY, Signature, SignatureError, TensorSpec, parse

_FREE = 2  # not 1, which export takes for a constant


def read_samples(path: Path, names: Sequence[str], like: Tensors) -> list[Tensors]:
    """The examples of one file, or of every file of a folder in the order of their names.

    Args:
        path: see `read_example` for what a file may be.
        names: of the model's inputs.
        like: an example; samples must have its number of inputs, its datatypes and its dimensions.

    Raises:
        ModelRefused: there is none, or one is not like the example.
        OSError: a file can't be read.
    """
    files = sorted(item for item in path.iterdir() if item.is_file()) if path.is_dir() else [path]
    if not files:
        raise ModelRefused(f"{path}: no samples in it; expected files with one example each")
    doubles = any(tensor.dtype is torch.float64 for tensor in like)
    samples = []
    for file in files:
        sample = read_example(file, doubles=doubles).ordered(names)
        if _form(sample) != _form(like):
            raise ModelRefused(
                f"{file}: the sample has {_form(sample)}; expected the example's {_form(like)} "
                "(datatype and number of dimensions of each input)"
            )
        samples.append(sample)
    return samples


def example_of(specs: Sequence[TensorSpec]) -> Example:
    """An example made up for the inputs of a signature: 0 to 1, whole numbers 0, free sizes 2.

    Raises:
        ModelRefused: one has a datatype that no tensor has.
    """
    random = torch.Generator().manual_seed(0)
    return Example(tuple(_made_up(spec, random) for spec in specs), tuple(spec.name for spec in specs))


def inputs_of(path: Path) -> tuple[TensorSpec, ...]:
    """The inputs that a `signature.json` tells; raises ModelRefused when it is none."""
    try:
        return parse(path.read_text(encoding="utf-8")).inputs
    except (SignatureError, UnicodeDecodeError) as error:
        raise ModelRefused(f"{path}: {error}") from error


def _made_up(spec: TensorSpec, random: torch.Generator) -> torch.Tensor:
    if spec.datatype not in TORCH_TYPES:
        raise ModelRefused(f"{spec.name!r} is {spec.datatype}; give --example with inputs")
    dtype = TORCH_TYPES[spec.datatype]
    shape = [_FREE if size == ANY else size for size in spec.shape]
    if dtype.is_floating_point:
        return torch.rand(shape, generator=random).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def check_against(example: Tensors, signature: Signature) -> None:
    """Raise ModelRefused when the example is not of the signature that came with the model."""
    specs = signature.inputs
    if len(example) != len(specs):
        raise ModelRefused(f"the example has {len(example)} inputs; the model has {len(specs)}")
    for tensor, spec in zip(example, specs, strict=True):
        shape = tuple(tensor.shape)
        if len(shape) != len(spec.shape) or not _fits(shape, spec):
            raise ModelRefused(f"the example of {spec.name!r} is {shape}; the model takes {spec.shape}")


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    return all(wanted in (ANY, size) for size, wanted in zip(shape, spec.shape, strict=True))


def _form(sample: Tensors) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} in {tensor.dim()}" for tensor in sample)
