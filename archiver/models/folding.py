"""Padding and batch normalisation move into the convolutions before a model is quantised or compiled.

A padding of its own before a convolution makes the int8 convolution many times slower, a batch normalisation
behind it costs a pass over memory, and both hide the convolution from the quantiser. The folded model
computes the same function, up to the rounding of float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.folding_calls import lift_functional_convolutions
from torchere.archiver.models.folding_normalisation import fold_normalisations
from torchere.archiver.models.folding_padding import fold_paddings
from torchere.archiver.models.verify_outputs import answers, difference

_SAME = 1e-4  # drift of a folded model: only the order of sums is another


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


def fold(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Folded:
    """A copy of the model with paddings and batch normalisations folded into its convolutions.

    Modules of `torch.nn` stay as they are; a layer of the model's own that calls `F.conv2d` with parameters
    becomes a plain `nn.Conv2d`. The copy is run on the example; where it answers otherwise than the model,
    nothing is folded.

    Args:
        module: eager; left as it is.
        example: arguments of the model.

    Raises:
        NotTraceable: its forward branches on values, or calls what can't be traced, or was misunderstood:
            tracing can take another branch than the model would, such as that for an optional argument.
            `int8-dynamic` can do with such a model.
    """
    model = copy.deepcopy(module).eval()
    folded = _folded(_traced(copy.deepcopy(model)), example)
    if _answers_alike(model, folded.module, example):
        return folded
    plain = Folded(_traced(copy.deepcopy(model)), 0, 0, 0)
    if _answers_alike(model, plain.module, example):
        return plain
    raise NotTraceable(
        f"the forward of {type(module).__name__} answers the example otherwise when it is traced as a graph "
        "(by a branch that tracing does not see, or something random); use int8-dynamic, which needs no graph"
    )


def folded_paddings(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Folded | None:
    """`fold` for a model that stays in fp32; None where nothing is padded, or where it doesn't work."""
    if not any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return None  # before a copy is made of it
    try:
        folded = fold(module, example)
    # Broad, because it runs a model's own code in a way that its author did not mean; it is fine unfolded.
    except Exception:
        return None
    return folded if folded.paddings else None


def _folded(graph: fx.GraphModule, example: tuple[torch.Tensor, ...]) -> Folded:
    functional = lift_functional_convolutions(graph)
    paddings = fold_paddings(graph)
    normalisations = fold_normalisations(graph, example)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return Folded(graph, functional, paddings, normalisations)


def _answers_alike(model: nn.Module, graph: fx.GraphModule, example: tuple[torch.Tensor, ...]) -> bool:
    with torch.inference_mode():
        wanted = answers(model, example)
        try:
            return difference([(wanted, answers(graph, example))]).drift <= _SAME
        # Broad: a graph that was traced wrongly may raise anything.
        except Exception:
            return False


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
