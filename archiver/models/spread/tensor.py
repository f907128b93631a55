"""Tensor parallelism: which layers are split by which style, and how a layer computes with its part.

Parts are plain tensors, and a layer that is split by rows sums its output with one `all_reduce`. Torch's own
`parallelize_module` was slower: its distributed tensors choose for each call how to move data, and gather
weights for inputs of two dimensions (decision 38).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from torchere.archiver.split import SECTION, STYLES

_WHOLE_OUTPUT = ("colwise_rep", "colwise_gather_output")
# Elementwise functions of one tensor, which may run on a part of a layer's output.
_ELEMENTWISE = frozenset({"relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "mish", "dropout"})


@dataclass(frozen=True)
class Part:
    """The part of a weight that a rank has: one of `ranks` equal parts along a dimension."""

    dimension: int
    rank: int
    ranks: int

    def slices(self, shape: torch.Size) -> tuple[slice, ...]:
        """Return the slices that select the part from a weight of this shape."""
        where = [slice(0, size) for size in shape]
        size = shape[self.dimension] // self.ranks
        where[self.dimension] = slice(self.rank * size, (self.rank + 1) * size)
        return tuple(where)


def split_layers(
    model: torch.nn.Module, styles: Mapping[str, str], group: dist.ProcessGroup
) -> dict[str, Part]:
    """Let the layers compute with a part of their weights; return each weight's part by each of its names.

    Args:
        model: its weights stay whole until the caller replaces them by their parts. Layers that `cut` has
            removed or emptied are skipped.
        styles: see `styles_of`.
        group: the ranks that share each layer.

    Raises:
        ValueError: a weight can't be split, see `_check_parts`.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    names: dict[torch.nn.Module, list[str]] = {}  # a layer may have several
    for name, module in layers.items():
        names.setdefault(module, []).append(name)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts: dict[str, Part] = {}
    for name, style in styles.items():
        layer: Any = layers.get(name)
        if layer is None or not (layer._parameters or layer._modules):  # `cut` has removed or emptied it
            continue
        part = Part(_dimension(layer, style), rank, ranks)
        parts |= {f"{each}.weight": part for each in names[layer]}
        run: Callable[[_Call, torch.Tensor], torch.Tensor]
        if isinstance(layer, torch.nn.Embedding):
            run = _words if "rowwise" in style else _features
        else:
            run = _rows if "rowwise" in style else _columns
            if layer.bias is not None and run is _columns:
                parts |= {f"{each}.bias": Part(0, rank, ranks) for each in names[layer]}
        layer.forward = _Call(run, layer, style, group)
    _check_parts(model, parts)
    return parts


