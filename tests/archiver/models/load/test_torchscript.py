"""TorchScript with its linear layers in oneDNN's order: the same answers, of fewer operators."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load import freezing
from torchere.archiver.models.load.torchscript import (
    has_convolutions,
    has_linear_layers,
    load_script,
    optimized,
    saved,
)
from torchere.archiver.scan import UnsafeModel

PACKED, PLAIN = "mkldnn::_linear_pointwise", "aten::linear"


def again(module: Any) -> Any:
    """The TorchScript module as it comes out of a file."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file).eval()


def loaded(module: nn.Module) -> Any:
    """The module as TorchScript out of a file."""
    return again(torch.jit.script(module.eval()))


def count(module: Any, kind: str) -> int:
    return len(module.graph.findAllNodes(kind, True))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Activated(nn.Module):
    def __init__(self, activation: nn.Module, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24, bias=bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.activation(self.layer(x))
        return y


ACTIVATIONS = {
    "aten::relu": nn.ReLU(),
    "aten::relu_": nn.ReLU(inplace=True),
    "aten::gelu": nn.GELU(),
    "aten::gelu of tanh": nn.GELU(approximate="tanh"),
    "aten::silu": nn.SiLU(),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_layer_and_its_activation_are_one_operator(kind: str, bias: bool) -> None:
    plain = loaded(Activated(ACTIVATIONS[kind], bias))
    fast = optimized(again(plain))
    assert count(fast, PACKED) == 1
    assert count(fast, PLAIN) == count(fast, kind.partition(" ")[0]) == 0
    x = torch.randn(7, 16)
    assert torch.allclose(fast(x), plain(x), atol=1e-6)


def test_other_activations_stay_behind_the_layer() -> None:
    plain = loaded(Activated(nn.Sigmoid(), True))
    fast = optimized(again(plain))
    assert (count(fast, PACKED), count(fast, "aten::sigmoid")) == (1, 1)
    assert torch.allclose(fast(torch.ones(2, 16)), plain(torch.ones(2, 16)), atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(16),
        lambda: torch.randn(0, 16),
        lambda: torch.randn(2, 0, 16),
        lambda: torch.randn(1, 16),
        lambda: torch.randn(2, 3, 4, 16),
        lambda: torch.randn(16, 5).t(),
        lambda: torch.randn(1, 1, 16).expand(4, 3, 16),
        lambda: torch.randn(6, 3, 32)[::2, :, ::2],
        lambda: torch.randn(2000, 16),
    ],
    ids=["one row", "none", "none inside", "batch of 1", "4-d", "transposed", "expanded", "strided", "many"],
)
def test_it_takes_every_shape_that_a_linear_layer_takes(make: Callable[[], torch.Tensor]) -> None:
    plain = loaded(Activated(nn.GELU(), True))
    fast, x = optimized(again(plain)), make()
    for _ in range(3):  # TorchScript compiles in the second run
        found, expected = fast(x), plain(x)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-6)


