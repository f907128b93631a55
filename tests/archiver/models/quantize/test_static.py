"""Static int8 of models that are not numbers of fp32 throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_models import model_of, needs_engine
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.fold.convolutions import fold
from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.load.torchscript import supported, using
from torchere.archiver.models.measure.difference import difference
from torchere.archiver.models.quantize import methods as module_under_test
from torchere.archiver.models.quantize.candidates import quiet
from torchere.archiver.models.quantize.methods import one_size, quantise, shared_scale
from torchere.archiver.models.quantize.static import calibrate


class Masked(nn.Module):
    """Tokens, and a mask of whole numbers that is brought into the shape of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask.unsqueeze(-1).to(torch.float32)
        scores: torch.Tensor = self.head((self.embedding(tokens) * kept).sum(1))
        return scores


class Sloped(nn.Module):
    """A slope between layers that become int8, as networks for faces have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Conv2d(3, 8, 3)
        self.slopes = nn.PReLU(8)
        self.head = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.slopes(self.wide(x))).mean((2, 3))
        return scores


class Blurred(nn.Module):
    """A filter that is no parameter, called as a function: a pooling that blurs."""

    filter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Conv2d(3, 8, 3)
        self.register_buffer("filter", torch.full((8, 1, 2, 2), 0.25))
        self.head = nn.Conv2d(8, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blurred = nn.functional.conv2d(self.wide(x), self.filter, stride=2, groups=8)
        scores: torch.Tensor = self.head(blurred).mean((2, 3))
        return scores


@pytest.fixture
def masked() -> LoadedModel:
    return model_of(Masked(), torch.randint(1, 100, (3, 5)), torch.ones(3, 5, dtype=torch.int64))


@needs_engine
@pytest.mark.parametrize("type_of_mask", [torch.int64, torch.bool])
def test_masks_of_whole_numbers_stay_what_they_are(masked: LoadedModel, type_of_mask: torch.dtype) -> None:
    tokens, mask = masked.example
    masked = model_of(masked.module, tokens, mask.to(type_of_mask))

    made = quantise(masked, "int8-static", [masked.example])

    cut = torch.tensor([[1, 1, 0, 0, 0]] * 3).to(type_of_mask)
    wanted, found = (one(tokens, cut) for one in (masked.module, made.module))
    assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic", "bf16"])
@pytest.mark.parametrize(("kind", "name"), [(torch.bfloat16, "BF16"), (torch.float64, "FP64")])
def test_a_model_of_other_numbers_than_fp32_is_refused_with_what_to_do(
    method: str, kind: torch.dtype, name: str
) -> None:
    model = model_of(nn.Linear(8, 4).to(kind), torch.rand(2, 8, dtype=kind))
    with pytest.raises(ModelRefused, match=rf"{method} starts from weights of FP32, .* are {name}; .*float"):
        quantise(model, method, [model.example])


def test_a_model_that_casts_to_float32_itself_is_refused_in_bfloat16(
    masked: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = module_under_test.bf16
    monkeypatch.setattr(module_under_test, "bf16", lambda module: real(module, has_bf16=True))
    with pytest.raises(ModelRefused, match=r"in bfloat16 failed: .* let it take the dtype of its inputs"):
        quantise(masked, "bf16", [])


@needs_engine
@pytest.mark.parametrize("layers", [Sloped, Blurred])
def test_what_torch_has_no_int8_for_stays_in_fp32_between_layers_that_become_int8(
    layers: type[nn.Module],
) -> None:
    torch.manual_seed(1)
    samples = [(torch.randn(4, 3, 10, 10),) for _ in range(4)]
    model = model_of(layers(), *samples[0])
    made = quantise(model, "int8-static", samples)
    with torch.inference_mode():
        found = difference([((model.module(*one),), (made.module(*one),)) for one in samples])
    assert 0 < found.drift < 0.1  # it is int8, and the same model


class Scaled(nn.Module):
    """Calls a function on the result of a layer, whose range differs from that of the function's."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.middle, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.middle(self.function(self.wide(x))).relu())
        return scores


SCALINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product": lambda x: x * 100,
    "a product from the right": lambda x: -100 * x,
    "a product by keyword": lambda x: torch.mul(x, other=100),
    "a product with a size": lambda x: x * x.shape[-1],
    "a product with a number made of a size": lambda x: x * x.shape[-1] ** 1.5,
    "a sum": lambda x: (x + 100) - 100,
    "a weighted sum": lambda x: torch.add(x, x.flip(-1), alpha=0.3),
}


@needs_engine
@pytest.mark.parametrize("name", SCALINGS)
def test_a_number_in_a_sum_or_product_costs_no_bits(name: str) -> None:
    torch.manual_seed(1)
    samples = [(torch.randn(4, 16),) for _ in range(8)]
    model = model_of(Scaled(SCALINGS[name]), *samples[0])
    made = quantise(model, "int8-static", samples)
    with torch.inference_mode():
        found = difference([((model.module(*one),), (made.module(*one),)) for one in samples])
    assert 0 < found.drift < 0.06