def _check_parts(model: torch.nn.Module, parts: Mapping[str, Part]) -> None:
    """Raise ValueError if a weight to split is not a parameter, or layers that share it split it differently.

    Otherwise a layer would compute with a wrong part of the weight, and give wrong outputs without an error.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name in parts:
        if name not in weights:  # a hook or a parametrization makes it, as weight_norm does
            raise ValueError(f"{SECTION}.plan: {name} is no parameter, so it can't be split over ranks")
    first: dict[int, str] = {}
    for name, weight in weights.items():
        other = first.setdefault(id(weight), name)
        if parts.get(name) != parts.get(other):
            raise ValueError(
                f"{SECTION}.plan: {other} and {name} are one weight, and can't be split in different ways; "
                "give their layers styles that split it alike (an embedding rowwise, a linear layer "
                "colwise_rep), or leave both out"
            )


def _dimension(layer: torch.nn.Module, style: str) -> int:
    """Return the dimension of the weight that is split.

    A linear layer's weight has the inputs in dimension 1, an embedding's weight has the outputs there.
    """
    return int(("rowwise" in style) == isinstance(layer, torch.nn.Linear))


@dataclass(frozen=True)
class _Call:
    """The `forward` of a layer that is split; its parameter has the same name as in torch, `input`."""

    run: Callable[[_Call, torch.Tensor], torch.Tensor]
    layer: Any
    style: str
    group: dist.ProcessGroup

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self.run(self, input)

    @property
    def rank(self) -> int:
        """The number of this rank among the ranks that share the layer."""
        return dist.get_rank(self.group)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all ranks concatenated if the style asks for that, else this rank's part."""
        if self.style not in _WHOLE_OUTPUT:
            return part
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of the parts of all ranks."""
        part = part.contiguous()
        dist.all_reduce(part, group=self.group)
        return part


def _columns(call: _Call, given: torch.Tensor) -> torch.Tensor:
    return call.whole(functional.linear(given, call.layer.weight, call.layer.bias))


def _rows(call: _Call, given: torch.Tensor) -> torch.Tensor:
    if call.style == "rowwise_rep":
        given = given.tensor_split(dist.get_world_size(call.group), -1)[call.rank]
    bias = call.layer.bias if call.rank == 0 else None  # added by one rank, to be in the sum once
    return call.summed(functional.linear(given, call.layer.weight, bias))


def _features(call: _Call, words: torch.Tensor) -> torch.Tensor:
    return call.whole(functional.embedding(words, call.layer.weight))


def _words(call: _Call, words: torch.Tensor) -> torch.Tensor:
    count = call.layer.weight.shape[0]
    outside = (words < 0) | (words >= call.layer.num_embeddings)
    if words.device.type == "cpu" and bool(outside.any()):  # otherwise they would get zeros
        raise IndexError("index out of range in self")  # the text of torch
    own = words - call.rank * count
    is_own = (own >= 0) & (own < count)
    found = functional.embedding(own.where(is_own, 0), call.layer.weight)
    return call.summed(found.where(is_own[..., None], 0))


def styles_of(model: torch.nn.Module, plan: str | Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return the style of each layer to split, by the layer's name; if it has several, by the first.

    Raises:
        ValueError: no layer is split, a pattern matches no layer, or a layer can't be split by the number of
            ranks.
    """
    if isinstance(plan, str):
        plan = getattr(model, "tp_plan", None) or _pairs(model)
    firsts = {layer: name for name, layer in model.named_modules()}
    names = {name: firsts[layer] for name, layer in model.named_modules(remove_duplicate=False)}
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        fitting = [first for name, first in names.items() if fnmatch.fnmatchcase(name, pattern)]
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
        _check(model.get_submodule(name), name, style, ranks)
    return styles


def _check(layer: torch.nn.Module, name: str, style: str, ranks: int) -> None:
    if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
        raise ValueError(
            f"{SECTION}.plan: {name} is a {type(layer).__name__}, expected a linear layer or an embedding"
        )
    if type(layer).forward not in (torch.nn.Linear.forward, torch.nn.Embedding.forward):
        raise ValueError(f"{SECTION}.plan: {name}, a {type(layer).__name__}, computes in a way of its own")
    if getattr(layer, "max_norm", None) is not None:
        raise ValueError(f"{SECTION}.plan: {name} has a max_norm, which needs whole rows of its weight")
    size = layer.weight.shape[_dimension(layer, style)]
    if size % ranks:
        raise ValueError(f"{SECTION}.plan: {name} of size {size} can't be split over {ranks} ranks")


def _pairs(model: torch.nn.Module) -> dict[str, str]:
    """Find pairs of linear layers: only the second reads the first, at most through elementwise functions.

    The first is split by columns and the second by rows, so that a pair needs one `all_reduce`.
    """
    try:
        graph = torch.fx.symbolic_trace(model).graph
    except Exception:  # the model's code may raise any error on torch.fx's proxies
        return {}
    styles: dict[str, str] = {}
    for node in graph.nodes:
        if not _is_linear(model, node):
            continue
        before = _given(node)
        while _is_elementwise(model, before) and len(before.users) == 1:
            before = _given(before)
        if _is_linear(model, before) and len(before.users) == 1 and before.target not in styles:
            styles |= {before.target: "colwise", node.target: "rowwise"}
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    return styles if all(calls.count(name) == 1 for name in styles) else {}


def _given(node: torch.fx.Node) -> Any:
    """Return the first argument of a call, which torch's functions call `input`."""
    return node.args[0] if node.args else node.kwargs.get("input")


def _is_linear(model: torch.nn.Module, node: Any) -> bool:
    is_module = isinstance(node, torch.fx.Node) and node.op == "call_module"
    return is_module and type(model.get_submodule(str(node.target))) is torch.nn.Linear


def _is_elementwise(model: torch.nn.Module, node: Any) -> bool:
    if not isinstance(node, torch.fx.Node) or node.op not in ("call_module", "call_function", "call_method"):
        return False
    target: Any = model.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    return name.lower() in _ELEMENTWISE
