"""Static int8 quantisation of the rewritten network, measured on every engine this machine has.

Three decisions make the result good; each was measured (README.md, "What the int8 model is made of").

- Activations behind a ReLU6 are quantised over exactly 0 ... 6. The ReLU6 is then the saturation of the
  number format itself and costs nothing; the convolution runs with a plain ReLU, which is fused into it.
- Weights have 7 bits. Processors without VNNI add pairs of products of 8 bits in 16, and two of 255 x 127
  do not fit; two of 255 x 64 do. On such a processor 8 bits come out worse than 7.
- The input is quantised by the scale of the photograph's own pixels, which loses nothing at all.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from network import scripted
from torch import nn
from torch.ao.quantization import (
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
)
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

ENGINES = ("onednn", "x86", "fbgemm", "qnnpack")  # qnnpack is what ARM has
WEIGHT_LIMIT = 64  # 7 bits: -64 ... 63
_RELU6_SCALE = 6 / 255
_CLIPPED = r"(.*\.)?(_conv_stem|_conv_head|_expand_conv|_depthwise_conv|_swish)"  # followed by ReLU6
_LEVELS = {"dtype": torch.quint8, "quant_min": 0, "quant_max": 255}
# The network takes (pixel - 127) / 128.
_PIXELS: nn.Module = FixedQParamsObserver(scale=1 / 128, zero_point=127, **_LEVELS)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Packed:
    """The int8 network packed for one engine."""

    engine: str
    module: torch.jit.ScriptModule
    latency_ms: float  # one picture, one thread, median


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the int8 network names the same class first as the fp32 network, over the same pictures."""

    same: int
    pictures: int
    same_of_sure: (
        int  # among the pictures of which the fp32 network is sure: more than one half for one class
    )
    sure: int

    @property
    def acceptable(self) -> bool:
        """Whether nine of ten answers that the fp32 network is sure of stay the same."""
        return self.same_of_sure >= 0.9 * self.sure


def packed(network: nn.Module, calibration: list[torch.Tensor]) -> list[Packed]:
    """The network quantised and packed for each engine of this machine, the fastest first.

    Args:
        network: the rewritten network; left as it is.
        calibration: batches that the ranges of the activations are taken from.
    """
    calibrated = _calibrated(network, calibration)
    example = calibration[0][:1]
    found = [_packed(engine, calibrated, example) for engine in _present()]
    return sorted(found, key=lambda one: one.latency_ms)


def median_ms(module: torch.jit.ScriptModule, picture: torch.Tensor, budget_s: float = 0.8) -> float:
    """Median time of a run on one thread, in milliseconds; stops after 60 runs or `budget_s` seconds."""
    threads, times = torch.get_num_threads(), list[float]()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for _ in range(3):  # the first runs of TorchScript profile and compile
            module(picture)
        end = time.perf_counter() + budget_s
        while not times or (len(times) < 60 and time.perf_counter() < end):
            start = time.perf_counter()
            module(picture)
            times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 1e3 * statistics.median(times)


def agreement(
    fp32: torch.jit.ScriptModule, int8: torch.jit.ScriptModule, batches: list[torch.Tensor]
) -> Agreement:
    """Compare the first class of both networks for every picture."""
    with torch.inference_mode():
        wanted = torch.cat([fp32(batch) for batch in batches])
        found = torch.cat([int8(batch) for batch in batches])
    same = wanted.argmax(1) == found.argmax(1)
    sure = wanted.softmax(1).amax(1) > 0.5
    return Agreement(int(same.sum()), len(same), int((same & sure).sum()), int(sure.sum()))


def _present() -> list[str]:
    return [engine for engine in ENGINES if engine in torch.backends.quantized.supported_engines]


def _packed(engine: str, calibrated: torch.fx.GraphModule, example: torch.Tensor) -> Packed:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine  # decides how the weights are packed, while they are packed
    try:
        module = scripted(convert_fx(copy.deepcopy(calibrated)), example)
        return Packed(engine, module, median_ms(module, example))
    finally:
        torch.backends.quantized.engine = before


def _calibrated(network: nn.Module, batches: list[torch.Tensor]) -> torch.fx.GraphModule:
    prepared = prepare_fx(_with_relu(network), _configuration(), (batches[0],))
    setattr(prepared, _input_observer(prepared), _PIXELS)
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return prepared


def _with_relu(network: nn.Module) -> nn.Module:
    """A copy that has ReLU where the network has ReLU6; quantisation puts the upper limit back."""
    rewritten: Any = copy.deepcopy(network)
    for module in (rewritten, *rewritten._blocks):
        module._swish = nn.ReLU()
    evaluated: nn.Module = rewritten.eval()
    return evaluated


def _configuration() -> QConfigMapping:
    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=-WEIGHT_LIMIT,
        quant_max=WEIGHT_LIMIT - 1,
    )
    # Fake-quantised, not only observed: what comes after must be calibrated on values that end at 6.
    clipped = FixedQParamsFakeQuantize.with_args(  # type: ignore[no-untyped-call]
        observer=FixedQParamsObserver.with_args(scale=_RELU6_SCALE, zero_point=0, **_LEVELS)
    )
    observed = MinMaxObserver.with_args(**_LEVELS)
    elsewhere, before_relu6 = (
        QConfig(activation=activation, weight=weight)  # type: ignore[no-untyped-call]
        for activation in (observed, clipped)
    )
    return QConfigMapping().set_global(elsewhere).set_module_name_regex(_CLIPPED, before_relu6)


def _input_observer(prepared: torch.fx.GraphModule) -> str:
    """Name of what observes the input; it was given the range of the first convolution's output, 0 ... 6."""
    source = next(node for node in prepared.graph.nodes if node.op == "placeholder")
    return next(str(user.target) for user in source.users if user.op == "call_module")
