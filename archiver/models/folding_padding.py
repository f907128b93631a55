"""`ZeroPad2d` or `F.pad` before a convolution moves into the convolution.

A plain convolution pads both ends of an axis alike. Where the padding is uneven the kernel grows by taps of
zero: one more pixel on the right and at the bottom, as a stride of 2 often has it, is a kernel with one more
row and column of zeros in front, padded by the larger number on all sides. Its other taps fall where they
belong, and the result has the same size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torchere.archiver.models.folding_graph import calls_of, module_at, replace_module


@dataclass(frozen=True, slots=True)
class Axis:
    """How one axis of a convolution takes up its padding."""

    padding: int  # on both ends
    front: int  # rows of zero taps before the kernel
    behind: int  # rows of zero taps after it


def folded_axis(before: int, after: int, dilation: int) -> Axis | None:
    """How a padding of `before` and `after` pixels goes into a convolution; None when it can't.

    It can't when pixels are cut off, or when the difference is no whole number of dilated taps.
    """
    if before < 0 or after < 0 or (after - before) % dilation:
        return None
    taps = abs(after - before) // dilation
    return Axis(max(before, after), taps if after > before else 0, taps if before > after else 0)


def fold_paddings(graph: fx.GraphModule) -> int:
    """Fold every padding whose only readers are convolutions; returns how many."""
    return sum(_fold(graph, node) for node in list(graph.graph.nodes))


def _fold(graph: fx.GraphModule, node: fx.Node) -> bool:
    source, sides = _padding_of(graph, node)
    readers = list(node.users)
    if source is None or sides is None or not readers:
        return False
    folded = [_grown(module_at(graph, reader), sides) for reader in readers]
    if None in folded or any(calls_of(graph, reader) > 1 for reader in readers):
        return False
    for reader, layer in zip(readers, folded, strict=True):
        if layer is not None:
            replace_module(graph, reader, layer)
    node.replace_all_uses_with(source)
    graph.graph.erase_node(node)
    return True


def _padding_of(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node | None, tuple[int, ...] | None]:
    """What is padded, and by how much: left, right, top, bottom."""
    layer = module_at(graph, node)
    if isinstance(layer, nn.ZeroPad2d) or (isinstance(layer, nn.ConstantPad2d) and layer.value == 0):
        return _node(node.args[0]), tuple(layer.padding)
    if node.op != "call_function" or node.target is not functional.pad:
        return None, None
    given = {**dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)), **node.kwargs}
    sides: Any = given.get("pad")
    plain = isinstance(sides, (tuple, list)) and all(isinstance(side, int) for side in sides)
    if not plain or len(sides) != 4 or given.get("mode", "constant") != "constant" or given.get("value"):
        return None, None
    return _node(given["input"]), tuple(sides)


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _grown(layer: nn.Module | None, sides: tuple[int, ...]) -> nn.Conv2d | None:
    """The convolution with that padding inside; None when it has to stay outside."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    left, right, top, bottom = sides
    high, wide = layer.padding
    rows = folded_axis(top + high, bottom + high, layer.dilation[0])
    columns = folded_axis(left + wide, right + wide, layer.dilation[1])
    if rows is None or columns is None:
        return None
    kernel = functional.pad(layer.weight.detach(), (columns.front, columns.behind, rows.front, rows.behind))
    grown = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        (int(kernel.shape[2]), int(kernel.shape[3])),
        stride=(layer.stride[0], layer.stride[1]),
        padding=(rows.padding, columns.padding),
        dilation=(layer.dilation[0], layer.dilation[1]),
        groups=layer.groups,
        bias=layer.bias is not None,
        dtype=kernel.dtype,
    )
    with torch.no_grad():
        grown.weight.copy_(kernel)
        if layer.bias is not None and grown.bias is not None:
            grown.bias.copy_(layer.bias)
    return grown.eval()
