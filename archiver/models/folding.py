"""Padding and batch normalisation move into the convolutions before a model is quantised or compiled.

A padding of its own before a convolution makes the int8 convolution many times slower, a batch normalisation
behind it costs a pass over memory, and both hide the convolution from the quantiser. The folded model
computes the same function, up to the rounding of float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.folding_calls import lift_functional_convolutions
from torchere.archiver.models.folding_graph import calls_of, module_at, only_user_of, replace_module
from torchere.archiver.models.folding_padding import fold_paddings
from torchere.archiver.models.verify_outputs import answers, difference

_SAME = 1e-4  # drift of a folded model: only the order of sums is another
_NORMALISATIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.Linear: nn.BatchNorm1d,
}


class NotTraceable(ModelRefused):
    """The model's forward can't be written down as one graph of operations."""


@dataclass(frozen=True)
class Folded:
    """A model as a graph of plain layers, and how much was folded into them."""

    module: fx.GraphModule  # eval mode; shares no tensor with the model it was made of
    functional: int  # convolutions that were called as functions
    paddings: int
    normalisations: int

    @property
    def note(self) -> str:
        """What was done, in one line; empty when nothing was."""
        counts = (
            (self.functional, "functional convolutions"),
            (self.paddings, "paddings"),
            (self.normalisations, "batch normalisations"),
        )
        return ", ".join(f"{count} {what}" for count, what in counts if count)


def fold(module: nn.Module) -> Folded:
    """A copy of the model with paddings and batch normalisations folded into its convolutions.

    Modules of `torch.nn` stay as they are; a layer of the model's own that calls `F.conv2d` with parameters
    becomes a plain `nn.Conv2d`.

    Raises:
        NotTraceable: its forward branches on values, or calls what can't be traced. `int8-dynamic` can do
            with such a model.
    """
    graph = _traced(copy.deepcopy(module).eval())
    functional = lift_functional_convolutions(graph)
    paddings = fold_paddings(graph)
    normalisations = _fold_normalisations(graph)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return Folded(graph, functional, paddings, normalisations)


def folded_paddings(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Folded | None:
    """`fold` for a model that stays in fp32; None where nothing is padded, or where it doesn't work.

    The folded model is run on the example: tracing can take another branch than the model would, such as that
    for an optional argument.
    """
    if not any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return None  # before a copy is made of it
    try:
        folded = fold(module)
        if not folded.paddings:
            return None
        with torch.inference_mode():
            found = difference([(answers(module, example), answers(folded.module, example))])
    # Broad, because it runs a model's own code in a way that its author did not mean; it is fine unfolded.
    except Exception:
        return None
    return folded if found.drift <= _SAME else None


def _traced(module: nn.Module) -> fx.GraphModule:
    if isinstance(module, torch.jit.ScriptModule):
        raise NotTraceable(
            "the model is TorchScript, whose layers can't be changed any more; "
            "quantise the eager model that it was made of (--model-file, or module:factory)"
        )
    try:
        return fx.symbolic_trace(module)
    # Tracing runs the model's own code on stand-ins for tensors, so any error may come out of it.
    except Exception as error:
        found = (str(error).splitlines() or [""])[0]
        raise NotTraceable(
            f"the forward of {type(module).__name__} can't be traced as a graph "
            f"({type(error).__name__}: {found}); use int8-dynamic, which needs no graph"
        ) from error


def _fold_normalisations(graph: fx.GraphModule) -> int:
    folded = 0
    for node in list(graph.graph.nodes):
        following = only_user_of(node)
        layer = module_at(graph, node)
        if following is None or layer is None or calls_of(graph, node) > 1:
            continue
        normalisation: Any = module_at(graph, following)
        if type(normalisation) is not _NORMALISATIONS.get(type(layer)) or normalisation.running_mean is None:
            continue
        fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
        replace_module(graph, node, fuse(layer, normalisation))
        following.replace_all_uses_with(node)
        graph.graph.erase_node(following)
        folded += 1
    return folded
