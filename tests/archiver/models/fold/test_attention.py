"""Opening torch's attention in a model: what changes, what stays, and that its answers do.

The plain layers are held against torch's own, over what its forward takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim, export
from torch.nn import functional

from torchere.archiver.models.fold.attention import (
    CrossAttention,
    Encoder,
    EncoderLayer,
    SelfAttention,
    open_attention,
)
from torchere.archiver.models.quantize.candidates import plain_attention

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


# The layers.

Found = tuple[torch.Tensor, torch.Tensor | None]


def biased_attention(**settings: Any) -> nn.MultiheadAttention:
    made = nn.MultiheadAttention(WIDTH, **{"num_heads": 2, "batch_first": True, **settings}).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases, too, which are 0 at first
    return made


def biased_encoder(layers: int = 2, nested: bool = True, **settings: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, **{"batch_first": True, **settings})
    last = nn.LayerNorm(WIDTH)
    made = nn.TransformerEncoder(layer, layers, norm=last, enable_nested_tensor=nested).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def plain(original: nn.TransformerEncoder) -> Encoder:
    made: Any = copy.deepcopy(original)
    for index, layer in enumerate(made.layers):
        layer.self_attn = SelfAttention(layer.self_attn)
        made.layers[index] = EncoderLayer(layer)
    return Encoder(made).eval()


def both(original: nn.Module, made: nn.Module, *given: torch.Tensor, **named: Any) -> tuple[Found, Found]:
    with torch.no_grad(), plain_attention():
        return original(*given, **named), made(*given, **named)


def assert_alike(wanted: Found, found: Found) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert (found[1] is None) == (wanted[1] is None)
    if found[1] is not None and wanted[1] is not None:
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-5, equal_nan=True)


@st.composite
def masks(draw: st.DrawFn, rows: int | None, heads: int, length: int, keys: int) -> dict[str, torch.Tensor]:
    """Masks in all their shapes; some of true and false, some of numbers. A row may be masked as a whole."""
    is_bool = draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 1000)))

    def mask(*shape: int) -> torch.Tensor:
        return torch.rand(*shape) < 0.3 if is_bool else torch.randn(*shape)

    found: dict[str, torch.Tensor] = {}
    if draw(st.booleans()):
        found["key_padding_mask"] = mask(*(() if rows is None else (rows,)), keys)
    shapes: list[tuple[int, ...]] = [(), (length, keys), ((rows or 1) * heads, length, keys)]
    shape = draw(st.sampled_from(shapes))
    if shape:
        found["attn_mask"] = mask(*shape)
    return found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_attention_computes_what_torchs_does_with_any_masks_and_shapes(data: st.DataObject) -> None:
    draw = data.draw
    rows, heads = draw(st.sampled_from([None, 1, 3])), draw(st.sampled_from([1, 2, 4]))
    is_first, is_self = draw(st.booleans()), draw(st.booleans())
    length = draw(st.integers(1, 5))
    keys = length if is_self else draw(st.integers(1, 5))
    widths = {} if is_self else draw(st.sampled_from([{}, {"kdim": 5, "vdim": 3}]))
    original = biased_attention(num_heads=heads, batch_first=is_first, bias=draw(st.booleans()), **widths)
    kind = CrossAttention if widths else draw(st.sampled_from([SelfAttention, CrossAttention]))

    def tensor(size: int, width: int) -> torch.Tensor:
        made = torch.randn(size, width) if rows is None else torch.randn(rows, size, width)
        return made if is_first or rows is None else made.transpose(0, 1)

    query = tensor(length, WIDTH)
    given = (
        [query] * 3
        if is_self
        else [query, tensor(keys, widths.get("kdim", WIDTH)), tensor(keys, widths.get("vdim", WIDTH))]
    )
    named = {
        "need_weights": draw(st.booleans()),
        "average_attn_weights": draw(st.booleans()),
        **draw(masks(rows, heads, length, keys)),
    }

    assert_alike(*both(original, kind(original), *given, **named))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_causal_mask_is_taken_with_its_hint_as_torchs_does(padded: bool, need_weights: bool) -> None:
    original, x = biased_attention(), torch.randn(3, 5, WIDTH)
    named: dict[str, Any] = {
        "attn_mask": nn.Transformer.generate_square_subsequent_mask(5),
        "is_causal": True,
        "need_weights": need_weights,
    }
    if padded:
        named["key_padding_mask"] = torch.zeros(3, 5).masked_fill(torch.arange(5) > 3, -torch.inf)

    assert_alike(*both(original, SelfAttention(original), x, x, x, **named))


def test_a_causal_hint_without_a_mask_is_refused_as_torchs_does() -> None:
    original, x = biased_attention(), torch.randn(3, 5, WIDTH)

    for layer in (original, SelfAttention(original)):
        with plain_attention(), pytest.raises(RuntimeError, match="attn_mask"):
            layer(x, x, x, is_causal=True, need_weights=False)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_computes_what_torchs_does(norm_first: bool, batch_first: bool, activation: str) -> None:
    original = biased_encoder(
        nested=False, norm_first=norm_first, batch_first=batch_first, activation=activation
    )
    x = torch.randn(4, 6, WIDTH)
    mask = torch.rand(6 if batch_first else 4, 6 if batch_first else 4).fill_diagonal_(0) < 0.5

    with torch.inference_mode():
        wanted, found = (one(x, mask=mask) for one in (original, plain(original)))

    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_an_encoder_gives_at_padding_what_torchs_gives_by_nested_tensors(kind: torch.dtype) -> None:
    original, x = biased_encoder(), torch.randn(3, 6, WIDTH)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [1]])
    given = padding if kind is torch.bool else torch.zeros(3, 6).masked_fill(padding, -torch.inf)

    with torch.inference_mode():
        wanted, found = (one(x, src_key_padding_mask=given) for one in (original, plain(original)))

    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_between_is_left_alone_and_no_row_depends_on_the_others() -> None:
    original, x = biased_encoder(), torch.randn(3, 6, WIDTH)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 0] = padding[1, 3] = padding[2, 5] = True  # only that of the last row is at its end
    rows = [slice(row, row + 1) for row in range(3)]

    with torch.inference_mode():
        wanted = torch.cat([original(x[row], src_key_padding_mask=padding[row]) for row in rows])
        found = plain(original)(x, src_key_padding_mask=padding)

    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Padded(nn.Module):
    """An encoder whose mask is a tensor beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = plain(biased_encoder())

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.encoder(x, src_key_padding_mask=padding)
        return states


@pytest.mark.parametrize("form", ["traced", "scripted", "exported"])
def test_compiled_it_takes_any_batch_and_any_padding(form: str) -> None:
    made, example = Padded().eval(), (torch.randn(2, 6, WIDTH), torch.arange(6) >= torch.tensor([[6], [2]]))
    other = (torch.randn(5, 6, WIDTH), torch.arange(6) >= torch.tensor([[1], [2], [6], [4], [6]]))
    batch = {0: Dim("batch", min=1, max=16)}
    compiled: Any
    with torch.no_grad():
        if form == "traced":
            compiled = torch.jit.trace(made, example)
        elif form == "scripted":
            compiled = torch.jit.script(made)
        else:
            compiled = export(made, example, dynamic_shapes=(batch, batch)).module()

        torch.testing.assert_close(compiled(*other), made(*other), rtol=1e-4, atol=1e-5)
