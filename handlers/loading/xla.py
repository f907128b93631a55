"""PyTorch/XLA: its device, and a model's weights over a mesh of its devices (SPMD).

The only module that imports `torch_xla`, whose API changes: tried with 2.9. The server's variable
`PJRT_DEVICE` names the devices (`TPU`, `CUDA`, `NEURON`, or `CPU` with `CPU_NUM_DEVICES` for a trial).
"""

from __future__ import annotations

import fnmatch
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

SECTION = "xla"  # in model-config.yaml


def device_of(config: Mapping[str, Any]) -> torch.device:
    """Return the device of this process; with a mesh in the model config it stands for all devices."""
    if config.get(SECTION) is not None:
        importlib.import_module("torch_xla.runtime").use_spmd()
    device: torch.device = importlib.import_module("torch_xla").device()
    return device


def wait() -> None:
    """Run the operations that are pending, and wait until they are done."""
    importlib.import_module("torch_xla").sync(wait=True)


def over_mesh(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.nn.Module:
    """Divide the weights of a model on XLA's device over the mesh of the model config, and return the model.

    The section `xla` has `mesh`, the sizes of named axes, and `partition`, from patterns of parameter names
    to the axes that divide each dimension, or null. Other weights, and the inputs, are whole on each device.

    Raises:
        ValueError: the section is wrong, or does not fit the devices or the model.
    """
    section = config.get(SECTION)
    if section is None:
        return model
    mesh, partition = _read(section)
    devices = importlib.import_module("torch_xla.runtime").global_runtime_device_count()
    if math.prod(mesh.values()) != devices:
        raise ValueError(
            f"{SECTION}.mesh has {math.prod(mesh.values())} places, and there are {devices} devices"
        )
    spmd = importlib.import_module("torch_xla.distributed.spmd")
    over = spmd.Mesh(np.arange(devices), tuple(mesh.values()), tuple(mesh))
    parameters = dict(model.named_parameters())
    for pattern, axes in partition.items():
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise ValueError(f"{SECTION}.partition: no parameter is called {pattern}")
        for name in names:
            _check_axes(name, parameters[name], axes, mesh)
            spmd.mark_sharding(parameters[name], over, tuple(axes))
    return model


def _read(section: Any) -> tuple[dict[str, int], dict[str, list[str | None]]]:
    if not isinstance(section, dict) or section.keys() - {"mesh", "partition"}:
        raise ValueError(f"{SECTION}: expected a mapping with mesh and partition")
    mesh, partition = section.get("mesh"), section.get("partition", {})
    if (
        not isinstance(mesh, dict)
        or not mesh
        or any(type(size) is not int or size < 1 for size in mesh.values())
    ):
        raise ValueError(f"{SECTION}.mesh: expected sizes from 1 by names of axes, as {{model: 4}}")
    known = {*mesh, None}
    if not isinstance(partition, dict) or not all(
        isinstance(axes, list) and known.issuperset(axes) for axes in partition.values()
    ):
        raise ValueError(
            f"{SECTION}.partition: expected lists of {', '.join(mesh)} or null by patterns of names"
        )
    return mesh, partition


def _check_axes(name: str, parameter: torch.Tensor, axes: list[str | None], mesh: Mapping[str, int]) -> None:
    if len(axes) != parameter.dim():
        raise ValueError(
            f"{SECTION}.partition: {name} has {parameter.dim()} dimensions, found {len(axes)} axes"
        )
    for size, axis in zip(parameter.shape, axes, strict=True):
        if axis is not None and size % mesh[axis]:
            raise ValueError(f"{SECTION}.partition: {name} of size {size} can't be divided by {mesh[axis]}")
