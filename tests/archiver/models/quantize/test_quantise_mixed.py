"""Which layers stay in fp32 when int8 drifts too far: the decision, the search, and models that need it."""

from __future__ import annotations

import pytest
import torch
from int8_models import model_of, needs_engine
from torch import nn

from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.measure.difference import difference
from torchere.archiver.models.quantize.candidates import Sensitive, search, sensitivities, to_give_back
from torchere.archiver.models.quantize.methods import Quantised, quantise

LAYERS = [Sensitive("worst", 0.4, 10), Sensitive("large", 0.3, 1000), Sensitive("mild", 0.1, 10)]


@pytest.mark.parametrize(
    ("wanted", "most", "kept"),
    [
        (0.45, 2000, {"worst"}),
        (0.2, 2000, {"worst", "large"}),
        (0.01, 2000, {"worst", "large", "mild"}),
        (0.01, 100, {"worst", "mild"}),  # the large one would cost too much of the size
        (0.6, 2000, set()),
    ],
)
def test_as_many_go_back_as_their_squares_foretell_and_the_size_allows(
    wanted: float, most: float, kept: set[str]
) -> None:
    assert to_give_back(LAYERS, 0.51, wanted, most) == kept


def test_the_search_ends_when_the_drift_is_reached() -> None:
    tried: list[frozenset[str]] = []

    def drift_with(kept: frozenset[str]) -> float:
        tried.append(kept)
        return 0.5 - 0.2 * len(kept)

    kept = search(LAYERS, 2000, 0.51, 0.3, drift_with)

    assert kept in ({"worst"}, {"worst", "large"})
    assert kept == tried[-1]
    assert len(tried) <= 3


def test_the_search_keeps_what_drifts_least_when_the_drift_can_not_be_reached() -> None:
    assert search(LAYERS, 2000, 0.51, 0.3, lambda _kept: 0.9) == frozenset()
    assert search(LAYERS, 2000, 0.51, 0.3, lambda kept: 0.5 - 0.01 * len(kept)) != frozenset()


def test_a_search_never_gives_back_all_there_is() -> None:
    def drift_with(kept: frozenset[str]) -> float:
        raise AssertionError(f"{kept} was converted")

    assert search(LAYERS[:1], 2000, 0.51, 0.3, drift_with) == frozenset()
    assert search([], 2000, 0.51, 0.3, drift_with) == frozenset()


class Uneven(nn.Module):
    """Its first layer gets one value a thousand times the others, which 8 bits then can't tell apart."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.clip, self.second = first, nn.ReLU6(), second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.clip(self.first(x)))
        return found.flatten(1)


def uneven(convolutional: bool) -> tuple[LoadedModel, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    if convolutional:
        network = Uneven(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 128, 1)).eval()
        samples = [torch.randn(2, 8, 4, 4) for _ in range(4)]
    else:
        network = Uneven(nn.Linear(8, 16), nn.Linear(16, 128)).eval()
        samples = [torch.randn(2, 8) for _ in range(4)]
    with torch.no_grad():
        network.get_parameter("first.weight")[:, 0] = 0.0
    for sample in samples:
        sample[:, 0] = 1000.0
    return model_of(network, samples[0]), [(sample,) for sample in samples]


def test_the_layer_that_hurts_comes_first_and_the_model_is_left_as_it_was() -> None:
    model, samples = uneven(convolutional=False)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}

    found = sensitivities(model.module, samples, (nn.Linear,))

    assert [one.name for one in found] == ["first", "second"]
    assert found[0].drift > 10 * found[1].drift
    assert found[0].weights == 128
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())


@needs_engine
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
def test_a_layer_that_int8_ruins_goes_back_to_fp32_and_the_notes_say_so(method: str) -> None:
    model, samples = uneven(convolutional=method == "int8-static")

    made = quantise(model, method, samples)

    assert drift(model, made, samples) < 0.1
    assert "in fp32, as they hurt most: first (drift" in made.notes[0]


class Read(nn.Module):
    """Reads the weight of its second layer; one value spoils the first, and `factor` times it the second."""

    def __init__(self, factor: float, rows: int, others: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spoilt, self.read = nn.Linear(64, 16), nn.Linear(64, rows)
        self.last, self.factor = nn.Linear(63, others) if others else nn.Identity(), factor
        with torch.no_grad():
            self.spoilt.weight[:, 0] = self.read.weight[:, 0] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large, small = x[:, :1], x[:, 1:]
        read = torch.cat([self.factor * large, small], 1)
        found = self.read(read) + 0 * nn.functional.linear(read, self.read.weight)
        return torch.cat([self.spoilt(x), found[:, :16], 0.01 * self.last(small)[:, :1]], 1)


@needs_engine
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
@pytest.mark.parametrize(("network", "kept"), [(Read(5.0, 16, 512), ("spoilt",)), (Read(0.0, 512, 0), ())])
def test_a_layer_that_is_in_fp32_as_its_weight_is_read_is_not_searched_for(
    method: str, network: Read, kept: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    x[:, 0] = 500.0

    made = quantise(model_of(network, x), method, [(x,)])

    assert made.kept == kept
    assert "in fp32, as other code uses their weights: read" in made.notes[0]


def drift(model: LoadedModel, made: Quantised, samples: list[tuple[torch.Tensor, ...]]) -> float:
    with torch.inference_mode():
        return difference(((model.module(*one),), (made.module(*one),)) for one in samples).drift
