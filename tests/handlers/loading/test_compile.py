"""How a loaded model computes: compiled, in oneDNN's layout, in half precision."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchere.handlers.loading import compile as loading
from torchere.handlers.loading.compile import (
    autocasting,
    check_valid_pt2_backend,
    compile_options,
    compiled,
    optimized,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, None),
        ({"pt2": "inductor"}, {"backend": "inductor"}),
        ({"pt2": {"backend": "eager", "mode": "default"}}, {"backend": "eager", "mode": "default"}),
        ({"pt2": {"compile": {"enable": True, "backend": "inductor"}}}, {"backend": "inductor"}),
        ({"pt2": {"compile": {"enable": True, "mode": "reduce-overhead"}}}, {"mode": "reduce-overhead"}),
        ({"pt2": {"compile": {"enable": False, "backend": "inductor"}}}, None),
        ({"pt2": {"compile": {"backend": "inductor"}}}, None),
        ({"pt2": {"compile": {"enable": True, "backend": "abacus"}}}, None),
        ({"pt2": "abacus"}, None),
        ({"pt2": {"export": {"aot_compile": True}}}, None),
    ],
)
def test_the_pt2_block_says_how_to_compile(config: dict[str, Any], options: dict[str, Any] | None) -> None:
    before = copy.deepcopy(config)
    assert compile_options(config) == options
    assert config == before


@pytest.mark.parametrize("pt2", [3, ["inductor"], {"compile": True}])
def test_a_block_of_the_wrong_type_is_refused(pt2: object) -> None:
    with pytest.raises(ValueError, match="should be"):
        compile_options({"pt2": pt2})


def test_an_unknown_backend_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not check_valid_pt2_backend("abacus")
    assert "abacus is not a supported backend" in caplog.text


@pytest.mark.parametrize(
    ("model", "pt2"),
    [
        (SimpleNamespace(run=print), "inductor"),  # as onnxruntime's session, it can't be called
        (torch.nn.Linear(2, 2), {"options": ["max_autotune"]}),
        (torch.nn.Linear(2, 2), {"options": "max_autotune"}),
    ],
)
def test_a_model_that_can_not_be_compiled_is_served_as_it_is(
    model: Any, pt2: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert compiled(model, {"pt2": pt2}, CPU) is model
    assert "proceeding without compilation" in caplog.text


def test_the_package_of_tensorrt_is_imported_before_the_model_is_compiled_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_tensorrt.py").write_text(
        "import torch\ntorch._dynamo.register_backend(lambda graph, _: graph, name='tensorrt')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = torch.nn.Linear(2, 2)
    rows = torch.rand(3, 2)
    assert torch.equal(compiled(model, {"pt2": "tensorrt"}, CPU)(rows), model(rows))


@pytest.mark.parametrize(
    ("pt2", "device", "is_compiled"),
    [
        ("inductor", "cpu", False),
        ({"mode": "default"}, "cpu", False),
        ("eager", "cpu", True),
        ("inductor", "cuda", True),
    ],
)
def test_without_a_cpp_compiler_inductor_compiles_nothing_for_a_cpu(
    pt2: object, device: str, is_compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)

    with torch._inductor.config.patch({"cpp.cxx": ()}):
        found = compiled(model, {"pt2": pt2}, torch.device(device))

    assert (found is not model) is is_compiled
    assert ("No working C++ compiler found" in caplog.text) is not is_compiled


@pytest.fixture
def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()).eval()


def has_channels_last(net: torch.nn.Module) -> bool:
    return next(net.parameters()).is_contiguous(memory_format=torch.channels_last)


def test_without_the_setting_a_model_stays_as_it_is(net: torch.nn.Module) -> None:
    assert optimized(net) is net
    assert not has_channels_last(net)
    assert not loading.IPEX_AVAILABLE


def test_with_it_convolutions_have_the_layout_of_onednn_and_the_same_results(
    net: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(2, 3, 8, 8)
    before = net(rows)
    monkeypatch.setattr(loading, "IS_ASKED_FOR", True)
    after = optimized(net)
    assert has_channels_last(after)
    torch.testing.assert_close(after(rows), before)


def test_an_installed_extension_optimizes_the_model(
    net: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def optimize(model: torch.nn.Module) -> torch.nn.Module:
        seen.append(model)
        return model

    extension = SimpleNamespace(optimize=optimize)
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", extension)
    monkeypatch.setattr(loading, "IS_ASKED_FOR", True)
    monkeypatch.setattr(loading, "IPEX_AVAILABLE", True)
    optimized(net)
    assert seen == [net]
    assert has_channels_last(net)


def test_what_is_no_module_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "IS_ASKED_FOR", True)
    session = object()
    assert optimized(session) is session


class Telling(torch.nn.Module):
    """Says in what type its products were computed."""

    kind = "telling"

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        products = self.linear(x)
        return {"y": [products], "bits": products.dtype.itemsize * 8, "ids": torch.tensor([1])}


def test_products_are_halves_and_answers_are_not() -> None:
    model = autocasting(Telling(), {"autocast": "bfloat16"}, CPU)
    answer = model(torch.ones(1, 4))
    assert answer["bits"] == 16
    assert (answer["y"][0].dtype, answer["ids"].dtype) == (torch.float32, torch.int64)
    assert model.kind == "telling"


def test_torchscript_is_cast_too() -> None:
    linear = torch.nn.Linear(512, 512)
    rows = torch.rand(1, 512)
    scripted = autocasting(torch.jit.script(linear), {"autocast": "bfloat16"}, CPU)
    with torch.inference_mode():
        assert 0 < (scripted(rows) - linear(rows)).abs().max() < 0.1


def test_a_model_that_is_cast_can_be_copied() -> None:
    model = autocasting(Telling(), {"autocast": "bfloat16"}, CPU)
    assert copy.copy(model).wrapped is model.wrapped


def test_nothing_is_cast_unasked() -> None:
    model = Telling()
    assert autocasting(model, {}, CPU) is model


def test_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"autocast .* is 'int8', expected bfloat16 or float16"):
        autocasting(Telling(), {"autocast": "int8"}, CPU)


def test_what_torch_does_not_compute_is_refused() -> None:
    session = object()  # onnxruntime's can't be called, either
    assert autocasting(session, {}, CPU) is session
    with pytest.raises(ValueError, match=r"torch does not compute this model: found a object"):
        autocasting(session, {"autocast": "bfloat16"}, CPU)


class Casts(TorchDispatchMode):
    """Notes the shapes of what the calling thread casts."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_executors_cast_their_weights_for_themselves() -> None:
    """As two in threads that share a model do: on a GPU, neither waits for what the other has begun."""
    linear = torch.nn.Linear(512, 512)
    inside, seen = threading.Event(), threading.Event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear(x)
        inside.set()
        assert seen.wait(30)
        return y

    def first() -> None:
        with torch.no_grad():
            autocasting(forward, {"autocast": "bfloat16"}, CPU)(torch.ones(1, 512))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    with torch.no_grad(), Casts() as casts:
        autocasting(linear, {"autocast": "bfloat16"}, CPU)(torch.ones(1, 512))
    seen.set()
    thread.join()
    assert (512, 512) in casts.shapes
