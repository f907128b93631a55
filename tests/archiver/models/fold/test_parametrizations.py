"""Weights that a model computes at each call become plain ones in a copy, with the same answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from torchere.archiver.models.fold.parametrizations import without_parametrizations
from torchere.archiver.models.quantize.methods import bf16

Normalise = Callable[[nn.Module], nn.Module]


def pruned(layer: nn.Module) -> nn.Module:
    """Prune the weight twice, and the bias."""
    for name in ("weight", "weight", "bias"):
        prune.l1_unstructured(layer, name, 0.3)
    return layer


NORMALISED = [
    *(parametrizations.weight_norm, parametrizations.spectral_norm),
    *(weight_norm, spectral_norm, pruned),
]
ROWS = (torch.randn(4, 16),)
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


def normalised(normalise: Normalise) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(normalise(nn.Linear(16, 16)), nn.ReLU(), normalise(nn.Linear(16, 4))).eval()
    with torch.no_grad():
        model(*ROWS)
    return model


@pytest.mark.parametrize("normalise", NORMALISED)
def test_the_copy_has_plain_layers_and_the_original_keeps_its_own(normalise: Normalise) -> None:
    model = normalised(normalise)
    with torch.no_grad():
        before = model(*ROWS)
        made: Any = without_parametrizations(model)
        assert torch.equal(made(*ROWS), before)
        assert torch.equal(model(*ROWS), before)
    assert [type(layer) for layer in made] == [nn.Linear, nn.ReLU, nn.Linear]
    assert set(made.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "0.weight" not in model.state_dict()


@pytest.mark.parametrize("normalise", NORMALISED)
def test_weights_that_ran_with_gradients_are_copied(normalise: Normalise) -> None:
    model = normalised(normalise)
    wanted = model(*ROWS)
    made: Any = without_parametrizations(model)
    assert [type(layer) for layer in made] == [nn.Linear, nn.ReLU, nn.Linear]
    torch.testing.assert_close(made(*ROWS), wanted)
    assert bf16(model, has_bf16=True)(*ROWS).dtype is torch.float32


def test_a_weight_that_a_pruned_layer_shares_stays_whole_in_the_other() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    model.get_submodule("1").weight = model.get_submodule("0").weight
    prune.l1_unstructured(model.get_submodule("1"), "weight", 0.5)
    torch.testing.assert_close(without_parametrizations(model)(*ROWS), model(*ROWS))


def test_copies_of_one_parametrised_layer_become_plain_each() -> None:
    layer = parametrizations.weight_norm(nn.Linear(16, 16))
    model = nn.Sequential(layer, copy.deepcopy(layer)).eval()
    made: Any = without_parametrizations(model)
    assert [type(one) for one in made] == [nn.Linear, nn.Linear]
    torch.testing.assert_close(made(*ROWS), model(*ROWS))


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_layers_answer_the_same(cell: Any) -> None:
    model = parametrizations.weight_norm(cell(16, 8), "weight_hh_l0").eval()
    with torch.no_grad():
        model.parametrizations.weight_hh_l0.original0.mul_(2)
    made: Any = without_parametrizations(model)
    torch.testing.assert_close(made(*ROWS)[0], model(*ROWS)[0])
    assert type(made) is cell


@pytest.mark.parametrize(
    "plain",
    [nn.Linear(16, 4), torch.jit.script(nn.Linear(16, 4)), nn.LSTM(16, 4)],
    ids=["linear", "script", "lstm"],
)
def test_a_model_without_any_is_not_copied(plain: nn.Module) -> None:
    assert without_parametrizations(plain) is plain
