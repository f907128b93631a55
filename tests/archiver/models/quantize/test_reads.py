"""Layers whose weights a model's own code reads: they are found in a run, and stay in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_models import model_of
from torch import nn
from torch.nn import functional

from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.load.torchscript import saved, supported
from torchere.archiver.models.load.weight_only import Int8Linear
from torchere.archiver.models.quantize.methods import quantise
from torchere.archiver.models.quantize.reads import read_elsewhere


class Reading(nn.Module):
    """Reads values of one layer and the type of another, and calls the `forward` of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.typed = nn.Linear(256, 128), nn.Linear(128, 128)
        self.called = nn.Linear(128, 128)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.typed(torch.relu(self.encoder(x)))
        if isinstance(self.typed.weight, torch.Tensor):
            x = x.to(self.typed.weight.dtype)
        return functional.linear(self.called.forward(x), self.encoder.weight.t())


class Tied(nn.Module):
    """Its head has the weight of its embedding, and its scores are multiplied by it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, *, twice: bool = True) -> torch.Tensor:
        scores = self.head(self.words(ids))
        return scores @ self.words.weight if twice else scores


def test_reads_of_values_are_told_from_reads_of_a_type_and_the_model_stays_as_it_is() -> None:
    model = Reading()
    layers = dict(model.named_children())
    assert read_elsewhere(model, (torch.randn(2, 256),), layers) == {"encoder": True, "typed": False}
    assert not any("forward" in vars(layer) for layer in layers.values())
    assert model.calls == 0


class Used(nn.Module):
    """Passes its output and the weight of its layer to a function."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(256, 256), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.layer(x), self.layer.weight)


@pytest.mark.parametrize(
    ("use", "has_values"),
    [
        (lambda x, weight: x.to(weight), False),
        (lambda x, weight: x + weight.to(x)[0], True),
        (lambda x, weight: x.type_as(weight), True),  # the trace has the weight for its operand
    ],
)
def test_a_weight_whose_type_a_tensor_gets_is_not_read(use: Callable[..., Any], has_values: bool) -> None:
    model = Used(use)
    assert read_elsewhere(model, (torch.randn(2, 256),), {"layer": model.layer}) == {"layer": has_values}


class Typed(nn.Module):
    """Gives its output the type of the weight of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).to(self.layer.weight)


@pytest.mark.parametrize("script", [False, True])
def test_torchscript_holds_no_weight_in_fp32_for_its_type(*, script: bool) -> None:
    module, x = Typed().eval(), torch.randn(2, 256)
    made = quantise(model_of(module, x), "int8-weight", [(x,)])
    with torch.no_grad():
        compiled = to_torchscript(made.module, (x,), script=script)
        assert len(saved(compiled)) < 2 * module.layer.weight.numel()
        found = compiled(x.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, made.module(x))


def test_all_layers_with_a_common_weight_are_read() -> None:
    model, ids = Tied(), torch.tensor([[1, 2]])
    assert read_elsewhere(model, (ids,), dict(model.named_children())) == {"words": True, "head": True}


def test_a_model_that_fails_reads_no_more() -> None:
    model = Reading()
    assert read_elsewhere(model, (torch.randn(2, 3),), dict(model.named_children())) == {}


class Decoding(nn.Module):
    """Multiplies by the transposed weight of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layer = nn.Linear(256, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.layer(torch.relu(self.encoder(x))), self.encoder.weight.t())


@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static", "int8-weight"])
def test_a_layer_whose_weight_is_read_stays_in_fp32(method: str) -> None:
    if method != "int8-weight" and not supported():
        pytest.skip("this build of torch has no int8 engine")
    torch.manual_seed(0)
    module, x = Decoding().eval(), torch.randn(8, 256)

    made = quantise(model_of(module, x), method, [(x,)])

    assert "1 l" in made.notes[0]  # layers; linear layers
    assert made.notes[0].endswith("; in fp32, as other code uses their weights: encoder")
    torch.testing.assert_close(made.module(x), module(x), rtol=0.1, atol=0.1)


def test_a_program_has_a_weight_that_is_read_in_8_bits() -> None:
    module, x = Decoding().eval(), torch.randn(8, 256)
    made = quantise(model_of(module, x), "int8-weight", [(x,)], target="export")
    assert isinstance(made.module.get_submodule("encoder"), Int8Linear)
