"""Tries by onnxruntime whether the first dimension of an ONNX model is a batch; its names do not tell."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.examples import check_against, example_of
from torchere.archiver.models.inputs.run import Run
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.load.onnx import OnnxForm
from torchere.archiver.models.probe.derive import batch_refusal
from torchere.archiver.models.probe.precision import FINE, SHARED
from torchere.archiver.models.steps import Say, refusing
from torchere.archiver.signature import Signature


def tried_signature(path: Path, form: OnnxForm, example: Tensors | None, say: Say) -> Signature:
    """Return the signature of an ONNX model after trying whether it has a batch.

    Where all first dimensions are free, they are the batch if the rows of an example do not affect one
    another. If that can't be tried, because onnxruntime is missing or does not run the model, they are the
    batch if they share a name.

    Args:
        path: the file.
        form: as `read_onnx` read it from the file.
        example: None makes one of the graph's types.
        say: takes a line when the model is packed without batches, or when nothing could be tried.

    Raises:
        ModelRefused: the example does not fit the model; or the model does not say how many dimensions an
            input or output has, and can't be run to find out.
    """
    load = functools.cache(functools.partial(_loaded, path))  # at most one session
    if form.unshaped:
        form = _ranked(path, form, example, load)
    if example is not None:
        check_against(example, form.signature)
    if not form.signature.batched:
        return form.signature
    rows = example[0].shape[0] if example is not None else 1
    try:
        refusal = _refusal(form, example, load)
    except ModelRefused as reason:
        return _by_names(form, rows, f"rows were not tried together: {reason}", say)
    if refusal is None:
        return form.signature
    return _fixed(form, rows, str(refusal), say)


def _ranked(path: Path, form: OnnxForm, example: Tensors | None, load: Callable[[], Run]) -> OnnxForm:
    """Return the form with the number of dimensions that each unshaped input and output has in a run."""
    inputs = [spec.name for spec in form.signature.inputs]
    outputs = [spec.name for spec in form.signature.outputs]
    silent = next(name for name in (*inputs, *outputs) if name in form.unshaped)
    if example is None and silent in inputs:
        raise ModelRefused(f"{path}: it does not say which dimensions {silent!r} has; give --example")
    try:
        given = _made_up(form.signature) if example is None else example
        run = load()
        with refusing("running the model on the example"):
            found = run(*given)
    except ModelRefused as reason:
        raise ModelRefused(
            f"{path}: it does not say which dimensions {silent!r} has, and running it tells nothing: {reason}"
        ) from reason
    ranks = {name: one.dim() for name, one in zip((*inputs, *outputs), (*given, *found), strict=True)}
    return form.with_ranks({name: rank for name, rank in ranks.items() if name in form.unshaped})


def _refusal(form: OnnxForm, example: Tensors | None, load: Callable[[], Run]) -> ModelRefused | None:
    """Return why the model takes no batches, or None; raise ModelRefused when that can't be tried."""
    given = _made_up(form.signature) if example is None else example
    run = load()
    with refusing("running the model on the example"):
        run(*given)
    return batch_refusal(run, given, SHARED if form.is_quantised else FINE)


def _made_up(signature: Signature) -> Tensors:
    made = example_of(signature.inputs).tensors
    if not any(tensor.is_floating_point() for tensor in made):
        raise ModelRefused("which whole numbers it takes is not known; give --example")
    return made


def _loaded(path: Path) -> Run:
    if importlib.util.find_spec("onnxruntime") is None:
        raise ModelRefused("onnxruntime is not installed (pip install torchere[onnx])")
    runtime: Any = importlib.import_module("onnxruntime")
    with refusing(f"{path}: loading by onnxruntime"):
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return tuple(torch.from_numpy(result) for result in session.run(None, arrays))

    return run


def _by_names(form: OnnxForm, rows: int, reason: str, say: Say) -> Signature:
    if form.names_batch:
        say(f"taken for batched, because the first dimensions share a name; {reason}")
        return form.signature
    return _fixed(form, rows, f"the first dimensions do not share a name; {reason}", say)


def _fixed(form: OnnxForm, rows: int, reason: str, say: Say) -> Signature:
    say(f"not batched, a request has {rows} in its first dimension as --example has, or 1: {reason}")
    return form.with_rows(rows)
