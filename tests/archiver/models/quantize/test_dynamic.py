"""Dynamic int8: layers that do the ReLU behind them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_models import model_of, needs_engine
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.load.torchscript import load_script, saved, supported, using
from torchere.archiver.models.quantize import dynamic as quantise_dynamic
from torchere.archiver.models.quantize.candidates import quiet
from torchere.archiver.models.quantize.dynamic import dynamic, fuse_relu, is_int8
from torchere.archiver.models.quantize.methods import quantise

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
        return to_torchscript(dynamic(module.eval())[0], (torch.randn(2, 16),))


@pytest.mark.parametrize("engine", supported())
@pytest.mark.parametrize("in_place", [False, True])
def test_a_linear_layer_does_the_relu_behind_it_with_the_same_result(engine: str, in_place: bool) -> None:
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(in_place), nn.Linear(32, 4))
    script, x = int8(layers, engine), torch.randn(5, 16)
    before = load_script(io.BytesIO(saved(script)), check=False, engine=engine)

    fuse_relu(script)

    after = load_script(io.BytesIO(saved(script)), check=False, engine=engine)
    assert str(after.inlined_graph).count(FUSED) == 1
    assert "aten::relu" not in str(after.inlined_graph)
    torch.testing.assert_close(after(x), before(x), rtol=0, atol=0)


@needs_engine
def test_a_relu_stays_where_its_input_is_needed_elsewhere() -> None:
    engine = supported()[-1]
    script, x = int8(Reused(), engine), torch.randn(5, 16)
    before = script(x)

    fuse_relu(script)

    assert FUSED not in str(script.inlined_graph)
    torch.testing.assert_close(script(x), before, rtol=0, atol=0)


class Tied(nn.Module):
    """Its head is the embedding's weights, read by the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.layer(self.embedding(ids)), self.embedding.weight)


@needs_engine
def test_an_embedding_whose_weights_the_model_reads_itself_stays_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantise_dynamic, "_LARGE", 100)
    torch.manual_seed(0)
    module, ids = Tied().eval(), torch.randint(0, 50, (2, 5))

    made = quantise(model_of(module, ids), "int8-dynamic", [])

    torch.testing.assert_close(made.module(ids), module(ids), rtol=0.1, atol=0.1)
    assert made.notes[0] == ("int8-dynamic: 1 layers; in fp32, as other code uses their weights: embedding")


BAGS = {
    "a bag that sums": (nn.EmbeddingBag(50, 8, mode="sum"), True),
    "a bag of means": (nn.EmbeddingBag(50, 8, mode="mean"), False),
    "a bag that leaves padding out": (nn.EmbeddingBag(50, 8, mode="sum", padding_idx=0), False),
    "a bag with max_norm": (nn.EmbeddingBag(50, 8, mode="sum", max_norm=0.1), False),
    "an embedding": (nn.Embedding(50, 8), True),
    "an embedding with max_norm": (nn.Embedding(50, 8, max_norm=0.1), False),
}


@needs_engine
@pytest.mark.parametrize("what", BAGS)
def test_large_embeddings_have_8_bits_where_torch_then_answers_alike(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(quantise_dynamic, "_LARGE", 100)
    torch.manual_seed(0)
    embedding, is_quantised = BAGS[what]
    model = nn.Sequential(embedding, nn.Linear(8, 4)).eval()
    ids = torch.randint(0, 50, (3, 5))

    made, layers = dynamic(model)

    assert layers == 1 + is_quantised
    with torch.inference_mode():
        torch.testing.assert_close(made(ids), model(ids), rtol=0.05, atol=0.1)


@needs_engine
def test_a_model_that_reads_the_weights_of_all_layers_is_refused() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.layer.weight)

    model = model_of(Reading(), torch.rand(2, 4))
    with pytest.raises(ModelRefused, match=r"and the model has none, or its own code reads their weights"):
        quantise(model, "int8-dynamic", [])