@needs_engine
@pytest.mark.parametrize(("number", "is_int8"), [(0.5, True), (50.0, False)])
def test_a_sum_that_loses_less_than_a_bit_is_int8(number: float, is_int8: bool) -> None:
    network = Scaled(lambda x: x + number).eval()
    with quiet():
        x = torch.randn(4, 16)
        converted = calibrate(fold(network, (x,)), [(x,)]).convert()
    assert ("ops.quantized.add" in converted.code) == is_int8


class Shared(nn.Module):
    """Calls a layer with weights and an activation several times, on values of different sizes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.activation = layer, nn.Hardswish()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.activation(self.layer(x * size)) for size in (1, 20, 400))


SHARED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(32, 32, 3, padding=1), (4, 32, 6, 6)),
    "linear": (lambda: nn.Linear(64, 64), (4, 64)),
}


@needs_engine
@pytest.mark.parametrize("kind", SHARED)
def test_a_layer_called_several_times_has_a_scale_for_each_call_and_its_weights_once(kind: str) -> None:
    torch.manual_seed(0)
    make, shape = SHARED[kind]
    samples = [(torch.randn(shape),) for _ in range(4)]
    model = model_of(Shared(make()), *samples[0])

    made = quantise(model, "int8-static", samples)

    with torch.inference_mode():
        pairs = zip(model.module(*samples[0]), made.module(*samples[0]), strict=True)
        assert all((found - wanted).norm() < 0.1 * wanted.norm() for wanted, found in pairs)
    weights = sum(one.numel() for one in model.module.parameters())
    assert made.script is not None
    assert len(made.script) < 2 * weights + 8_000
    assert made.notes[0].startswith("int8-static: 1 layers")


class Normalised(nn.Module):
    """Calls a layer for several levels, each with a normalisation of its own, as heads of detectors do."""

    def __init__(self, layer: nn.Module, norms: list[Any]) -> None:
        super().__init__()
        self.layer, self.norms = layer, nn.ModuleList(norms)
        for norm in norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(x), *(norm(self.layer(x)).relu() for norm in self.norms)


NORMALISED: dict[str, tuple[Callable[[], Normalised], tuple[int, ...]]] = {
    "convolution": (
        lambda: Normalised(nn.Conv2d(8, 8, 3), [nn.BatchNorm2d(8), nn.BatchNorm2d(8)]),
        (4, 8, 6, 6),
    ),
    "linear": (lambda: Normalised(nn.Linear(8, 8), [nn.BatchNorm1d(8), nn.BatchNorm1d(8)]), (4, 8)),
}


@needs_engine
@pytest.mark.parametrize("kind", NORMALISED)
def test_a_layer_before_several_normalisations_has_weights_for_each(kind: str) -> None:
    torch.manual_seed(0)
    make, shape = NORMALISED[kind]
    network, x = make().eval(), torch.randn(shape)
    with using(supported()[0]), quiet(), torch.no_grad():
        pairs = zip(network(x), calibrate(fold(network, (x,)), [(x,)]).convert()(x), strict=True)
        assert all((found - wanted).norm() < 0.1 * wanted.norm() for wanted, found in pairs)


@needs_engine
def test_a_layer_that_is_kept_is_kept_in_each_call() -> None:
    network = nn.Sequential(layer := nn.Linear(8, 8), nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 4)).eval()
    with quiet():
        x = torch.randn(4, 8)
        made = calibrate(fold(network, (x,)), [(x,)], kept=["0"])
        converted = made.convert()
    assert made.layers == 1
    assert sum(type(layer) is nn.Linear for layer in converted.modules()) == 2


def test_of_tokens_no_shared_scale_is_told(masked: LoadedModel) -> None:
    assert not shared_scale(masked, "int8-dynamic")
    assert shared_scale(model_of(nn.Linear(8, 4), torch.rand(2, 8)), "int8-dynamic")


class Averaged(nn.Module):
    """Casts a mask to the dtype of what a layer gives, which is int8 there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.wide(x))
        shown = mask[..., None].to(rows.dtype)
        return self.head((rows * shown).sum(1) / shown.sum(1).to(dtype=rows.dtype))


@needs_engine
def test_a_cast_to_the_dtype_of_a_layer_stays_one_to_fp32() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    model = model_of(Averaged(), torch.randn(3, 4, 8), mask)
    made = quantise(model, "int8-static", [model.example])
    with torch.no_grad():
        pair = ((model.module(*model.example),), (made.module(*model.example),))
    assert difference([pair]).drift < 0.1


