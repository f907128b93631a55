"""Spreads a model over ranks, by tensor parallelism, by pipeline parallelism, or by both.

Every rank calls the model with the same inputs and gets the same result. With both, each stage has several
consecutive ranks, and its weights are split over them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchere.archiver.models.spread.s3 import FromS3
from torchere.archiver.models.spread.stages import Place, Stages, cut, stage_bounds
from torchere.archiver.models.spread.tensor import split_layers, styles_of
from torchere.archiver.models.spread.weights import Weights, drop_weights, fill, fill_from_shards
from torchere.archiver.split import SECTION, Split

PIPELINE, TENSOR = "pipeline", "tensor"


def spread(
    model: torch.nn.Module,
    split: Split,
    device: torch.device,
    weights: Weights | FromS3 | Path | None = None,
) -> torch.nn.Module:
    """Return the model with this rank's part of the weights; call it in all ranks.

    Args:
        model: made by `without_weights`, or whole if `weights` is None. It is modified in place.
        split: the number of ranks for each kind of parallelism; `RANK` and `WORLD_SIZE` are in the
            environment.
        device: where this rank computes.
        weights: read from memory, a file, a folder of `torch.distributed.checkpoint`, or S3; None: those that
            the model holds.

    Raises:
        ModelRefused: the checkpoint is damaged or of another model, or weights can't be read from S3.
        ValueError: the number of ranks is not that of `split`, or the model can't be split like this.
    """
    mesh = join(split, device)
    styles = styles_of(model, split.plan, split.tensor) if split.tensor > 1 else {}
    weights = drop_weights(model) if weights is None else weights
    place = stage_bounds(model, split.pipeline) if split.pipeline > 1 else None
    if place is not None:
        cut(model, place, mesh.get_local_rank(PIPELINE))
    parts = split_layers(model, styles, mesh.get_group(TENSOR))
    if isinstance(weights, Path):
        fill_from_shards(model, weights, parts, mesh[TENSOR], device)
    elif isinstance(weights, FromS3):
        weights.take_part(model, parts, mesh.get_group(TENSOR), device)
        fill(model, weights, parts, device)
        weights.finish()
    else:
        fill(model, weights, parts, device)
    if place is not None:
        in_stages(model, place, mesh, device, batched=split.batched)
    return model


def join(split: Split, device: torch.device) -> DeviceMesh:
    """Join the ranks of this worker, and return their mesh.

    Raises:
        ValueError: there are more or fewer ranks than `split` asks for.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != split.ranks:
        raise ValueError(
            f"{SECTION} in model-config.yaml asks for {split.ranks} ranks, and there are {ranks}"
        )
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return init_device_mesh(device.type, (split.pipeline, split.tensor), mesh_dim_names=(PIPELINE, TENSOR))


def in_stages(
    model: torch.nn.Module, place: Place, mesh: DeviceMesh, device: torch.device, *, batched: bool
) -> None:
    """Replace the `forward` of a model after `cut`: the new one runs the model in all stages."""
    stages = Stages(model, place, mesh.get_group(PIPELINE), device, batched=batched)

    @functools.wraps(model.forward)  # callers read the names of its parameters
    def forward(*args: Any, **kwargs: Any) -> Any:
        return stages.forward(*args, **kwargs)

    whole: Any = model
    whole.forward = forward
