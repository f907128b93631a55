from __future__ import annotations

import io
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.loading import torchscript
from torchere.handlers.loading.torchscript import load_torchscript


def test_a_saved_module_loads_in_eval_mode(scripted_doubler: Path) -> None:
    module = load_torchscript(str(scripted_doubler / "doubler.pt"), "cpu")
    assert not module.training
    assert module(torch.tensor([3.0])).tolist() == [6.0]


def test_a_module_saved_in_training_mode_is_put_in_eval_mode(tmp_path: Path) -> None:
    path = str(tmp_path / "dropout.pt")
    torch.jit.save(torch.jit.script(torch.nn.Dropout(0.9)), path)
    assert load_torchscript(path, "cpu")(torch.ones(100)).tolist() == [1.0] * 100


def test_a_frozen_module_loads(tmp_path: Path) -> None:
    path = str(tmp_path / "frozen.pt")
    frozen = torch.jit.freeze(torch.jit.script(torch.nn.Linear(2, 2).eval()))
    torch.jit.save(frozen, path)
    assert load_torchscript(path, "cpu")(torch.ones(1, 2)).shape == (1, 2)


def test_a_state_dict_is_told_from_torchscript(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(RuntimeError, match=r"weights\.pt can't be loaded as TorchScript .*--model-file"):
        load_torchscript(path, "cpu")


def test_only_the_form_that_can_be_read_before_is_loaded(tmp_path: Path) -> None:
    flat, behind = tmp_path / "flat.pt", tmp_path / "behind.pt"
    writer = torch.jit.script(Writer())
    torch.jit.save_jit_module_to_flatbuffer(writer, str(flat))  # type: ignore[attr-defined]
    behind.write_bytes(b"X" * 64)
    writer.save(str(tmp_path / "zip.pt"))
    with zipfile.ZipFile(behind, "a") as package, zipfile.ZipFile(tmp_path / "zip.pt") as written:
        for name in written.namelist():
            package.writestr(name, written.read(name))
    torch.jit.load(behind)  # torch does take both
    torch.jit.load(flat)
    for path in (flat, behind):
        with pytest.raises(RuntimeError, match=r"no zip as torch\.jit\.save writes it"):
            load_torchscript(str(path), "cpu")


@pytest.mark.filterwarnings("ignore:Lite Interpreter is deprecated")
def test_a_module_saved_for_phones_loads(tmp_path: Path) -> None:
    path = str(tmp_path / "lite.ptl")
    torch.jit.script(torch.nn.Linear(2, 2))._save_for_lite_interpreter(path)
    assert load_torchscript(path, "cpu")(torch.ones(1, 2)).shape == (1, 2)


def test_an_engine_this_build_lacks_is_named_with_those_it_has(scripted_doubler: Path) -> None:
    with pytest.raises(ValueError, match=r"'abacus'.*expected one of .*\w"):
        load_torchscript(str(scripted_doubler / "doubler.pt"), "cpu", TorchScriptOptions("abacus"))


def test_the_engine_holds_for_the_load_only(scripted_doubler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    before = torch.backends.quantized.engine
    other = next(name for name in engines if name != before)
    seen = []
    real_load = torch.jit.load

    def spy(*args: object, **kwargs: object) -> object:
        seen.append(torch.backends.quantized.engine)
        return real_load(*args, **kwargs)

    monkeypatch.setattr(torch.jit, "load", spy)
    path = str(scripted_doubler / "doubler.pt")
    load_torchscript(path, "cpu", TorchScriptOptions(other))
    load_torchscript(path, "cpu")
    assert seen == [other, before]
    assert torch.backends.quantized.engine == before


def test_the_engine_is_put_back_after_a_failed_load(tmp_path: Path) -> None:
    before = torch.backends.quantized.engine
    other = next(e for e in torch.backends.quantized.supported_engines if e not in ("none", before))
    (tmp_path / "bad.pt").write_bytes(b"not a model")
    with pytest.raises(RuntimeError, match="can't be loaded"):
        load_torchscript(str(tmp_path / "bad.pt"), "cpu", TorchScriptOptions(other))
    assert torch.backends.quantized.engine == before


def test_loads_never_see_another_loads_engine(
    scripted_doubler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.backends.quantized.engine
    other = next(e for e in torch.backends.quantized.supported_engines if e not in ("none", before))
    wrong = []
    wish = threading.local()
    real_load = torch.jit.load

    def spy(*args: object, **kwargs: object) -> object:
        if torch.backends.quantized.engine != wish.engine:
            wrong.append(wish.engine)
        return real_load(*args, **kwargs)

    def load(engine: str | None) -> None:
        wish.engine = engine or before
        load_torchscript(str(scripted_doubler / "doubler.pt"), "cpu", TorchScriptOptions(engine))

    monkeypatch.setattr(torch.jit, "load", spy)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, [other, None] * 8))
    assert wrong == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_an_int8_model_answers_the_same_with_every_engine(tmp_path: Path) -> None:
    class Dynamic(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.quantize_per_tensor(torch.eye(4), 0.01, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(weight, None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self.packed)
            return y

    engines = torch.backends.quantized.supported_engines
    before = torch.backends.quantized.engine
    engine = "fbgemm" if "fbgemm" in engines else "qnnpack"
    torch.backends.quantized.engine = engine
    try:
        path = str(tmp_path / "int8.pt")
        torch.jit.save(torch.jit.script(Dynamic()), path)
    finally:
        torch.backends.quantized.engine = before
    row = torch.tensor([[0.5, -0.25, 1.0, 0.0]])
    for name in (engine, "onednn"):
        if name in engines:
            answer = load_torchscript(path, "cpu", TorchScriptOptions(name))(row)
            assert torch.allclose(answer, row, atol=0.02)


def test_calls_inside_and_outside_of_inference_mode_may_be_mixed(tmp_path: Path) -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(x.mean(dim=(2, 3)))
            return scores

    path = str(tmp_path / "head.pt")
    torch.jit.save(torch.jit.script(Head().eval()), path)
    module = load_torchscript(path, "cpu")
    row = torch.ones(1, 3, 4, 4)
    expected = module(row).tolist()
    for _ in range(3):
        with torch.inference_mode():
            assert module(row).tolist() == expected
        assert module(row).tolist() == expected


def saved(module: torch.nn.Module, path: Path) -> str:
    torch.jit.save(torch.jit.script(module.eval()), str(path))
    return str(path)


OPTIMIZED = TorchScriptOptions(optimize_for_inference=True)


def test_an_optimised_module_has_onednns_layouts_and_answers_the_same_in_several_threads(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU6(), torch.nn.Conv2d(8, 4, 3)
    path = saved(torch.nn.Sequential(*layers), tmp_path / "net.pt")
    module, plain = load_torchscript(path, "cpu", OPTIMIZED), load_torchscript(path, "cpu")
    assert "mkldnn_convolution" in str(module.graph)
    batches = [torch.rand(1 + index % 3, 3, 12 + index, 12) for index in range(24)]

    def agrees(rows: torch.Tensor) -> bool:
        with torch.inference_mode():
            inside = module(rows)
        return torch.allclose(inside, plain(rows), atol=1e-5) and torch.allclose(module(rows), inside)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(agrees, batches))


def test_linear_layers_of_an_optimised_module_are_packed_once_for_all_threads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = saved(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()), tmp_path / "net.pt")
    module, plain = load_torchscript(path, "cpu", OPTIMIZED), load_torchscript(path, "cpu")
    assert len(module.graph.findAllNodes("mkldnn::_linear_pointwise")) == 1  # type: ignore[attr-defined]

    def agrees(rows: int) -> bool:
        given = torch.rand(rows, 64)
        with torch.inference_mode():
            inside = module(given)
        return torch.allclose(inside, plain(given), atol=1e-5) and torch.allclose(module(given), inside)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(agrees, [1 + index % 40 for index in range(200)]))


def test_a_module_that_torch_cannot_optimise_is_served_as_it_is_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(module: torch.jit.ScriptModule, most_packed_bytes: int | None) -> None:
        with torch.no_grad():
            module.weight.zero_()
        raise RuntimeError("INTERNAL ASSERT FAILED")  # torch 2.13 does so for torch.clamp(x, 0, 6)

    monkeypatch.setattr(torchscript, "optimized", spoil)
    path = saved(torch.nn.Conv2d(3, 4, 3), tmp_path / "net.pt")
    module = load_torchscript(path, "cpu", OPTIMIZED)
    rows = torch.rand(2, 3, 12, 12)
    assert torch.equal(module(rows), load_torchscript(path, "cpu")(rows))
    assert "net.pt is served as it is, for it can't be optimised" in caplog.text


class Writer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "never-written")
        return x