def test_samples_of_one_size_are_told_where_the_size_may_vary() -> None:
    sizes = [FreeSize("batch", ((0, 0),), 1, 8), FreeSize("x_1", ((0, 1),), 4, 128)]
    alike, others = [(torch.rand(2, 16),)] * 2, [(torch.rand(2, 16),), (torch.rand(2, 30),)]
    (said,) = one_size("int8-static", alike, sizes)
    assert "all samples have x_1 of 16" in said
    assert "give --samples of all sizes" in said
    assert one_size("int8-static", others, sizes) == one_size("int8-dynamic", alike, sizes) == ()


class Attending(nn.Module):
    """Masks its scores by a statement, of which an example without padding shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores.masked_fill_(mask[:, None, :] == 0, -1e9)
        return self.head((scores.softmax(-1) @ x).mean(1))


@needs_engine
def test_a_mask_that_is_applied_in_place_stays() -> None:
    samples = [(torch.randn(2, 6, 16), torch.ones(2, 6)) for _ in range(8)]
    made = quantise(model_of(Attending(), *samples[0]), "int8-static", samples)
    padded = (samples[0][0], torch.tensor([[1.0, 1, 0, 0, 0, 0]] * 2))
    with torch.no_grad():
        found = difference([((Attending()(*padded),), (made.module(*padded),))])
    assert found.drift < 0.2


@needs_engine
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_layers_stay(layer: int, before: bool) -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
    net = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU6(), second, nn.PReLU(8), nn.Flatten()).eval()
    if before:
        net[layer].register_forward_pre_hook(lambda _layer, given: (given[0] * 1.5,))
    else:
        net[layer].register_forward_hook(lambda _layer, _given, result: result * 1.5)
    check_static(net, 1)


@needs_engine
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_convolutions_may_pad_in_each_way(mode: Any) -> None:
    torch.manual_seed(0)
    padded = nn.Conv2d(8, 8, 3, padding=1, padding_mode=mode)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU6(), padded, nn.ReLU6()).eval()
    check_static(net, 2 if mode == "reflect" else 1)


@needs_engine
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_normalisation_behind_a_transposed_convolution_of_groups_stays(groups: int) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    nn.init.uniform_(norm.weight, 0.5, 2)
    wide = nn.ConvTranspose2d(8, 8, 3, groups=groups)
    check_static(nn.Sequential(nn.Conv2d(4, 8, 3), wide, norm).eval(), 1)


def check_static(net: nn.Module, least: int) -> None:
    samples = [(3 * torch.randn(2, 4, 9, 9),) for _ in range(8)]
    with using("onednn" if "onednn" in supported() else supported()[0]), quiet(), torch.no_grad():
        made = calibrate(fold(net, samples[0]), samples)
        found, wanted = made.convert()(*samples[0]), net(*samples[0])
    assert made.layers >= least
    assert (found - wanted).abs().max() < 0.08 * wanted.abs().max()


class Spelled(nn.Module):
    """An operation of one kind between convolutions, by one of its names."""

    def __init__(self, operation: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.last = (nn.Conv2d(width, 8, 3) for width in (3, 3, 8))
        self.operation = operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.operation(self.one(x), self.other(x)))
        return scores


SPELLINGS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "torch.relu": (lambda x, _: torch.relu(x), "ConvReLU2d"),
    "relu": (lambda x, _: x.relu(), "ConvReLU2d"),
    "relu_": (lambda x, _: x.relu_(), "ConvReLU2d"),
    "add": (lambda x, y: x.add(y), "quantized.add"),
    "add_ and relu": (lambda x, y: x.add_(y).relu(), "quantized.add_relu"),
    "mul": (lambda x, y: x.mul(y), "quantized.mul"),
    "torch.max_pool2d": (lambda x, _: torch.max_pool2d(x, kernel_size=2), "boolean_dispatch"),
}


@needs_engine
@pytest.mark.parametrize(("operation", "named"), SPELLINGS.values(), ids=SPELLINGS)
def test_an_operation_is_int8_by_each_of_its_names(
    operation: Callable[..., torch.Tensor], named: str
) -> None:
    model, samples = Spelled(operation).eval(), [(torch.rand(2, 3, 12, 12),)]
    with quiet(), torch.no_grad():
        made = calibrate(fold(model, samples[0]), samples).convert()
        assert difference([(model(*samples[0]), made(*samples[0]))]).drift < 0.1
    nodes = [str(node.target) for node in made.graph.nodes]
    layers = [type(layer).__name__ for layer in made.children()]
    assert any(named in name for name in nodes + layers)
    assert sum("dequantize" in name for name in nodes) == 1  # of the answer


@needs_engine
def test_a_sum_with_a_factor_stays_as_it_is() -> None:
    model, samples = Spelled(lambda x, y: x.add(y, alpha=2)).eval(), [(torch.rand(2, 3, 12, 12),)]
    with quiet(), torch.no_grad():
        made = calibrate(fold(model, samples[0]), samples).convert()
        assert difference([(model(*samples[0]), made(*samples[0]))]).drift < 0.1
