"""int8 for exported programs, by torchao."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from int8_models import model_of
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.aotinductor import compile_aoti, load_aoti
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.measure.difference import difference
from torchere.archiver.models.quantize.methods import quantise
from torchere.archiver.signature import Limit, Signature, TensorSpec

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (extra quantize)"
)


@pytest.fixture
def model() -> LoadedModel:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).eval()
    return model_of(network, torch.rand(2, 3, 8, 8))


class Pyramid(nn.Module):
    """A head that two levels share, as in detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(x), self.head(nn.functional.max_pool2d(x, 2))


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_a_convolution_that_is_called_twice_is_quantised_for_each_call(method: str) -> None:
    torch.manual_seed(0)
    network = Pyramid().eval()
    samples = [(torch.rand(2, 3, 8, 8),) for _ in range(4)]

    made = quantise(model_of(network, *samples[0]), method, samples, target="export").module

    many = torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        drift = difference([(network(many), made(many))]).drift
    assert 0 < drift < 0.1


class Normalised(nn.Module):
    """Calls layers for several normalisations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.linear = nn.Conv2d(4, 8, 3), nn.Linear(8, 8)
        self.read, self.wide = nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3, groups=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.rows = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        for norm in (*self.norms, *self.rows):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = (norm(self.shared(x)) for norm in self.norms[:2])
        read = self.read(first)
        wide = self.norms[3](self.wide(second))
        rows = second.mean((2, 3))
        return self.norms[2](read) + read, wide, *(norm(self.linear(rows)) for norm in self.rows)


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_each_normalisation_has_its_own_share_in_the_answer(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    # Of quantised training, and slow.
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    monkeypatch.setattr(pt2e, "_fold_conv_bn_qat", lambda graph: pytest.fail("an unneeded step of torchao"))
    network, example = Normalised().eval(), (torch.randn(2, 4, 9, 9),)
    made = quantise(model_of(network, *example), method, [example], target="export").module
    with torch.no_grad():
        pairs = zip(network(*example), made(*example), strict=True)
        assert all((found - wanted).norm() < 0.1 * wanted.norm() for wanted, found in pairs)


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_the_quantised_program_agrees_and_can_be_exported_for_any_batch(
    model: LoadedModel, method: str
) -> None:
    samples = [(torch.rand(2, 3, 8, 8),) for _ in range(4)]

    made = quantise(model, method, samples, target="export")

    assert made.engine is None
    program = torch.export.export(made.module, samples[0], dynamic_shapes=({0: torch.export.Dim.AUTO},))
    many = torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        drift = difference([((model.module(many),), (program.module()(many),))]).drift
    assert 0 < drift < 0.1


@needs_torchao
def test_other_free_sizes_than_the_batch_stay_free() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 4, 3, padding=1)).eval()
    example = (torch.rand(1, 4, 20),)
    spec = (TensorSpec("x", "FP32", (-1, 4, -1)),)
    model = LoadedModel(network, example, Signature(spec, spec), Path("net.py"))
    made = quantise(model, "int8-static", [example, (torch.rand(2, 4, 31),)], target="aoti")
    sizes = [FreeSize("batch", ((0, 0),), 1, 8), FreeSize("x_2", ((0, 2),), 1, 64)]
    program = to_program(made.module, example, sizes)
    other = torch.rand(3, 4, 47)
    with torch.no_grad():
        assert difference([((network(other),), (program.module()(other),))]).drift < 0.1


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_a_batch_in_multiples_of_the_example_stays_free(method: str, fours: type[nn.Module]) -> None:
    torch.manual_seed(0)
    spec = (TensorSpec("x", "FP32", (-1, 8), (Limit(0, multiple=4),)),)
    model = LoadedModel(fours().eval(), (torch.rand(4, 8),), Signature(spec, ()), Path("net.py"))
    made = quantise(model, method, [model.example], target="export")
    program = to_program(made.module, model.example, [FreeSize("batch", ((0, 0),), 1, 64, 4)])
    other = torch.rand(12, 8)
    with torch.no_grad():
        assert difference([((model.module(other),), (program.module()(other),))]).drift < 0.1


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_torchscript_is_refused_as_by_other_methods(model: LoadedModel, method: str) -> None:
    script = replace(model, module=torch.jit.script(model.module))
    with pytest.raises(ModelRefused, match=r"^the model is TorchScript, whose layers .* eager model"):
        quantise(script, method, [model.example], target="export")


class Signal(nn.Module):
    """A layer that torchao's quantiser leaves in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_a_model_of_which_no_layer_becomes_int8_is_refused(method: str) -> None:
    example = (torch.rand(2, 4, 20),)

    with pytest.raises(ModelRefused, match=rf"^{method} changes linear layers.* found none .*torchscript"):
        quantise(model_of(Signal(), *example), method, [example], target="export")


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_of_an_encoder_the_program_holds_int8_weights_and_no_fp32_ones(method: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    encoder = model_of(network, torch.randn(2, 5, 16))

    made = quantise(encoder, method, [encoder.example], target="export")

    program = torch.export.export(made.module, encoder.example)
    held = [*program.state_dict.values(), *program.constants.values()]
    weights = [one for one in held if isinstance(one, torch.Tensor) and one.dim() > 1]
    assert len(weights) == 2 * 4
    assert {one.dtype for one in weights} == {torch.int8}
    with torch.no_grad():
        pair = ((network(*encoder.example),), (program.module()(*encoder.example),))
    assert difference([pair]).drift < 0.1


@needs_torchao
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_compiled_encoder_is_int8_and_leaves_its_input_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    network = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    given = (torch.randn(2, 5, 32),)
    made = quantise(model_of(network, *given), "int8-static", [given], target="aoti")
    program = to_program(made.module, given, [FreeSize("batch", ((0, 0),), 1, 8)])
    weights = [one for one in program.state_dict.values() if one.dim() > 1]
    assert {one.dtype for one in weights} == {torch.int8}
    compile_aoti(program, tmp_path / "net.pt2", None, lambda _line: None, freezing=True)
    compiled = load_aoti(tmp_path / "net.pt2")
    rows = torch.randn(3, 5, 32)
    found = compiled(rows.clone())
    before = rows.clone()
    compiled(rows)
    assert torch.equal(rows, before)
    with torch.no_grad():
        assert difference([((network(rows),), (found,))]).drift < 0.1


class Shared(nn.Module):
    """Calls one activation behind each convolution, as EfficientNet-Lite does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.act = nn.ReLU6()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.two(self.act(self.one(x)))).mean((2, 3))


@needs_torchao
def test_an_activation_that_is_called_twice_is_no_obstacle(model: LoadedModel) -> None:
    torch.manual_seed(0)
    network = replace(model, module=Shared().eval())
    made = quantise(network, "int8-static", [network.example], target="aoti")
    with torch.no_grad():
        pair = ((network.module(*network.example),), (made.module(*network.example),))
    assert difference([pair]).drift < 0.1


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_layers_with_hooks_become_int8_and_keep_these(model: LoadedModel, method: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)).eval()
    for layer in (network[0], network[3]):
        layer.register_forward_pre_hook(lambda _layer, given: (given[0] * 1.5,))
        layer.register_forward_hook(lambda _layer, _given, found: found + 1)
    hooked = replace(model, module=network)

    made = quantise(hooked, method, [model.example], target="export").module

    given = torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        assert 0 < difference([((network(given),), (made(given),))]).drift < 0.1
    assert {one.dtype for one in made.buffers() if one.dim() > 1} == {torch.int8}


class Modulated(nn.Module):
    """Adds numbers to the outputs of layers, on either side and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.gain, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.relu(self.norm(self.conv(x)) + 0.5).mean((2, 3))
        return self.last(rows * (1 + self.gain(rows))).add_(1)


@needs_torchao
@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic"])
def test_layers_to_which_a_number_is_added_become_int8(model: LoadedModel, method: str) -> None:
    torch.manual_seed(0)
    network = replace(model, module=Modulated().eval())

    made = quantise(network, method, [model.example], target="export").module

    given = torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        assert 0 < difference([((network.module(given),), (made(given),))]).drift < 0.1
    assert {one.dtype for one in made.buffers() if one.dim() > 1} == {torch.int8}


@needs_torchao
def test_a_process_without_torchao_loads_the_exported_program(model: LoadedModel, tmp_path: Path) -> None:
    made = quantise(model, "int8-static", [(torch.rand(2, 3, 8, 8),)], target="export")
    program = torch.export.export(made.module, (torch.rand(2, 3, 8, 8),))
    torch.export.save(program, tmp_path / "model.pt2")
    script = (
        "import sys, torch\n"
        "from torchere.handlers.compiled.load import load_package\n"
        f"model = load_package({str(tmp_path / 'model.pt2')!r}, {str(tmp_path)!r}, 'cpu')\n"
        "print(tuple(model(torch.rand(2, 3, 8, 8)).shape), 'torchao' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "(2, 4) False", done.stderr[-2000:]


def test_without_torchao_the_refusal_names_the_extra(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.quantize_pt2e", None)

    with pytest.raises(ModelRefused, match=r"torchere\[quantize\]"):
        quantise(model, "int8-static", [(torch.rand(2, 3, 8, 8),)], target="aoti")


def test_without_samples_static_int8_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ModelRefused, match=r"needs samples .* --samples"):
        quantise(model, "int8-static", [], target="export")
