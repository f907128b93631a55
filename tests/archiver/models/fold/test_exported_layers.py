"""The operators of an exported program become layers again, and all that changes layers finds them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.fold.convolutions import fold
from torchere.archiver.models.fold.exported_layers import with_layers
from torchere.archiver.models.load.exported_program import unguarded_module
from torchere.archiver.models.measure.difference import answers, difference
from torchere.archiver.models.quantize.candidates import quiet
from torchere.archiver.models.quantize.dynamic import dynamic
from torchere.archiver.models.quantize.static import calibrate

# torch warns of its own recurrent layers when they are exported.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
Tensors = tuple[torch.Tensor, ...]


class Residual(nn.Module):
    """Convolutions with normalisations, activations in place, a sum, a pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding="valid"), nn.BatchNorm2d(8), nn.ReLU6()
        )
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        x = torch.cat([x, functional.relu(x + self.body(x))], 1)
        out: torch.Tensor = self.head(self.dropout(functional.adaptive_avg_pool2d(x, 1).flatten(1)))
        return out


class Sound(nn.Module):
    """One-dimensional convolutions, padded by themselves and dilated, and a normalisation of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 8, 3, padding="same", dilation=2)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.rows = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rows(self.head(self.norm(self.first(x)).relu().mean(-1)))
        return out


class Words(nn.Module):
    """An embedding, torch's encoder, and a head that multiplies by the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(self.embedding(ids)) @ self.embedding.weight.t()
        return out


class Twice(nn.Module):
    """Calls a layer twice, and another one's weights as a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.shared(x)))
        return functional.linear(x, self.other.weight) + functional.linear(x, self.other.weight, x[0])


class Sized(nn.Module):
    """Makes tensors of the size of the batch, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.ones(1, 2)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x, self.token.expand(x.shape[0], -1)], 1)
        out: torch.Tensor = self.head(rows) * (torch.arange(x.shape[0]) >= 0).unsqueeze(-1)
        return out


class Filtered(nn.Module):
    """A filter in a buffer, a vector in place of a matrix, and weights that are computed."""

    weights: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.rand(3, 1, 3, 3))
        self.vector, self.square = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8, 8))
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.conv2d(x, self.weights, groups=3).mean((2, 3))
        grown: torch.Tensor = self.square
        for _ in range(40):  # each step reads the last one twice
            grown = 0.5 * grown + 0.5 * grown.tanh()
        return functional.linear(functional.linear(self.layer(x), grown), self.vector)


class Recurrent(nn.Module):
    """Reads the output of a recurrent layer, or its last state, from zeros or from a state of its own."""

    def __init__(self, kind: Any, reads: str, begins: bool = False, **settings: Any) -> None:
        super().__init__()
        self.layer, self.reads, self.begins = kind(8, 16, batch_first=True, **settings), reads, begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_ones(self.layer.num_layers * (1 + self.layer.bidirectional), x.shape[0], 16)
        is_lstm = isinstance(self.layer, nn.LSTM)
        begin = ((state, 2 * state) if is_lstm else state) if self.begins else None
        out, last = self.layer(x, begin)
        states = last if is_lstm else (last, last)
        found: torch.Tensor = {"output": out, "state": states[0], "cell": states[1]}[self.reads]
        return found


def exported(model: nn.Module, example: Tensors) -> Any:
    """The module of the model's exported program for any batch, as the archiver reads it."""
    torch.manual_seed(0)
    for layer in model.eval().modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.running_mean = torch.randn(layer.num_features)
            layer.running_var = torch.rand(layer.num_features) + 0.5
    sizes = tuple({0: torch.export.Dim("batch", max=64)} for _ in example)
    return unguarded_module(torch.export.export(model, example, dynamic_shapes=sizes))


def kinds(module: nn.Module) -> dict[str, type]:
    return {name: type(layer) for name, layer in module.named_modules() if not list(layer.children())}


def cases() -> dict[str, tuple[nn.Module, Tensors]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            "pictures": (Residual(), (torch.rand(2, 3, 17, 17),)),
            "sound": (Sound(), (torch.rand(2, 2, 12),)),
            "words": (Words(), (torch.randint(0, 30, (2, 5)),)),
            "twice": (Twice(), (torch.rand(2, 4),)),
            "filter": (Filtered(), (torch.rand(2, 3, 5, 5),)),
            "sizes": (Sized(), (torch.rand(2, 4),)),
            "LSTM": (Recurrent(nn.LSTM, "output"), (torch.rand(2, 5, 8),)),
            "LSTM's cell": (Recurrent(nn.LSTM, "cell", begins=True, num_layers=2), (torch.rand(2, 5, 8),)),
            "GRU": (Recurrent(nn.GRU, "output", bidirectional=True), (torch.rand(2, 5, 8),)),
            "GRU's state": (Recurrent(nn.GRU, "state", begins=True, bias=False), (torch.rand(2, 5, 8),)),
        }


CASES = cases()


