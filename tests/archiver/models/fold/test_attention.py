"""Opening torch's attention in a model: what changes, what stays, and that its answers do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchere.archiver.models.fold.attention import open_attention
from torchere.archiver.models.fold.attention_layers import (
    CrossAttention,
    Encoder,
    EncoderLayer,
    SelfAttention,
)

WIDTH = 8


class Around(nn.Module):
    """A layer that is called as `nn.MultiheadAttention` is, with one tensor as query, key and value."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found


class Subclass(nn.MultiheadAttention):
    """Might compute anything."""


class Reads(nn.Module):
    """Calls the function with the weights of the layer, as some published models do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.attention
        weights = inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.0
        out = inner.out_proj.weight, inner.out_proj.bias
        return functional.multi_head_attention_forward(x, x, x, WIDTH, 2, *weights, *out)[0]


class Asks(Around):
    """Gives another answer when its attention is not torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if isinstance(self.attention, nn.MultiheadAttention) else 1)


def attention(**settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True, **settings)


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def rows(count: int = 3) -> tuple[torch.Tensor, ...]:
    return (torch.randn(count, 5, WIDTH),)


def kinds(module: nn.Module) -> list[type[nn.Module]]:
    wanted = (SelfAttention, CrossAttention, EncoderLayer, Encoder)
    return [type(layer) for layer in module.modules() if isinstance(layer, wanted)]


def test_an_encoder_becomes_plain_layers_and_gives_the_same() -> None:
    original, given = encoder(), rows()

    opened = open_attention(original, given)

    assert opened.attentions == 2
    assert kinds(opened.module) == [Encoder, EncoderLayer, SelfAttention, EncoderLayer, SelfAttention]
    with torch.inference_mode():
        torch.testing.assert_close(opened.module(*given), original(*given), rtol=1e-4, atol=1e-5)


def test_the_original_stays_as_it_is() -> None:
    original = encoder()
    weights = copy.deepcopy(original.state_dict())

    made: Any = open_attention(original, rows()).module
    made.layers[0].self_attn.in_proj.weight.data.zero_()

    assert kinds(original) == []
    assert all(torch.equal(tensor, weights[name]) for name, tensor in original.state_dict().items())


def test_attention_to_another_tensor_gets_three_projections() -> None:
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True), 1).eval()
    given = (torch.randn(3, 5, WIDTH), torch.randn(3, 7, WIDTH))

    opened = open_attention(decoder, given)

    assert kinds(opened.module) == [SelfAttention, CrossAttention]
    with torch.inference_mode():
        torch.testing.assert_close(opened.module(*given), decoder(*given), rtol=1e-4, atol=1e-5)


def test_a_layer_in_two_places_stays_one() -> None:
    shared = Around(attention())

    made: Any = open_attention(nn.Sequential(shared, nn.Tanh(), shared).eval(), rows())

    assert made.attentions == 1
    assert made.module[0] is made.module[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: attention(add_bias_kv=True),
        lambda: attention(add_zero_attn=True),
        lambda: Subclass(WIDTH, 2, batch_first=True),
        lambda: hooked(attention()),
    ],
    ids=["add_bias_kv", "add_zero_attn", "subclass", "hook"],
)
def test_attention_that_may_compute_something_else_stays_as_it_is(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(Around(make()), Around(attention())).eval()

    opened: Any = open_attention(model, rows())

    assert opened.attentions == 1
    assert isinstance(opened.module[0].attention, nn.MultiheadAttention)
    assert isinstance(opened.module[1].attention, SelfAttention)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda _layer, _given, found: found)
    return layer


@pytest.mark.parametrize("model", [Reads().eval(), Asks(attention()).eval()], ids=["reads", "asks"])
def test_a_model_that_depends_on_torchs_layer_is_given_back(model: nn.Module) -> None:
    opened = open_attention(model, rows())

    assert opened.module is model
    assert opened.attentions == 0


def test_a_model_without_attention_is_given_back_and_not_even_run() -> None:
    model = nn.Linear(3, 4)
    script = torch.jit.script(encoder())

    assert open_attention(model, ()).module is model
    assert open_attention(script, ()).module is script
