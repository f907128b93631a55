"""Spreads Hugging Face folders over ranks: transformers splits the layers, and reads slices of weights.

transformers' `DistributedConfig` and its meshes still change from release to release, so no other file uses
them. transformers' own pipelines fit only one form of language model, so `stages.py` cuts the stages, as for
any other model.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.huggingface import loaded, model_class
from torchere.archiver.models.spread import PIPELINE, in_stages, join
from torchere.archiver.models.spread.stages import Place, cut, stage_bounds
from torchere.archiver.split import AUTO, SECTION, Split


def spread_folder(path: Path, split: Split, device: torch.device) -> Any:
    """Return transformers' model with this rank's part of the weights; call it in all ranks.

    Args:
        path: the folder, with its weights in safetensors.
        split: its plan names layers as transformers does, with `*` for numbers, and adds to the model's own
            plan.
        device: where this rank computes.

    Raises:
        ModelRefused: transformers is missing or does not know the model, the weights can't be loaded, or the
            model has no plan or can't be split like this.
        ValueError: the number of ranks is not that of `split`.
    """
    if split.weights:
        raise ModelRefused(
            f"{SECTION}.weights names {split.weights}, and a Hugging Face folder has its weights beside "
            "config.json; leave it out, or give a class (--model-file)"
        )
    known = model_class(path)
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(
            f"{path}: {SECTION} needs weights in safetensors, of which each rank reads its own; load the "
            "model with transformers, and save it with model.save_pretrained(folder)"
        )
    mesh = join(split, device)
    options = {"distributed_config": _config(split)} if split.tensor > 1 else {}
    model = loaded(_class_of_rank(known, split, mesh, device), path, False, **options)
    if split.pipeline > 1:
        model.config.use_cache = False  # other stages do not know the length of a stage's cache
        in_stages(model, model.place_in_pipeline, mesh, device, batched=split.batched)
    return model.to(device).eval()


def _config(split: Split) -> Any:
    plan = None if isinstance(split.plan, str) else dict(split.plan)
    return _distributed("configuration_utils").DistributedConfig(tp_size=split.tensor, tp_plan=plan)


def _distributed(name: str) -> Any:
    try:
        return importlib.import_module(f"transformers.distributed.{name}")
    except ImportError as error:
        version = importlib.import_module("transformers").__version__
        raise ModelRefused(
            f"this transformers ({version}) does not split layers in a way that is known here; install one "
            f"that has transformers.distributed.{name}, or use pipeline instead of tensor"
        ) from error


def _class_of_rank(known: Any, split: Split, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return a subclass of a model's class whose instances have only the layers of this rank's stage."""

    class OfRank(known):  # type: ignore[misc]
        place_in_pipeline: Place
        _keys_to_ignore_on_load_unexpected: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if split.tensor > 1 and split.plan == AUTO and not getattr(self, "tp_plan", None):
                raise ValueError(
                    f"{SECTION}.plan: this transformers has no plan for {known.__name__}; name layers "
                    "(model.layers.*.up: colwise, model.layers.*.down: rowwise), or use pipeline instead of "
                    "tensor"
                )
            if split.pipeline > 1:
                self.place_in_pipeline = stage_bounds(self, split.pipeline)
                cut(self, self.place_in_pipeline, mesh.get_local_rank(PIPELINE))
                # The file has weights of all stages.
                layers = rf"^{re.escape(self.place_in_pipeline.name)}\.\d+\."
                self._keys_to_ignore_on_load_unexpected = {
                    *(self._keys_to_ignore_on_load_unexpected or ()),
                    layers,
                }

        @classmethod
        def prepare_distribute_model(cls, config: Any, device_map: Any = None) -> Any:
            """Return the config, the device and the mesh, in which the ranks of a stage share its layers."""
            shape, more = (split.pipeline, 1, 1, split.tensor), ("dp_replicate", "fsdp")
            dense = init_device_mesh(device.type, shape, mesh_dim_names=("pp", *more, "tp"))
            experts = init_device_mesh(
                device.type,
                (split.pipeline, 1, split.tensor, 1),
                mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
            )
            # If a device is given, transformers requires the package accelerate; the CPU needs none.
            where = None if device.type == "cpu" else device
            return config, where, _distributed("utils").TransformersDeviceMesh(dense, experts)

    OfRank.__name__, OfRank.__module__ = known.__name__, known.__module__
    return OfRank
