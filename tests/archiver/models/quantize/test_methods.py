"""Quantising small models: by each method, on each engine, and loading the result as the server does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import Tensors, drift, model_of, needs_engine
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_qat_fx
from torch.nn.utils.parametrizations import weight_norm

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.load.torchscript import supported, using
from torchere.archiver.models.measure.difference import answers, difference, flattened
from torchere.archiver.models.quantize.candidates import quiet
from torchere.archiver.models.quantize.dynamic import dynamic
from torchere.archiver.models.quantize.methods import Quantised, bf16, check_quantised, quantise
from torchere.archiver.quantization import METHODS
from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context


class Convolutional(nn.Module):
    """Depthwise and plain convolutions with ReLU6, a residual and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.normalisation = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.clip = nn.ReLU6()
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.clip(self.normalisation(self.stem(x)))
        x = x + self.clip(self.depthwise(x))
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


class Recurrent(nn.Module):
    """An LSTM with a classifier on its last state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def pictures(count: int = 8) -> list[Tensors]:
    torch.manual_seed(1)
    return [(torch.rand(2, 3, 12, 12),) for _ in range(count)]


@needs_engine
@pytest.mark.parametrize("groups", [1, 8])
def test_no_engine_is_tried_whose_depthwise_sums_overflow_on_some_processors(groups: int) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3, groups=groups)).eval()

    made = quantise(model_of(network, torch.rand(1, 3, 12, 12)), "int8-static", pictures())

    overflowing = {"fbgemm", "x86"} if groups == 8 and "onednn" in supported() else set()
    assert {one.engine for one in made.measured} == set(supported()) - overflowing


@needs_engine
def test_static_int8_agrees_with_fp32_and_names_its_engine_and_what_it_folded() -> None:
    network = Convolutional().eval()

    made = quantise(model_of(network, torch.rand(1, 3, 12, 12)), "int8-static", pictures())

    assert made.engine in supported()
    assert drift(network, made.module, pictures()) < 0.1
    assert "3 layers, 8 samples" in made.notes[0]
    assert "1 batch normalisations" in made.notes[0]
    assert "2 ReLU6" in made.notes[0]
    assert made.notes[1].startswith("engines: ")


@needs_engine
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_layers_with_normalised_weights_become_int8(method: str) -> None:
    network = perceptron()
    network[0], network[2] = weight_norm(network[0]), weight_norm(network[2])
    samples: list[Tensors] = [(torch.randn(4, 64),) for _ in range(4)]

    made = quantise(model_of(network, samples[0][0]), method, samples)

    assert "2 layers" in made.notes[0]
    assert "aten::linear" not in str(made.module.inlined_graph)
    assert drift(network, made.module, samples) < 0.1


@needs_engine
def test_values_before_the_first_clipped_layer_keep_their_own_range() -> None:
    network = Convolutional().eval()
    large: list[Tensors] = [(-20 + 10 * picture,) for (picture,) in pictures()]  # none of it between 0 and 6

    made = quantise(model_of(network, large[0][0]), "int8-static", large)

    assert drift(network, made.module, large) < 0.1


@needs_engine
@pytest.mark.parametrize(
    ("network", "sample"),
    [
        (perceptron(), torch.randn(4, 64)),
        (Recurrent().eval(), torch.randn(4, 7, 16)),
        (transformer(), torch.randn(4, 7, 32)),
    ],
    ids=["perceptron", "lstm", "transformer"],
)
def test_dynamic_int8_agrees_with_fp32_without_samples_and_takes_any_batch(
    network: nn.Module, sample: torch.Tensor
) -> None:
    made = quantise(model_of(network, sample), "int8-dynamic", [])

    assert made.engine in supported()
    assert drift(network, made.module, [(sample,)]) < 0.1
    assert flattened(made.module(sample[:1]))[0].shape[0] == 1


@needs_engine
@pytest.mark.parametrize("engine", sorted({"fbgemm", "x86", "onednn"} & set(supported())))
def test_dynamic_int8_gives_activations_8_bits_and_no_sum_of_products_overflows(engine: str) -> None:
    layer = nn.Linear(513, 1, bias=False).eval()
    layer.weight.data.fill_(1.0)
    layer.weight.data[0, 512] = 63.5 / 63  # for a scale of 1/63, by which 1.0 is a whole number
    # From 0 to 255 in steps of 1: 8 bits hold each value, 7 bits every other.
    given = torch.full((64, 256), 255.0), torch.arange(64.0)[:, None].expand(64, 256), torch.zeros(64, 1)
    rows = torch.cat(given, dim=1)

    with using(engine), quiet():
        module, _ = dynamic(layer)
        found = module(rows)

    torch.testing.assert_close(found, layer(rows).detach(), rtol=1e-4, atol=1.0)


@needs_engine
@pytest.mark.parametrize("engine", supported())
def test_the_handler_rebuilds_the_model_for_the_engine_that_the_archive_names(
    engine: str, tmp_path: Path
) -> None:
    network = Convolutional().eval()
    made = quantise(model_of(network, torch.rand(1, 3, 12, 12)), "int8-static", pictures())
    if any(one.engine == engine and one.failure for one in made.measured):
        pytest.skip(f"{engine} has no kernel for this model")
    assert isinstance(made.module, torch.jit.ScriptModule)
    made.module.save(str(tmp_path / "model.pt"))
    before = torch.backends.quantized.engine

    handler = served(tmp_path, engine)

    assert drift(network, handler.model, pictures()) < 0.1
    assert torch.backends.quantized.engine == before


def served(folder: Path, engine: str) -> BaseHandler:
    handler = BaseHandler()
    handler.initialize(
        Context(
            model_name="net",
            model_dir=str(folder),
            manifest={"model": {"serializedFile": "model.pt"}},
            gpu=None,
            batch_size=1,
            mms_version="0",
            model_yaml_config={"torchscript": {"quantized_engine": engine}},
        )
    )
    return handler


class NormalisesInPlace(nn.Module):
    """Writes into its inputs, as much code that normalises pictures does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x.sub_(0.5).div_(0.2))
        return scores


