"""Dynamic int8: layers that do the ReLU behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchere.archiver.models.engines import rebuilt, saved, supported, using
from torchere.archiver.models.quantise_dynamic import dynamic, fuse_relu
from torchere.archiver.models.quantise_traced import quiet, traced

FUSED = "quantized::linear_relu_dynamic("


class Reused(nn.Module):
    """What the linear layer gives is needed without the ReLU, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.relu() + y


def int8(module: nn.Module, engine: str) -> torch.jit.ScriptModule:
    torch.manual_seed(0)
    with using(engine), quiet():
        return traced(dynamic(module.eval())[0], (torch.randn(2, 16),))


@pytest.mark.parametrize("engine", supported())
@pytest.mark.parametrize("in_place", [False, True])
def test_a_linear_layer_does_the_relu_behind_it_with_the_same_result(engine: str, in_place: bool) -> None:
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(in_place), nn.Linear(32, 4))
    script, x = int8(layers, engine), torch.randn(5, 16)
    before = rebuilt(saved(script), engine)

    fuse_relu(script)

    after = rebuilt(saved(script), engine)
    assert str(after.inlined_graph).count(FUSED) == 1
    assert "aten::relu" not in str(after.inlined_graph)
    torch.testing.assert_close(after(x), before(x), rtol=0, atol=0)


@pytest.mark.skipif(not supported(), reason="this build of torch has no int8 engine")
def test_a_relu_stays_where_its_input_is_needed_elsewhere() -> None:
    engine = supported()[-1]
    script, x = int8(Reused(), engine), torch.randn(5, 16)
    before = script(x)

    fuse_relu(script)

    assert FUSED not in str(script.inlined_graph)
    torch.testing.assert_close(script(x), before, rtol=0, atol=0)