@pytest.mark.parametrize(("model", "example"), CASES.values(), ids=CASES)
def test_the_layers_answer_as_the_program_for_any_batch(model: nn.Module, example: Tensors) -> None:
    program = exported(model, example)
    code = program.code
    layered = with_layers(program, example)
    assert layered is not program
    assert program.code == code
    left = {Twice: {"aten.linear.default"}, Filtered: {"aten.conv2d.default", "aten.linear.default"}}
    # A bias that is computed is no weight of a layer, nor is a buffer or a vector.
    assert reading_weights(layered) == left.get(type(model), set())
    many = tuple(tensor.repeat(3, *[1] * (tensor.dim() - 1)) for tensor in example)
    with torch.no_grad():
        assert difference([(answers(model, many), answers(layered, many))]).drift < 1e-5


def reading_weights(module: Any) -> set[str]:
    """The convolutions, linear and recurrent layers that are operators of the module's graph."""
    kinds = ("aten.conv", "aten.linear", "aten.lstm", "aten.gru")
    return {str(one.target) for one in module.graph.nodes if str(one.target).startswith(kinds)}


def test_layers_have_the_names_and_the_weights_of_the_model() -> None:
    model = Residual()
    program = exported(model, CASES["pictures"][1])
    layered: Any = with_layers(program, CASES["pictures"][1])
    assert kinds(layered) == {
        "stem.0": nn.Conv2d,
        "stem.1": nn.BatchNorm2d,
        "body.0": nn.Conv2d,
        "body.1": nn.BatchNorm2d,
        "head": nn.Linear,
    }
    assert layered.head.weight is program.head.weight
    folded = fold(layered, CASES["pictures"][1])
    assert folded.normalisations == 2


def test_a_layer_that_is_called_twice_is_one_layer() -> None:
    model, example = CASES["twice"]
    layered: Any = with_layers(exported(model, example), example)
    called = [str(node.target) for node in layered.graph.find_nodes(op="call_module")]
    assert called[:2] == ["shared", "shared"]
    assert called[2] != "other"  # which has a bias, and was called without it


@pytest.mark.parametrize(("case", "layers"), [("pictures", 3), ("sound", 2), ("sizes", 1), ("filter", 2)])
def test_static_int8_changes_the_layers_of_an_exported_program(case: str, layers: int) -> None:
    model, example = CASES[case]
    with quiet(), torch.no_grad():
        made = calibrate(fold(with_layers(exported(model, example), example), example), [example])
        assert made.layers == layers
        script = to_torchscript(made.convert(), example, only_trace=True)
        many = tuple(tensor.repeat(3, *[1] * (tensor.dim() - 1)) for tensor in example)
        assert difference([(answers(model, many), answers(script, many))]).drift < 0.15


def test_dynamic_int8_changes_the_layers_of_an_exported_program() -> None:
    model, example = CASES["words"]
    with quiet(), torch.no_grad():
        made, layers = dynamic(with_layers(exported(model, example), example))
        assert layers == 4  # both projections of the attention, and two behind it
        assert difference([(answers(model, example), answers(made, example))]).drift < 0.1


@pytest.mark.parametrize("case", ["LSTM", "GRU"])
def test_dynamic_int8_changes_recurrent_layers_of_an_exported_program(case: str) -> None:
    model, example = CASES[case]
    with quiet(), torch.no_grad():
        made, layers = dynamic(with_layers(exported(model, example), example))
        assert layers == 1
        script = to_torchscript(made, example, only_trace=True)
        assert 0 < difference([(answers(model, example), answers(script, example))]).drift < 0.1


class Counting(nn.Module):
    """Counts its calls, so two runs differ."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.head(x) + self.calls
        return out


def test_a_module_whose_layers_would_answer_otherwise_is_returned_as_it_is() -> None:
    example = (torch.rand(2, 4),)
    program = exported(Counting(), example)
    assert with_layers(program, example) is program


class Growing(nn.Module):
    """Computes a weight from a value that each call changes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(4, 4))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.weights * self.scale)
        self.scale.mul_(2)
        return out


def test_a_weight_that_changes_from_call_to_call_stays_computed() -> None:
    model, example = Growing(), (torch.rand(2, 4),)
    made = with_layers(exported(copy.deepcopy(model), example), example)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(made(*example), model(*example))


def test_the_state_of_a_program_stays_as_it_was() -> None:
    example = (torch.rand(2, 4),)
    program = exported(Counting(), example)
    with_layers(program, example)
    assert program.calls == 0


class Part(nn.Module):
    """Changes a part of a value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        y[:, :2].relu_()
        out: torch.Tensor = self.other(y).mul_(2).add_(1).relu_()
        return out


def test_a_part_that_is_changed_in_place_changes_the_whole() -> None:
    model, example = Part(), (torch.zeros(2, 4),)
    model.one.bias.data.fill_(1)  # so that the example has nothing to clip
    layered: Any = with_layers(exported(model, example), example)
    many = torch.randn(8, 4) * 10
    with torch.no_grad():
        torch.testing.assert_close(layered(many), model(many))
    assert {type(layer) for layer in layered.children()} == {nn.Linear}


def test_a_model_with_layers_is_returned_as_it_is() -> None:
    model = Residual()
    assert with_layers(model, CASES["pictures"][1]) is model
