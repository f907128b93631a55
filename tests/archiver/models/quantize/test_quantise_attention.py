"""Quantising transformers of torch's own layers: what becomes int8, and in which forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from int8_models import Tensors, drift, model_of, needs_engine
from torch import nn

from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.load.torchscript import saved
from torchere.archiver.models.quantize.candidates import plain_attention
from torchere.archiver.models.quantize.methods import Quantised, quantise

WIDTH, LAYERS = 128, 2
pytestmark = [
    needs_engine,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


class Encoded(nn.Module):
    """An encoder that may be told about padding, and one number for each token."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=not settings)
        self.head = nn.Linear(WIDTH, 4)
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return scores


def samples(padded: bool = False, count: int = 4) -> list[Tensors]:
    torch.manual_seed(1)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [2]])
    return [(torch.randn(3, 6, WIDTH), *([padding] if padded else [])) for _ in range(count)]


def calls(made: Quantised, operator: str) -> int:
    assert isinstance(made.module, torch.jit.ScriptModule)
    return str(made.module.inlined_graph).count(f"quantized::{operator}(")


@pytest.mark.parametrize("settings", [{}, {"norm_first": True, "activation": "gelu"}], ids=["", "gelu"])
def test_all_linear_layers_of_an_encoder_become_int8_and_its_file_a_third(settings: dict[str, Any]) -> None:
    network = Encoded(**settings)

    made = quantise(model_of(network, *samples()[0]), "int8-dynamic", [])

    relus = LAYERS if not settings else 0  # which their layer does
    assert (calls(made, "linear_dynamic"), calls(made, "linear_relu_dynamic")) == (
        4 * LAYERS + 1 - relus,
        relus,
    )
    assert f"attention of {LAYERS} layers opened" in made.notes[0]
    assert drift(network, made.module, samples()) < 0.05
    with plain_attention():
        assert len(saved(made.module)) < 0.35 * len(saved(to_torchscript(network, samples()[0])))  # type: ignore[arg-type]


def test_static_int8_sees_the_layers_of_an_encoder() -> None:
    network = Encoded()

    made = quantise(model_of(network, *samples()[0]), "int8-static", samples())

    assert f"{4 * LAYERS + 1} layers, {len(samples())} samples" in made.notes[0]
    assert calls(made, "linear") + calls(made, "linear_relu") == 4 * LAYERS + 1
    assert drift(network, made.module, samples()) < 0.1


@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
def test_a_mask_of_padding_goes_through_and_the_batch_stays_free(method: str) -> None:
    network, given = Encoded(), samples(padded=True)

    made = quantise(model_of(network, *given[0]), method, given)

    assert drift(network, made.module, given) < 0.1
    other = (torch.randn(5, 6, WIDTH), torch.arange(6) >= torch.tensor([[1], [2], [6], [4], [6]]))
    assert drift(network, made.module, [other]) < 0.1


def test_an_encoder_can_be_scripted_after_it_became_int8() -> None:
    network = Encoded()

    made = quantise(
        model_of(network, *samples()[0]),
        "int8-dynamic",
        [],
        compiled=lambda module, example: to_torchscript(module, example, script=True),
    )

    assert drift(network, made.module, samples()) < 0.05
    assert drift(network, made.module, samples(padded=True)) < 0.05


def test_projections_that_hurt_most_go_back_to_fp32_by_their_own_names() -> None:
    network = Encoded()
    weights = network.encoder.layers[0].self_attn.out_proj.weight
    weights.data[:, 0] *= 2000.0

    made = quantise(model_of(network, *samples()[0]), "int8-dynamic", samples(), max_drift=0.02)

    assert "encoder.layers.0.self_attn.out_proj" in made.kept
