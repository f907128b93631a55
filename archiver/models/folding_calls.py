"""`F.conv2d(x, self.weight, ...)` in a layer of the model's own becomes a plain `nn.Conv2d`.

Architectures that pad by themselves (EfficientNet-Lite's `Conv2dStaticSamePadding` is one) subclass
`Conv2d` and call the function; quantisers and foldings look for the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torchere.archiver.models.folding_graph import insert_module, parameter_at

_DEFAULTS: dict[str, Any] = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
}
_ORDER = ("input", "weight", *_DEFAULTS)


def lift_functional_convolutions(graph: fx.GraphModule) -> int:
    """Change each such call with parameters as weights and constants as settings; returns how many."""
    lifted = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in (functional.conv2d, torch.conv2d):
            continue
        arguments = {**_DEFAULTS, **dict(zip(_ORDER, node.args, strict=False)), **node.kwargs}
        layer = _layer(graph, arguments)
        if layer is not None and isinstance(arguments["input"], fx.Node):
            insert_module(graph, node, layer, arguments["input"])
            lifted += 1
    return lifted


def _layer(graph: fx.GraphModule, arguments: dict[str, Any]) -> nn.Conv2d | None:
    weight, bias = parameter_at(graph, arguments["weight"]), parameter_at(graph, arguments["bias"])
    settings = {name: arguments[name] for name in ("stride", "padding", "dilation", "groups")}
    if not isinstance(weight, nn.Parameter) or any(_depends_on_values(value) for value in settings.values()):
        return None
    if arguments["bias"] is not None and bias is None:
        return None
    groups = int(settings["groups"])
    layer = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        (int(weight.shape[2]), int(weight.shape[3])),
        stride=_pair(settings["stride"]),
        padding=settings["padding"] if isinstance(settings["padding"], str) else _pair(settings["padding"]),
        dilation=_pair(settings["dilation"]),
        groups=groups,
        bias=bias is not None,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(bias)
    return layer.eval()


def _depends_on_values(value: Any) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(part, fx.Node) for part in parts)


def _pair(value: Any) -> tuple[int, int]:
    first, second = value if isinstance(value, (tuple, list)) else (value, value)
    return int(first), int(second)