class Branches(nn.Module):
    """A layer read twice, and layers that run in a branch or in a loop only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        read_twice = self.first(x)
        y = functional.relu(read_twice) + read_twice
        if times:
            y = functional.silu(self.second(y))
        for _ in range(times):
            y = functional.gelu(self.first(y))
        return y


def test_layers_inside_of_branches_and_loops_are_packed_where_they_are() -> None:
    plain = loaded(Branches())
    fast = optimized(again(plain))
    assert (count(fast, PACKED), count(fast, PLAIN)) == (3, 0)
    assert count(fast, "aten::relu") == 1  # what is read twice keeps its output
    for times in (0, 1, 3):
        x = torch.randn(4, 8)
        assert torch.allclose(fast(x, times), plain(x, times), atol=1e-6)


def test_weights_that_are_no_constant_matrix_of_float32_stay_as_they_are() -> None:
    class Given(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, weight)

    double = optimized(loaded(nn.Linear(4, 4).double()))
    assert (count(double, PACKED), count(double, PLAIN)) == (0, 1)
    assert double(torch.ones(2, 4).double()).dtype is torch.float64
    given = optimized(again(torch.jit.trace(Given(), (torch.ones(2, 4), torch.ones(3, 4)))))
    assert (count(given, PACKED), count(given, PLAIN)) == (0, 1)


class Parametrised(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class Stepped(Parametrised):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias[::2])


class WithoutBias(Parametrised):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


@pytest.mark.parametrize(
    "module",
    [
        Parametrised(torch.ones(8, 8), torch.tensor(2.0)),
        Parametrised(torch.ones(8, 8), torch.ones(1)),
        Parametrised(torch.ones(8, 8), torch.randn(2, 8)),
        Stepped(torch.ones(8, 8), torch.arange(16.0)),
        WithoutBias(torch.ones(8), torch.ones(1)),
        nn.Sequential(*(Parametrised(torch.ones(n, m), torch.ones(n)) for n, m in ((0, 8), (3, 0)))),
    ],
    ids=["a number", "one for all", "one a row", "every second", "vector of weights", "no size"],
)
def test_what_only_torch_can_add_and_multiply_stays_with_torch(module: nn.Module) -> None:
    plain, x = loaded(module), torch.randn(2, 8)
    fast = optimized(again(plain))
    assert count(fast, PLAIN) >= 1
    assert torch.allclose(fast(x), plain(x), atol=1e-6)


def test_a_bias_that_a_caller_gives_may_have_any_shape() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight, bias)

    plain, x = loaded(Given()), torch.randn(2, 8)
    fast = optimized(again(plain))
    for bias in (torch.randn(8), torch.randn(16)[::2], torch.tensor(2.0), torch.randn(2, 8)):
        assert torch.allclose(fast(x, bias), plain(x, bias), atol=1e-6)


def test_a_layer_that_writes_into_a_tensor_it_is_given_stays_as_it_is() -> None:
    class Written(Parametrised):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.empty(x.size(0), 8)
            # torch takes it. Nothing may follow a type comment here: torch.jit reads it.
            return torch._C._nn.linear(x, self.weight, self.bias, out=y)  # type: ignore[call-arg]

    plain, x = loaded(Written(torch.randn(8, 8), torch.randn(8)).requires_grad_(False)), torch.randn(2, 8)
    assert torch.equal(optimized(again(plain))(x), plain(x))


def test_weights_that_the_model_itself_changes_stay_as_they_are() -> None:
    weight = torch.ones(4, 4)

    def grows(x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, weight)
        return y + 0 * weight.mul_(x.mean() + 1)[0]

    traced, x = torch.jit.trace(grows, torch.ones(2, 4), check_trace=False), torch.ones(2, 4)
    plain, fast = again(traced), optimized(again(traced))
    assert count(fast, PLAIN) == 1
    for _ in range(3):
        assert torch.equal(fast(x), plain(x))


def test_a_formula_that_is_chosen_at_run_time_stays_behind_the_layer() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, exact: bool) -> torch.Tensor:
            return functional.gelu(self.layer(x), approximate="none" if exact else "tanh")

    plain, x = loaded(Chosen()), torch.randn(2, 8)
    fast = optimized(again(plain))
    assert (count(fast, PACKED), count(fast, "aten::gelu")) == (1, 1)
    for exact in (True, False):
        assert torch.allclose(fast(x, exact), plain(x, exact), atol=1e-6)


def test_weights_of_a_layer_that_runs_twice_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reorder, copied = torch.ops.mkldnn._reorder_linear_weight, []

    def counted(weight: torch.Tensor, rows: int) -> Any:
        copied.append(weight.nbytes)
        return reorder(weight, rows)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", counted)
    layer = nn.Linear(8, 8)
    plain, x = loaded(nn.Sequential(layer, nn.ReLU(), layer, layer)), torch.randn(2, 8)
    fast = optimized(again(plain), most_packed_bytes=4 * 8 * 8)
    assert (count(fast, PACKED), count(fast, PLAIN), copied) == (3, 0, [4 * 8 * 8])
    assert torch.allclose(fast(x), plain(x), atol=1e-6)


def test_so_many_bytes_of_weights_are_copied_and_no_more() -> None:
    plain = loaded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 2)))
    fast = optimized(again(plain), most_packed_bytes=4 * (8 * 8 + 64 * 2))
    assert (count(fast, PACKED), count(fast, PLAIN)) == (2, 1)
    assert torch.allclose(fast(torch.ones(3, 8)), plain(torch.ones(3, 8)), atol=1e-6)


def test_convolutions_and_linear_layers_of_one_model_are_both_made_for_the_processor() -> None:
    plain = loaded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5)))
    assert has_convolutions(plain)
    assert has_linear_layers(plain)
    fast = optimized(again(plain))
    assert "mkldnn_convolution" in str(fast.graph)
    assert count(fast, PACKED) == 1
    x = torch.randn(3, 3, 8, 8)
    assert torch.allclose(fast(x), plain(x), atol=1e-5)


def test_a_module_with_neither_is_frozen_and_no_more() -> None:
    plain = loaded(nn.ReLU())
    assert not has_convolutions(plain)
    assert not has_linear_layers(plain)
    assert optimized(again(plain))(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_a_torch_with_other_layers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor, rows: int) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    with pytest.raises(RuntimeError, match="this build of torch has other linear layers of oneDNN"):
        optimized(loaded(nn.Linear(4, 4)))


class Writer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "never-written")
        return x


@pytest.mark.parametrize("as_bytes", [False, True])
def test_code_that_writes_files_is_loaded_only_unchecked(tmp_path: Path, as_bytes: bool) -> None:
    written = saved(torch.jit.script(Writer()))
    (tmp_path / "net.pt").write_bytes(written)
    for check in (True, False):
        source = io.BytesIO(written) if as_bytes else str(tmp_path / "net.pt")
        if check:
            with pytest.raises(UnsafeModel, match=r"torch\.save"):
                load_script(source, check=check)
        else:
            assert load_script(source, check=check).original_name == "Writer"


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Squaring(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squared: torch.Tensor = Square.apply(x)
        return squared


def test_a_function_of_python_that_no_file_can_hold_is_named_with_a_way_out() -> None:
    traced = torch.jit.trace(Squaring().eval(), torch.rand(2))
    with pytest.raises(ModelRefused, match=r"^the model calls Square, .*; take --format export or aoti, or "):
        saved(traced)


@pytest.mark.parametrize("shape", [(0, 15), (2, 15), (0,)])
def test_rows_of_another_width_are_refused_also_if_there_are_none(shape: tuple[int, ...]) -> None:
    network = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        traced = torch.jit.freeze(torch.jit.trace(network, torch.rand(2, 16)))
    fast = optimized(traced)
    assert fast(torch.zeros(0, 16)).shape == (0, 2)
    with pytest.raises((RuntimeError, torch.jit.Error)):
        fast(torch.zeros(*shape))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        y[:, :4].clamp_(-0.1, 0.1)
        return self.second(y)


class WrittenInPieces(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        y.chunk(2, 1)[0].relu_()
        return self.second(y)


class WrittenByAnotherName(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        y.detach().mul_(2)  # freezing removes `detach`, and then no view is left
        return self.second(y)


class WrittenInTurns(Written):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.jit.trace(self.second.eval().requires_grad_(False), torch.rand(2, 8, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        result = y
        for _ in range(x.size(0)):
            result = self.second(y)
            y[:, :4] = 0
        return result


class WrittenInTurnsBefore(WrittenInTurns):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(x.size(0)):
            y[:, :4].clamp_(-0.1, 0.1)
            y = self.second(y)
        return y


class WrittenAndCopied(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        y[:, :4] = 0
        return self.second(y.view(-1, 8, 8, 8).relu())


class WrittenAtTheEnd(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.relu_(self.first(x))
        y = self.second(y.add_(1)).permute(0, 2, 3, 1)
        y[..., :2] = y[..., :2] * 2
        return y


class Listed(Written):
    def __init__(self) -> None:
        super().__init__()
        for name, layer in list(self.named_children()):
            given = torch.rand(2, layer.in_channels, 8, 8)  # type: ignore[call-overload]
            setattr(self, name, torch.jit.trace(layer.eval().requires_grad_(False), given))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, features = self.first(x), [x[:, :0]]
        features.append(y)
        features.append(self.second(y))
        return torch.cat(features, 1)


def made_by(net: nn.Module, script: bool) -> Any:
    net = net.eval().requires_grad_(False)
    return again(torch.jit.script(net) if script else torch.jit.trace(net, torch.rand(2, 3, 8, 8)))


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        *((Written, False), (WrittenInPieces, False), (WrittenByAnotherName, False)),
        *((WrittenInTurns, True), (WrittenInTurnsBefore, True)),
    ],
)
def test_a_tensor_that_is_written_before_a_convolution_is_not_optimised(
    kind: type[Written], script: bool
) -> None:
    with pytest.raises(RuntimeError, match="lose its writes to tensors"):
        optimized(made_by(kind(), script))


@pytest.mark.parametrize(
    ("kind", "script"),
    [(WrittenAtTheEnd, False), (WrittenAndCopied, False), (Written, True), (Listed, True)],
)
def test_other_writes_are_optimised(kind: type[Written], script: bool) -> None:
    net, x = kind().eval(), torch.rand(2, 3, 8, 8)
    fast = optimized(made_by(net, script))
    assert "mkldnn_convolution" in str(fast.graph)
    assert torch.allclose(fast(x), net(x), atol=1e-5)


def test_only_writes_between_a_convolution_and_its_input_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(freezing, "_may_write", lambda aliases, write, values: looked_at.append(write.kind()))
    optimized(made_by(WrittenAtTheEnd(), script=False))
    assert looked_at == []
    optimized(made_by(Written(), script=False))
    assert looked_at == ["aten::clamp_"]


def test_normalised_channels_of_sequences_are_not_folded_into_linear_layers() -> None:
    norm = nn.BatchNorm1d(6)
    norm.running_mean = torch.linspace(-1, 1, 6)
    net, x = nn.Sequential(nn.Linear(8, 6), norm).eval(), torch.rand(2, 6, 8)
    assert torch.allclose(optimized(again(torch.jit.trace(net, x)))(x), net(x), atol=1e-5)
