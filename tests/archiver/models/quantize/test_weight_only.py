"""Weights alone in 8 and 4 bits: layers made here, and models that a user quantised with torchao."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from int8_models import model_of
from torch import nn
from torch.nn.utils import prune

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.convert.files import _freezing
from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.load.exported_program import ServedProgram
from torchere.archiver.models.load.source import read_source
from torchere.archiver.models.load.weight_only import (
    BY_PROCESSOR,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    weight_only,
)
from torchere.archiver.models.measure.difference import difference
from torchere.archiver.models.quantize import pt2e
from torchere.archiver.models.quantize.methods import quantise
from torchere.archiver.models.quantize.trials import methods_tried
from torchere.archiver.request import BuildOptions
from torchere.handlers.compiled import load as aot
from torchere.handlers.compiled.package import Build, Package
from torchere.serving.commands.cli import main

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (extra quantize)"
)
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 16))

    def forward(self, x):
        return self.layers(x)
"""
BATCH = [FreeSize("batch", ((0, 0),), 1, 16)]


def drift_of(one: Callable[..., Any], other: Callable[..., Any], *given: torch.Tensor) -> float:
    with torch.no_grad():
        return difference([((one(*given),), (other(*given),))]).drift


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 200), nn.ReLU(), nn.Linear(200, 4)
    ).eval()


def weight_of(module: nn.Module, layer: str) -> Any:
    """The weight of a layer, also of one that holds it as no parameter."""
    return module.get_submodule(layer).weight


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.01), (4, 0.15)])
def test_large_layers_get_fewer_bits_and_the_answers_agree(
    network: nn.Module, bits: int, limit: float
) -> None:
    made, note = weight_only(network, bits)

    rows = torch.randn(5, 256)
    assert 0 < drift_of(network, made, rows) < limit
    kinds = [type(layer) for layer in made.children()]
    # 200 outputs are no multiple of 16, which the kernel for 4 bits wants; the last layer is small.
    assert kinds == [Int4Linear if bits == 4 else Int8Linear, nn.ReLU, Int8Linear, nn.ReLU, nn.Linear]
    assert isinstance(network.get_submodule("0"), nn.Linear)
    assert "1 linear layers in 8 bits" in note or bits == 8
    assert torch.allclose(weight_of(made, "0"), weight_of(network, "0"), atol=0.02 if bits == 4 else 1e-3)


def test_no_row_of_a_batch_changes_the_answer_to_another(network: nn.Module) -> None:
    made, _ = weight_only(network, 8)
    row = torch.randn(1, 256)
    with torch.no_grad():
        alone, among = made(row), made(torch.cat([row, 1e4 * torch.randn(3, 256)]))[:1]
    torch.testing.assert_close(alone, among, rtol=1e-2, atol=1e-3)


def test_a_head_that_shares_the_weights_of_an_embedding_reads_them() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(500, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.embedding(ids), self.embedding.weight)

    torch.manual_seed(0)
    model = Tied().eval()
    made, note = weight_only(model, 4)
    assert "1 embeddings in 8 bits" in note
    assert drift_of(model, made, torch.tensor([[1, 2, 499]])) < 0.02


