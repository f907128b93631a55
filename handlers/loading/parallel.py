"""A model over the ranks of its worker: layers split by tensor parallelism, or stages of a pipeline.

Torch marks both `torch.distributed.tensor.parallel` and `torch.distributed.pipelining` as experimental, so no
other file uses them. Every rank calls the model with the same inputs and gets the same result.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree

from torchere.archiver.models.load.checkpoint import is_distributed_checkpoint, read_parts
from torchere.handlers.loading.split import SECTION, STYLES, Split

_MAKERS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
MAX_TRACES = 8  # shapes of inputs for which a rank keeps its stage
# Functions of one tensor that work on each element, so that they may run on a part of a layer's output.
_ELEMENTWISE = frozenset({"relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "mish", "dropout"})


def spread(
    model: torch.nn.Module, split: Split, device: torch.device, folder: Path | None = None
) -> torch.nn.Module:
    """Return a module that runs the model over the ranks of this worker; call it in all of them.

    Args:
        model: the whole model, on the CPU; its weights should be memory-mapped, so that a rank reads its own.
        split: how many ranks, and what each has; `RANK` and `WORLD_SIZE` are in the environment.
        device: where this rank computes.
        folder: if it holds a distributed checkpoint, this rank reads its part of the weights from there.

    Raises:
        ModelRefused: the checkpoint is damaged, or that of another model.
        ValueError: the number of ranks is another, or the model can't be split like this.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != split.ranks:
        raise ValueError(
            f"{SECTION} in model-config.yaml asks for {split.ranks} ranks, and there are {ranks}"
        )
    if ranks == 1:
        return model.to(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    checkpoint = folder if folder is not None and is_distributed_checkpoint(folder) else None
    if split.pipeline > 1:
        if checkpoint:
            read_parts(_of_stage(model, dist.get_rank(), ranks), checkpoint)
        return Stages(model, device)
    styles = styles_of(model, split.plan, ranks)
    mesh = init_device_mesh(device.type, (ranks,))
    plan = {name: _MAKERS[style]() for name, style in styles.items()}
    # Each rank takes its part of the weights that it has itself, so nothing is sent.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if checkpoint:
        read_parts(model.state_dict(), checkpoint)
    return _apart(model, device)


def _apart(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Copy what is whole in each rank: a single view of the weights' file would keep all of it in memory."""
    copies: dict[torch.Tensor, torch.Tensor] = {}  # weights that layers share stay shared
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, value in own.items():
                if value is None or (isinstance(value, DTensor) and not _is_whole(value)):
                    continue
                if value not in copies:
                    copies[value] = _copy_of(value, device)
                own[name] = copies[value]  # type: ignore[assignment]  # a parameter stays one
    return model.to(device)


def _is_whole(value: DTensor) -> bool:
    return all(placement.is_replicate() for placement in value.placements)


def _copy_of(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(value, DTensor):
        local = value.to_local().detach().to(device, copy=True)
        copied: torch.Tensor = DTensor.from_local(local, value.device_mesh, value.placements, run_check=False)
    else:
        copied = value.detach().to(device, copy=True)
    is_parameter = isinstance(value, torch.nn.Parameter)
    return torch.nn.Parameter(copied, requires_grad=False) if is_parameter else copied


def styles_of(model: torch.nn.Module, plan: str | Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return the style of each layer that is split, by its name.

    Raises:
        ValueError: no layer is split, a pattern fits none, or a layer can't be split by the number of ranks.
    """
    if isinstance(plan, str):
        plan = getattr(model, "tp_plan", None) or _pairs(model)
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        fitting = [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(f"{SECTION}.plan: no layer is called {pattern}")
        if style not in STYLES:
            raise ValueError(f"{SECTION}.plan: {pattern} is {style}, expected one of {', '.join(STYLES)}")
        styles |= dict.fromkeys(fitting, style)
    if not styles:
        raise ValueError(
            f"{SECTION}.plan: auto finds no pair of linear layers to split; name layers: "
            '{"layers.*.up": colwise, "layers.*.down": rowwise}, or use pipeline instead of tensor'
        )
    for name, style in styles.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        size = weight.shape[style.startswith("rowwise")] if isinstance(weight, torch.Tensor) else 0
        if not size or size % ranks:
            raise ValueError(f"{SECTION}.plan: {name} of size {size} can't be split over {ranks} ranks")
    return styles


def _pairs(model: torch.nn.Module) -> dict[str, str]:
    """Find linear layers whose output goes through elementwise functions into another one, and nowhere else.

    Of such a pair the first is split by columns and the second by rows, so that one sum joins the ranks.
    """
    try:
        graph = torch.fx.symbolic_trace(model).graph
    except Exception:  # torch.fx raises whatever the model's code does with its stand-ins
        return {}
    styles: dict[str, str] = {}
    for node in graph.nodes:
        if not _is_linear(model, node):
            continue
        before = node.args[0]
        while _is_elementwise(model, before) and len(before.users) == 1:
            before = before.args[0]
        if _is_linear(model, before) and len(before.users) == 1 and before.target not in styles:
            styles |= {before.target: "colwise", node.target: "rowwise"}
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    return styles if all(calls.count(name) == 1 for name in styles) else {}


def _is_linear(model: torch.nn.Module, node: Any) -> bool:
    is_module = isinstance(node, torch.fx.Node) and node.op == "call_module"
    return is_module and type(model.get_submodule(str(node.target))) is torch.nn.Linear


def _is_elementwise(model: torch.nn.Module, node: Any) -> bool:
    if not isinstance(node, torch.fx.Node) or node.op not in ("call_module", "call_function", "call_method"):
        return False
    target: Any = model.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    return name.lower() in _ELEMENTWISE


class Stages(torch.nn.Module):
    """A model whose layers are spread over the ranks in order; each row of a batch passes them in turn.

    Each shape of a row is traced once. The weights stay where they are, and a rank uses those of its stage.

    Args:
        model: the whole model.
        device: where this rank computes.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        self._model = model.eval().requires_grad_(requires_grad=False)
        self._device = device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._starts = first_layers(model, self._ranks)
        self._traced: dict[Hashable, _Traced] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; called by all ranks with the same inputs, it returns the same in all."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf.to(self._device) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rows = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
        if not rows or any(tensor.dim() == 0 or tensor.shape[0] != rows for tensor in tensors):
            raise ValueError("a pipeline takes tensors with the batch as first dimension, and 1 row or more")
        constants = tuple(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        key = (str(spec), constants, tuple((tensor.dtype, tensor.shape[1:]) for tensor in tensors))
        if key not in self._traced:
            while len(self._traced) >= MAX_TRACES:
                del self._traced[next(iter(self._traced))]
            self._traced[key] = self._trace(leaves, spec, tensors)
        return self._traced[key].run(tensors, rows)

    def _trace(self, leaves: list[Any], spec: pytree.TreeSpec, tensors: list[torch.Tensor]) -> _Traced:
        seen = _Seen()
        flat = _Flat(self._model, leaves, spec, seen)
        starts = {f"model.{name}": SplitPoint.BEGINNING for name in self._starts}
        pipe = pipeline(flat, tuple(tensor[:1] for tensor in tensors), split_spec=starts)
        if pipe.num_stages != self._ranks:
            raise ValueError(
                f"the model has {pipe.num_stages} stages for these inputs, expected {self._ranks}"
            )
        if any(not shape or shape[0] != 1 for shape, _ in seen.made):
            raise ValueError("a pipeline returns tensors with the batch as first dimension, one row for each")
        stage = pipe.build_stage(self._rank, self._device)
        return _Traced(stage, seen.made, seen.result, self._device)


@dataclass
class _Traced:
    """A rank's stage for inputs of one shape."""

    stage: Any
    made: list[tuple[torch.Size, torch.dtype]]  # the tensors that the model returns for one row
    result: pytree.TreeSpec
    device: torch.device

    def run(self, inputs: list[torch.Tensor], rows: int) -> Any:
        schedule = ScheduleGPipe(self.stage, n_microbatches=rows)
        with torch.no_grad():
            out = schedule.eval(*(inputs if self.stage.is_first else ()))
        if self.stage.is_last:
            outputs = list(out) if isinstance(out, tuple | list) else [out]
        else:
            outputs = [
                torch.empty((rows, *shape[1:]), dtype=dtype, device=self.device) for shape, dtype in self.made
            ]
        outputs = [output.contiguous() for output in outputs]
        for output in outputs:
            dist.broadcast(output, src=dist.get_world_size() - 1)
        return pytree.tree_unflatten(outputs, self.result)


class _Seen:
    """What a model returned while it was traced. It is no attribute of the module: tracing restores those."""

    result: pytree.TreeSpec
    made: list[tuple[torch.Size, torch.dtype]]

    def keep(self, result: Any) -> tuple[torch.Tensor, ...]:
        tensors, self.result = pytree.tree_flatten(result)
        self.made = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return tuple(tensors)


class _Flat(torch.nn.Module):
    """The model with tensors as its only inputs and outputs."""

    def __init__(self, model: torch.nn.Module, leaves: list[Any], spec: pytree.TreeSpec, seen: _Seen) -> None:
        super().__init__()
        self.model = model
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._spec = spec
        self._seen = seen

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._seen.keep(self.model(*args, **kwargs))


def _of_stage(model: torch.nn.Module, stage: int, stages: int) -> dict[str, torch.Tensor]:
    """Return the weights of a model but for those of layers of other stages."""
    prefix, bounds = _stage_bounds(model, stages)
    own = range(bounds[stage], bounds[stage + 1])
    others = tuple(f"{prefix}{layer}." for layer in range(bounds[-1]) if layer not in own)
    return {name: value for name, value in model.state_dict().items() if not name.startswith(others)}


def first_layers(model: torch.nn.Module, stages: int) -> list[str]:
    """Return the names of the layers that begin each stage but the first.

    Raises:
        ValueError: see `_stage_bounds`.
    """
    prefix, bounds = _stage_bounds(model, stages)
    return [f"{prefix}{layer}" for layer in bounds[1:-1]]


def _stage_bounds(model: torch.nn.Module, stages: int) -> tuple[str, list[int]]:
    """Return what the names of the layers begin with, and the bounds of stages with as many layers each.

    The layers are those of the longest `ModuleList` or `Sequential`, as in transformers and ResNets.

    Raises:
        ValueError: the model has no such list that is as long as the number of stages.
    """
    kinds = (torch.nn.ModuleList, torch.nn.Sequential)
    lists = [(name, len(module)) for name, module in model.named_modules() if isinstance(module, kinds)]
    name, count = max(lists, key=lambda each: each[1], default=("", 0))
    if count < stages:
        raise ValueError(
            f"{SECTION}: the model has no list of {stages} layers to make stages of; use tensor instead"
        )
    return f"{name}." if name else "", [round(stage * count / stages) for stage in range(stages + 1)]