def test_a_module_that_writes_files_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "writer.pt"
    torch.jit.script(Writer()).save(str(path))
    with pytest.raises(RuntimeError, match=r"could read or write any file: torch\.save in code/"):
        load_torchscript(str(path), "cpu")


TORCHVISION = """\
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
library.define("best(Tensor scores) -> Tensor")
library.impl("best", torch.argmax, "CPU")
"""


class Best(torch.nn.Module):
    """Calls an operator of torchvision's namespace, as a scripted detector does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2**18))  # of 1 MiB: the file is mapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.torchvision.best(x * self.weight[0])
        return found


def stub(package: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a package that can be imported and has not been; return its file."""
    file = folder / f"{package}.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, package, raising=False)
    return str(file)


def test_torchvision_is_imported_for_a_file_that_needs_its_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "best.pt")
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("best(Tensor scores) -> Tensor")
        torch.jit.script(Best()).save(path)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(RuntimeError, match=r"best\.pt .*needs torchvision, which can't be imported"):
        load_torchscript(path, "cpu")

    stub("torchvision", TORCHVISION, tmp_path, monkeypatch)
    assert load_torchscript(path, "cpu")(torch.tensor([1.0, 3.0, 2.0])).item() == 1


def save_with_engine(module: torch.nn.Module, path: str) -> None:
    """Save a module as TorchScript, with an attribute of TensorRT's class in its `ReLU`."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            code = source.read(name)
            if b"class ReLU(" in code:
                code = code.replace(b"training : bool", b"engine : __torch__.torch.classes.tensorrt.Engine")
            target.writestr(name, code)


def test_torch_tensorrt_is_imported_for_a_file_with_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "engine.pt")
    save_with_engine(torch.nn.ReLU(), path)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(RuntimeError, match=r"engine\.pt .*needs torch_tensorrt, which can't be imported"):
        load_torchscript(path, "cpu")

    file = stub("torch_tensorrt", "", tmp_path, monkeypatch)  # without the class, which only C++ can register
    with pytest.raises(RuntimeError, match="Unknown type name"):
        load_torchscript(path, "cpu")
    assert sys.modules["torch_tensorrt"].__file__ == file


class Worst(torch.nn.Module):
    """Calls an operator of its own: torch crashes where one is registered in a second test."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.torchvision.worst(x)
        return found


def test_both_packages_are_imported_for_a_file_that_needs_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "both.pt")
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("worst(Tensor scores) -> Tensor")
        save_with_engine(torch.nn.Sequential(Worst(), torch.nn.ReLU()), path)
    file = stub("torchvision", TORCHVISION.replace("best", "worst"), tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(RuntimeError, match="needs torch_tensorrt, which can't be imported"):
        load_torchscript(path, "cpu")
    assert sys.modules["torchvision"].__file__ == file