class Tied(nn.Module):
    """Its head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embedding(ids))
        return found


def test_a_weight_that_layers_share_is_held_once() -> None:
    model, ids = Tied().eval(), torch.tensor([[1, 2, 499]])
    made, _ = weight_only(model, 8)
    assert drift_of(model, made, ids) < 0.02
    program = torch.export.export(made, (ids,))
    held = {tensor.data_ptr(): tensor.nbytes for tensor in program.state_dict.values()}
    assert sum(held.values()) == 500 * 64 + 500 * 2 + 500 * 4  # in 8 bits, scales in 16, the bias in 32


@pytest.mark.parametrize("method", ["int8-weight", "int4-weight"])
def test_an_embedding_whose_head_stays_in_fp32_does_so_too(method: str) -> None:
    words, head = nn.Embedding(500, 300), nn.Linear(300, 500)  # 300 inputs are no multiple of 16
    head.weight = words.weight
    module, ids = nn.Sequential(words, head, nn.Linear(500, 48), nn.Linear(48, 512)), torch.tensor([[1, 2]])
    made = quantise(model_of(module, ids), method, [], target="export")
    assert [type(layer) for layer in made.module.children()][:2] == [nn.Embedding, nn.Linear]
    assert made.notes[0].endswith("; in fp32, as other code uses their weights: 0")


def test_a_layer_with_several_names_is_small_under_each() -> None:
    words = nn.Embedding(500, 64)
    made, note = weight_only(nn.ModuleDict({"encoder": words, "decoder": words}), 8)
    assert "1 embeddings in 8 bits" in note
    assert isinstance(made.get_submodule("encoder"), Int8Embedding)
    assert made.get_submodule("decoder") is made.get_submodule("encoder")


def test_a_layer_with_a_hook_keeps_it(network: nn.Module) -> None:
    network.get_submodule("0").register_forward_hook(lambda _layer, _given, found: found.clamp(max=1.0))
    network.get_submodule("2").register_forward_pre_hook(lambda _layer, given: (given[0] / 2,))
    with pytest.raises(ModelRefused, match="without hooks"):
        weight_only(network, 8)
    wider = nn.Sequential(network, nn.Linear(4, 64), nn.Linear(64, 256)).eval()
    made, note = weight_only(wider, 8)
    assert "1 linear layers in 8 bits" in note
    assert drift_of(wider, made, 10 * torch.randn(5, 256)) < 0.02


@pytest.mark.parametrize("method", ["int8-weight", "int4-weight"])
def test_the_weights_of_pruned_layers_get_fewer_bits(network: nn.Module, method: str) -> None:
    for name in ("0", "2"):
        prune.l1_unstructured(network.get_submodule(name), "weight", 0.5)
    example = torch.randn(2, 256)
    network(example)  # with gradients
    made = quantise(model_of(network, example), method, [], target="export")
    assert [type(layer) for layer in made.module.children()][2:] == [Int8Linear, nn.ReLU, nn.Linear]
    assert (
        0 < drift_of(network, made.module, torch.randn(5, 256)) < (0.01 if method == "int8-weight" else 0.15)
    )


@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 3, 256)])
def test_the_compiler_of_torchscript_takes_the_layers(network: nn.Module, shape: tuple[int, ...]) -> None:
    made, _ = weight_only(network, 8)
    given = torch.randn(shape)
    assert torch.equal(torch.jit.script(made)(given), made(given))
    embedding, _ = weight_only(Tied().eval(), 8)
    ids = torch.tensor([[1, 2, 499]])
    assert torch.equal(torch.jit.script(embedding)(ids), embedding(ids))


@pytest.mark.parametrize(("bits", "inputs"), [(8, 300), (8, 1000), (4, 300)])
def test_linear_layers_whose_weights_the_kernel_would_read_beyond_stay_as_they_are(
    bits: int, inputs: int
) -> None:
    model = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256))
    made, _ = weight_only(model, bits)
    assert [type(layer) is nn.Linear for layer in made.children()][::2] == [True, False]


def test_a_model_without_large_layers_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"16,384 weights and more, .*, and the model has none"):
        weight_only(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 3, 3)), 8)


def test_auto_tries_it_where_linear_layers_are_heavy(network: nn.Module) -> None:
    assert "int8-weight" not in methods_tried(network, "auto", "torchscript", [])
    assert "int8-weight" in methods_tried(nn.Linear(1024, 1024), "auto", "torchscript", [])
    assert "int4-weight" not in methods_tried(nn.Linear(1024, 1024), "auto", "torchscript", [])


def test_a_program_orders_weights_of_4_bits_once(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = weight_only(network, 4)
    program = to_program(made, (torch.randn(2, 256),), BATCH)
    assert any(node.target is BY_PROCESSOR for node in program.graph.nodes)
    served = ServedProgram(program)
    rows = torch.randn(5, 256)
    with torch.no_grad():
        first = served(rows)  # torch's module, with its checks
        again = served(rows)
    assert torch.equal(first, again)
    assert str(BY_PROCESSOR) not in served._direct.func.__self__.code  # type: ignore[attr-defined]


def test_weights_ordered_for_other_instructions_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.backends.cpu.get_cpu_capability()
    package = Package("net.pt2", is_program=False)
    assert aot._reason_against(package, Build(weights_for=here), "cpu") is None
    assert aot._reason_against(package, Build(), "cpu") is None
    found = aot._reason_against(package, Build(weights_for="another"), "cpu")
    assert found is not None
    assert found.fatal
    assert "ordered for another" in found.reason


@pytest.mark.parametrize("method", ["int8-weight", "int4-weight"])
def test_a_transformer_keeps_its_answers_in_an_exported_program(method: str) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    example = (torch.randn(2, 12, 128),)

    made = quantise(model_of(encoder, *example), method, [], target="export")

    served = ServedProgram(to_program(made.module, example, BATCH))
    rows = torch.randn(3, 12, 128)
    for _ in range(2):
        assert 0 < drift_of(encoder, served, rows) < (0.01 if method == "int8-weight" else 0.15)


def archive(folder: Path, *arguments: str) -> int:
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32))
    (folder / "net.py").write_text(NET)
    common = ["archive", "--model-name", "net", "--version", "1", "--export-path", str(folder), "-f"]
    return main([*common, "--example", str(folder / "x.npy"), *arguments])


def answers_to(path: Path, folder: Path, rows: torch.Tensor) -> torch.Tensor:
    """Return what the model of an archive answers as a server runs it."""
    with zipfile.ZipFile(path) as opened:
        opened.extractall(folder / "unpacked")
    run = aot.load_package(str(folder / "unpacked" / "model.pt2"), str(folder / "unpacked"), "cpu")
    with torch.no_grad():
        return run(rows)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--quantize", "int4-weight"], "take --format export or aoti, or int8-weight"),
        (["--quantize", "int4-weight", "--format", "aoti", "--isa", "avx2"], "--isa has no use"),
    ],
)
def test_what_4_bits_can_not_do_is_said_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert archive(tmp_path, "--model-file", str(tmp_path / "net.py"), *arguments) != 0
    told = capsys.readouterr().err
    assert line in told
    assert "reading the model" not in told


def test_without_torchao_int8_of_programs_is_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    given = ["--quantize", "int8-static", "--format", "export"]
    assert archive(tmp_path, "--model-file", str(tmp_path / "net.py"), *given) != 0
    told = capsys.readouterr().err
    assert "pip install 'torchere[quantize]'" in told
    assert "reading the model" not in told
    assert pt2e.check_torchao.__doc__


def test_an_archive_in_8_bits_is_small_and_says_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model-file", str(tmp_path / "net.py"), "--quantize", "int8-weight", "--accept-slower"]
    assert archive(tmp_path, *given) == 0
    told = capsys.readouterr().err
    assert "int8-weight: 1 linear layers in 8 bits" in told
    with zipfile.ZipFile(tmp_path / "net.mar") as opened:
        report = json.loads(opened.read("MAR-INF/report.json"))
        size = opened.getinfo("model.pt").file_size
    assert report["accepted"]
    assert report["max_drift"] == 0.05
    assert size < 0.4 * 4 * (256 * 192 + 192 * 16) + 20_000


def quantised(kind: str) -> nn.Module:
    """Return the network of `NET`, quantised as a user does."""
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    space: dict[str, Any] = {"__name__": "net"}
    exec(NET, space)
    model: nn.Module = space["Net"]().eval()
    if kind == "int4 for CPUs":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=32))
        return model
    configurations = {
        "int8": Int8WeightOnlyConfig,
        "int8 with dynamic activations": Int8DynamicActivationInt8WeightConfig,
        "int4 in int8": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32)),  # type: ignore[attr-defined]
    }
    quantize_(model, configurations[kind]())
    return model


KINDS = ["int8", "int8 with dynamic activations", "int4 in int8", "int4 for CPUs"]


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_of_a_model_of_torchao_answers_alike_and_has_no_operator_of_torchao(kind: str) -> None:
    model = quantised(kind)
    program = to_program(model, (torch.randn(2, 256),), BATCH)
    assert not [node for node in program.graph.nodes if "torchao" in str(node.target)]
    assert all(type(one) in (torch.Tensor, nn.Parameter) for one in program.state_dict.values())
    assert not [
        one for one in program.state_dict.values() if one.dtype == torch.float32 and one.numel() > 10_000
    ]
    rows = torch.randn(5, 256)
    served = ServedProgram(program)
    for _ in range(2):
        assert drift_of(model, served, rows) < 1e-6


@needs_torchao
def test_a_state_dict_of_torchao_is_packed_in_8_bits_and_served_without_torchao(tmp_path: Path) -> None:
    model = quantised("int8")
    torch.save(model.state_dict(), tmp_path / "net.pth")
    given = ["--model-file", str(tmp_path / "net.py"), "--serialized-file", str(tmp_path / "net.pth")]
    assert archive(tmp_path, *given, "--format", "export", "--dynamic-batch", "1:16") == 0
    rows = torch.randn(3, 256)
    with torch.no_grad():
        assert torch.allclose(answers_to(tmp_path / "net.mar", tmp_path, rows), model(rows), atol=1e-6)
    program = tmp_path / "unpacked" / "model.pt2"
    assert program.stat().st_size < 130_000  # fp32 would be 209,000 in weights alone
    code = (
        "import sys, torch\n"
        f"run = torch.export.load({str(program)!r}).module()\n"
        "print(tuple(run(torch.rand(2, 256)).shape), 'torchao' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(2, 16) False"


@needs_torchao
@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        (["--format", "torchscript"], "TorchScript would hold them in fp32; take --format export or aoti"),
        (["--format", "keep"], "can't load into a class that is not quantised; take --format export or aoti"),
        (["--quantize", "int8-weight"], "quantised already, by torchao (Int8Tensor); leave --quantize out"),
    ],
)
def test_what_would_lose_the_bits_of_torchao_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: list[str], line: str
) -> None:
    torch.save(quantised("int8").state_dict(), tmp_path / "net.pth")
    given = ["--model-file", str(tmp_path / "net.py"), "--serialized-file", str(tmp_path / "net.pth")]
    assert archive(tmp_path, *given, *wanted) != 0
    told = capsys.readouterr().err
    assert line in told
    assert not (tmp_path / "net.mar").exists()


@needs_torchao
def test_a_state_dict_of_torchao_replaces_the_weights_of_its_class(tmp_path: Path) -> None:
    torch.save(quantised("int8").state_dict(), tmp_path / "net.pth")
    (tmp_path / "net.py").write_text(NET)
    source = read_source(tmp_path / "net.pth", tmp_path / "net.py", None, False)
    assert source.module is not None
    assert type(weight_of(source.module, "layers.0")).__name__ == "Int8Tensor"
    rows = torch.randn(2, 256)
    with torch.no_grad():
        assert torch.equal(source.module(rows), quantised("int8")(rows))


@needs_torchao
@pytest.mark.parametrize(
    ("kind", "wanted"), [("int8", False), ("int4 in int8", False), ("int4 for CPUs", True)]
)
def test_the_compiler_folds_no_weights_of_torchao_to_fp32(kind: str, wanted: bool) -> None:
    assert _freezing(quantised(kind), BuildOptions()) is wanted
    assert _freezing(nn.Linear(2, 2), BuildOptions()) is None


@needs_torchao
def test_a_program_with_tensors_of_torchao_is_refused_with_advice_that_works(tmp_path: Path) -> None:
    from torchao.utils import unwrap_tensor_subclass

    model, rows, file = quantised("int8"), torch.randn(2, 256), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(model, (rows,)), file)
    with pytest.raises(ModelRefused, match="unwrap_tensor_subclass"):
        read_source(file, None, None, False)
    wanted = model(rows)
    torch.export.save(torch.export.export(unwrap_tensor_subclass(model), (rows,)), file)
    source = read_source(file, None, None, False)
    assert source.module is not None
    assert torch.allclose(source.module(rows), wanted, atol=1e-6)


class OfItsDtype(nn.Module):
    """Asks its parameters for their dtype, as many models do."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 192, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x.to(next(self.parameters()).dtype))
        return found


def of_its_dtype(bias: bool) -> LoadedModel:
    return model_of(OfItsDtype(bias), torch.randn(2, 256))


@pytest.mark.parametrize("method", ["int8-weight", "int4-weight"])
def test_a_model_finds_the_dtype_of_its_parameters_in_a_bias(method: str) -> None:
    model = of_its_dtype(bias=True)
    made = quantise(model, method, [], target="export")
    program = to_program(made.module, model.example, BATCH).module()
    assert 0 < drift_of(model.module, program, torch.randn(5, 256)) < 0.2


def test_without_any_bias_the_refusal_says_that_no_parameter_is_left() -> None:
    with pytest.raises(
        ModelRefused, match=r"StopIteration: no text; none of its layers .* \(x\.dtype\), or take"
    ):
        quantise(of_its_dtype(bias=False), "int8-weight", [])