class Recurrent(nn.Module):
    """Flattens the weights of its recurrent layer at each call, as models for several GPUs do."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.proj_size or layer.hidden_size, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.flatten_parameters()
        scores: torch.Tensor = self.head(self.layer(x)[0])
        return scores


RECURRENT: dict[str, tuple[Callable[[], nn.RNNBase], bool]] = {
    "LSTM": (lambda: nn.LSTM(8, 16), True),
    "GRU": (lambda: nn.GRU(8, 16), True),
    "LSTM without bias": (lambda: nn.LSTM(8, 16, bias=False), False),
    "GRU without bias": (lambda: nn.GRU(8, 16, bias=False), False),
    "LSTM with proj_size": (lambda: nn.LSTM(8, 16, proj_size=4), False),
}


@needs_engine
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_that_torch_has_in_int8_are_int8(kind: str) -> None:
    torch.manual_seed(0)
    make, is_quantised = RECURRENT[kind]
    model, x = Recurrent(make()).eval(), torch.randn(5, 2, 8)

    with quiet():
        made, layers = dynamic(model)

    assert layers == 1 + is_quantised
    with torch.inference_mode():
        script = to_torchscript(made, (x,), only_trace=True)
        torch.testing.assert_close(script(x), model(x), rtol=0.05, atol=0.05)


class Packed(nn.Module):
    """Skips the padding of its rows."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        rows: torch.Tensor = pad_packed_sequence(
            self.layer(packed)[0], batch_first=True, total_length=x.size(1)
        )[0]
        return rows


@needs_engine
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_rows_take_any_batch(kind: Any) -> None:
    torch.manual_seed(0)
    model = Packed(kind).eval()
    with quiet():
        made = copy.deepcopy(dynamic(model)[0])

    script = to_torchscript(made, (torch.randn(2, 5, 8), torch.tensor([3, 5])), only_trace=True)

    with torch.inference_mode():
        for batch in (1, 2, 4):
            given = torch.randn(batch, 5, 8), torch.tensor([2, 5, 1, 4][:batch])
            torch.testing.assert_close(script(*given), model(*given), rtol=0.05, atol=0.05)


class Shared(nn.Module):
    """Has one linear layer and one embedding under several names, in one module and in two."""

    def __init__(self) -> None:
        super().__init__()
        names, layer = nn.Embedding(200, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList([layer] * 3)
        self.sides: Any = nn.ModuleList(nn.ModuleDict({"names": names, "layer": layer}) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, second = (side["layer"](side["names"](ids)) for side in self.sides)
        x: torch.Tensor = first + second
        for layer in self.layers:
            x = layer(x)
        return x


@needs_engine
def test_a_layer_with_several_names_is_one_int8_layer_under_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise_dynamic, "_LARGE", 100)
    torch.manual_seed(0)
    model, ids = Shared().eval(), torch.randint(0, 200, (2, 5))
    made: Any

    with quiet():
        made, layers = dynamic(model)

    assert layers == 2
    assert not list(made.parameters())
    assert len({id(side[name]) for side in made.sides for name in side}) == 2
    assert {id(layer) for layer in made.layers} == {id(made.sides[0]["layer"])}
    assert len(saved(to_torchscript(made, (ids,)))) < 2 * (200 * 64 + 64 * 64)
    with torch.inference_mode():
        torch.testing.assert_close(made(ids), model(ids), rtol=0.1, atol=0.05)


ROOTS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "linear": (lambda: nn.Linear(64, 64), (torch.randn(3, 64),)),
    "GRU with its state": (lambda: nn.GRU(64, 64), (torch.randn(5, 2, 64), torch.randn(1, 2, 64))),
}


@needs_engine
@pytest.mark.parametrize("kind", ROOTS)
def test_a_model_that_is_one_layer_becomes_int8(kind: str) -> None:
    make, given = ROOTS[kind]
    model = make().eval()
    with quiet():
        made, layers = dynamic(model)
    assert layers == 1
    assert is_int8(made)
    weights = sum(one.numel() for one in model.parameters())
    assert len(saved(to_torchscript(made, given))) < 2 * weights + 8_000
    assert not list(made.parameters())


@needs_engine
def test_a_model_of_one_layer_that_is_kept_is_refused() -> None:
    with pytest.raises(ModelRefused, match="the model has none"):
        dynamic(nn.Linear(4, 4), kept=[""])