@needs_engine
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
def test_a_model_that_writes_into_its_inputs_is_quantised_on_the_samples_as_they_are(method: str) -> None:
    torch.manual_seed(1)
    samples: list[Tensors] = [(torch.rand(4, 8),) for _ in range(8)]
    before = [tensor.clone() for (tensor,) in samples]
    model = NormalisesInPlace().eval()

    made = quantise(model_of(model, samples[0][0].clone()), method, samples)

    assert all(torch.equal(one, sample[0]) for one, sample in zip(before, samples, strict=True))
    found = [(answers(model, sample), answers(made.module, sample)) for sample in samples]
    assert difference(found).drift < 0.05


@needs_engine
def test_the_original_and_the_process_are_as_before() -> None:
    network = perceptron()
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    process = torch.backends.quantized.engine, torch.get_num_threads()

    quantise(model_of(network, torch.randn(2, 64)), "int8-static", [(torch.randn(2, 64),)])

    assert all(torch.equal(tensor, weights[name]) for name, tensor in network.state_dict().items())
    assert (torch.backends.quantized.engine, torch.get_num_threads()) == process


def prepared_for_training() -> nn.Module:
    network = perceptron()
    prepared = prepare_qat_fx(
        network.train(), get_default_qat_qconfig_mapping("qnnpack"), (torch.randn(2, 64),)
    )
    for _ in range(4):
        prepared(torch.randn(8, 64))
    return prepared.eval()


@needs_engine
@pytest.mark.parametrize("converted", [False, True], ids=["with fake quantisation", "converted"])
def test_a_model_that_was_trained_for_int8_is_taken_with_its_own_scales(converted: bool) -> None:
    prepared: Any = prepared_for_training()
    model = model_of(convert_fx(prepared) if converted else prepared, torch.randn(2, 64))

    made = quantise(model, "int8-trained", [])

    assert made.engine in supported()
    assert drift(model.module, made.module, [(torch.randn(4, 64),)]) < 0.1


@needs_engine
def test_int8_torchscript_stays_as_it_is_and_gets_the_engine_that_measures_best() -> None:
    first = quantise(model_of(perceptron(), torch.randn(2, 64)), "int8-dynamic", [])

    again = quantise(loaded_script(first), "int8-trained", [])

    assert again.engine in supported()
    assert drift(first.module, again.module, [(torch.randn(4, 64),)]) < 0.1


def loaded_script(made: Quantised) -> LoadedModel:
    signature = Signature((TensorSpec("x", "FP32", (-1, 64)),), (TensorSpec("y", "FP32", (-1, 10)),))
    return LoadedModel(made.module, (torch.randn(2, 64),), signature, Path("model.pt"))


def test_a_model_of_fp32_is_not_taken_for_one_that_was_trained_for_int8() -> None:
    with pytest.raises(ModelRefused, match="neither int8 layers nor fake quantisation"):
        quantise(model_of(perceptron(), torch.randn(2, 64)), "int8-trained", [])


def test_static_int8_without_samples_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"needs samples .* --samples"):
        quantise(model_of(perceptron(), torch.randn(2, 64)), "int8-static", [])


def test_dynamic_int8_of_convolutions_alone_is_refused_with_what_to_use() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())

    with pytest.raises(ModelRefused, match="use int8-static with calibration samples"):
        quantise(model_of(network, torch.randn(2, 3, 4, 4)), "int8-dynamic", [])


@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic", "bf16"])
def test_torchscript_of_fp32_is_refused_with_what_to_give_instead(method: str) -> None:
    script = torch.jit.trace(perceptron(), torch.randn(2, 64))

    with pytest.raises(ModelRefused, match=r"the model is TorchScript.*--model-file"):
        quantise(model_of(script, torch.randn(2, 64)), method, [(torch.randn(2, 64),)])


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    model = model_of(perceptron(), torch.randn(2, 64))

    with pytest.raises(ModelRefused, match=f"'int4'; expected one of {', '.join(METHODS)}"):
        quantise(model, "int4", [])
    with pytest.raises(ValueError, match="int8 chooses from int8-static, int8-dynamic; quantise by one"):
        quantise(model, "int8", [])


def test_bf16_takes_and_gives_float32_and_leaves_tokens_alone() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.EmbeddingBag(1000, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, tokens: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scores": self.head(self.embedding(tokens)) + bias}

    network, arguments = Embedding().eval(), (torch.randint(0, 1000, (2, 5)), torch.randn(2, 4))

    packed = bf16(network, has_bf16=True)

    (scores,) = flattened(packed(*arguments))
    assert scores.dtype is torch.float32
    assert {parameter.dtype for parameter in packed.parameters()} == {torch.bfloat16}
    assert drift(network, packed, [arguments]) < 0.02


def test_bf16_is_refused_where_the_processor_has_none() -> None:
    with pytest.raises(
        ModelRefused, match=r"slower than fp32 here: .* expected AVX512-BF16, AMX or Arm BF16"
    ):
        bf16(perceptron(), has_bf16=False)


def test_weights_of_another_type_are_told_before_a_form_in_fp32_is_made() -> None:
    doubles = nn.Linear(4, 2, dtype=torch.float64)
    with pytest.raises(
        ModelRefused, match="bf16 starts from weights of FP32, and all of the model's are FP64"
    ):
        check_quantised(doubles, "bf16", "torchscript")
    for method in (None, "auto", "int8"):  # these may pack it as it is, or try several methods
        assert not check_quantised(doubles, method, "torchscript")


class Parts(nn.Module):
    """Loops over parts of a tensor, as detectors do, at which tracing fails."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(12, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.wide(x).chunk(2, 1))
        parts.append(self.narrow(parts[-1]))
        scores: torch.Tensor = self.last(torch.cat(parts, 1)).relu().mean((2, 3))
        return scores


class Typed(Parts):
    """Asks for a tensor, which a symbol of tracing is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.wide(x).relu().mean((2, 3))[:, :4]
        return scores if isinstance(x, torch.Tensor) else -scores


class Chosen(Parts):
    """Branches on a value, which no graph keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@needs_engine
@pytest.mark.parametrize("kind", [Parts, Typed])
def test_what_tracing_does_not_follow_is_quantised_as_an_exported_program(
    kind: Callable[[], nn.Module],
) -> None:
    said: list[str] = []
    network, samples = kind().eval(), [(torch.rand(2, 3, 12, 12),) for _ in range(4)]

    made = quantise(model_of(network, *samples[0]), "int8-static", samples, say=said.append)

    assert any("its exported program is quantised" in line for line in said)
    assert 0 < drift(network, made.module, [(torch.rand(5, 3, 12, 12),)]) < 0.1


class Wide(Parts):
    """Branches on the size of a batch, of which an exported program follows one side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] < 40 else super().forward(-x)


@needs_engine
@pytest.mark.parametrize("kind", [Chosen, Wide])
def test_what_can_be_neither_traced_nor_exported_is_refused_for_its_forward(
    capfd: pytest.CaptureFixture[str], kind: Callable[[], nn.Module]
) -> None:
    samples = [(torch.rand(2, 3, 12, 12),)]
    model = model_of(kind(), *samples[0])
    with pytest.raises(ModelRefused, match=r"the forward of (Chosen|Wide) can't be traced"):
        quantise(model, "int8-static", samples)
    assert "def forward" not in capfd.readouterr().err
