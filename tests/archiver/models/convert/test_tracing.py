"""What tracing does not keep is refused or told, and results of any form come through."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.fold.attention import open_attention
from torchere.archiver.models.fold.convolutions import fold
from torchere.archiver.models.inputs.run import run_on
from torchere.archiver.models.inputs.sizes import FreeSize, batch_of
from torchere.archiver.signature import parse

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
Forward = Callable[..., Any]


class Net(nn.Module):
    """Calls a function."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function = forward

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def positive(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -10 * x


def short(x: torch.Tensor) -> torch.Tensor:
    return x[:, : int(x.sum(1).max())]


def as_often(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    for _ in range(int(n.max())):
        x = torch.tanh(x)
    return x


@pytest.mark.parametrize(
    ("forward", "example"),
    [
        (positive, (torch.rand(2, 4),)),
        (positive, (-torch.rand(2, 4),)),
        (short, (torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),)),
        (as_often, (torch.rand(2, 4), torch.tensor([2, 2]))),
    ],
    ids=["branch taken", "branch not taken", "crop", "loop"],
)
def test_branches_and_loops_that_depend_on_values_are_refused(
    forward: Forward, example: tuple[torch.Tensor, ...]
) -> None:
    with pytest.raises(ModelRefused, match=r"tracing kept the branches .* --script keeps .* --format export"):
        to_torchscript(Net(forward).eval(), example, only_trace=True)
    with pytest.raises(
        ModelRefused,
        match=r"tracing kept the branches .* nor does its source compile, as with .* keep with --mod",
    ):
        to_torchscript(Net(forward).eval(), example)


class Remembering(nn.Module):
    """Begins with the state that the last run left, as a tuple or in a list of tuples."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.layer, self.hidden = nn.LSTM(4, 8), [None] if listed else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.hidden, list):
            out, self.hidden[0] = self.layer(x, self.hidden[0])
            return out
        out, self.hidden = self.layer(x, self.hidden)
        return out


@pytest.mark.parametrize("listed", [False, True], ids=["a tuple", "a list of tuples"])
def test_state_in_tuples_and_lists_is_refused(listed: bool) -> None:
    with pytest.raises(ModelRefused, match="keeps state from one run to the next in 'hidden'"):
        to_torchscript(Remembering(listed).eval(), (torch.rand(1, 5, 4),), only_trace=True)


@pytest.mark.parametrize("held", ["(0, 1)", "[0]", "{0: 0}"])
def test_numbers_in_tuples_lists_and_dicts_are_state(held: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if isinstance(net.runs, tuple):
            net.runs = (net.runs[0] + 1, 1)
        else:
            net.runs[0] += 1
        return x * net.runs[0]

    net: Any = Net(forward)
    net.runs = ast.literal_eval(held)
    with pytest.raises(ModelRefused, match="keeps state from one run to the next in 'runs'"):
        to_torchscript(net.eval(), (torch.rand(2, 4),), only_trace=True)


def test_a_branch_that_changes_nothing_is_told_with_its_place() -> None:
    said: list[str] = []

    def careful(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x * 2

    to_torchscript(Net(careful).eval(), (torch.rand(2, 4),), say=said.append)
    assert len(said) == 1 and "\n" not in said[0]
    assert f"in one place (first: converting a tensor to a Python boolean, {__file__}:" in said[0]
    assert "--script" in said[0]


def test_nothing_is_told_of_what_torchs_own_layers_check() -> None:
    said: list[str] = []
    layer = nn.LSTM(4, 8, batch_first=True).eval()
    to_torchscript(layer, (torch.rand(2, 3, 4),), say=said.append)
    assert said == []


class Attending(nn.Module):
    """Returns the weights of its attention, too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)


def test_nothing_is_told_of_what_opened_attention_reads() -> None:
    said: list[str] = []
    example = (torch.rand(2, 3, 8),)
    opened = open_attention(Attending().eval(), example)
    assert opened.attentions == 1
    to_torchscript(opened.module, example, say=said.append)
    assert said == []


def test_an_input_that_only_set_a_constant_is_refused() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            if hidden.numel() != 1 or float(hidden) != 3.0:
                raise ValueError("the only value it takes")
            return x * float(hidden)

    with pytest.raises(ModelRefused, match="took the input 'hidden' for a constant"):
        to_torchscript(Scaled().eval(), (torch.rand(2, 4), torch.tensor([3.0])), only_trace=True)


class Branching(nn.Module):
    """Takes another branch for other values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 0:
            return x
        return -10 * x


class Counting(nn.Module):
    """A loop over the rows of an input: its trace has as many steps as the example, and fails for others."""

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        for _ in range(int(times.max())):
            x = torch.tanh(x)
        return x


@pytest.mark.parametrize(
    ("module", "example", "other"),
    [
        (Branching(), (torch.rand(2, 4),), (-torch.rand(2, 4),)),
        (Counting(), (torch.rand(2, 4), torch.tensor([2, 2])), (torch.rand(2, 4), torch.tensor([5, 5]))),
    ],
)
def test_the_source_is_compiled_where_tracing_fails_and_that_is_told(
    module: nn.Module, example: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]
) -> None:
    said: list[str] = []
    made = to_torchscript(module.eval(), example, say=said.append)
    assert torch.equal(made(*other), module(*other))
    assert said[-1].startswith(
        "the source was compiled, as with --script, because tracing fails: tracing kept"
    )


class Averaging(nn.Module):
    """Divides by the root of a size, which a trace fixes; shapes do not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) / math.sqrt(x.shape[1])


class Recurrent(nn.Module):
    """A loop over a size: its trace has as many steps as the example."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(state + x[:, step])
        return state


@pytest.mark.parametrize("module", [Averaging(), Recurrent()])
def test_the_source_is_compiled_where_tracing_fixes_a_size_that_varies(module: nn.Module) -> None:
    said: list[str] = []
    rows, sizes = (torch.rand(2, 6, 4),), [FreeSize("length", ((0, 1),), 6, 20)]
    made = to_torchscript(module.eval(), rows, sizes=sizes, say=said.append)
    for length in (6, 7, 20):
        x = torch.rand(3, length, 4)
        torch.testing.assert_close(made(x), module(x))
    assert "tracing fixed the size of length: the example has 6, and when it is 8" in said[-1]
    with pytest.raises(ModelRefused, match=r"fixed the size of length.*--script keeps"):
        to_torchscript(module.eval(), rows, sizes=sizes, only_trace=True)


def test_a_size_that_is_fixed_at_the_end_of_its_range_is_found() -> None:
    def cropped(x: torch.Tensor) -> torch.Tensor:
        return x[:, : min(x.shape[1], 10)].sum(1) if x.shape[1] > 10 else x.sum(1)

    rows, sizes = (torch.rand(2, 6, 4),), [FreeSize("length", ((0, 1),), 2, 20)]
    with pytest.raises(ModelRefused, match="fixed the size of length: the example has 6, and when it is 20"):
        to_torchscript(Net(cropped).eval(), rows, sizes=sizes, only_trace=True)
    to_torchscript(Net(lambda x: x.sum(1)).eval(), rows, sizes=sizes, only_trace=True)


@pytest.mark.parametrize(("limit", "size"), [(1, 1), (8, 16), (32, 64)])
def test_a_branch_by_the_batch_is_found_at_the_ends_of_its_range(limit: int, size: int) -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > limit else x * 3

    rows = (torch.rand(2, 4),)
    sizes = [batch_of(rows, (1, size if size > 1 else 64))]
    with pytest.raises(ModelRefused, match=f"the size of batch: the example has 2, and when it is {size} "):
        to_torchscript(Net(branching).eval(), rows, sizes=sizes, only_trace=True)


def test_a_model_that_the_tracer_raises_on_is_compiled_from_its_source() -> None:
    class Untraceable(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.jit.is_tracing():  # type: ignore[attr-defined]
                raise ValueError("not while tracing")
            return x * 2

    said: list[str] = []
    rows = torch.rand(2, 4)
    assert torch.equal(to_torchscript(Untraceable().eval(), (rows,), say=said.append)(rows), rows * 2)
    assert said == ["the source was compiled, as with --script, because tracing fails: not while tracing"]
    with pytest.raises(ValueError, match="not while tracing"):
        to_torchscript(Untraceable().eval(), (rows,), only_trace=True)


def test_an_input_that_the_model_ignores_is_told() -> None:
    class Ignoring(nn.Module):
        def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
            return x * 2

    said: list[str] = []
    to_torchscript(Ignoring().eval(), (torch.rand(2, 4), torch.tensor([1, 2])), say=said.append)
    assert said == ["the answer does not depend on the input 'kind', which clients must send all the same"]


class Pair(NamedTuple):
    """Two results."""

    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: {"scores": x, "found": {"place": x.argmax(1), "is_sure": x > 0}},
        lambda x: {"scores": x, "loss": None},
        lambda x: (x, None),
        lambda x: (x, {"place": x.argmax(1)}),
        lambda x: {"scores": x, "states": (x + 1, x > 0)},
        lambda x: {"second": x, "first": x > 0},
        lambda x: (x, (x + 1, x > 0)),
    ],
    ids=["dict in dict", "none in dict", "none", "dict in tuple", "tuple in dict", "two types", "tuples"],
)
def test_results_of_any_form_keep_their_names_and_order(forward: Forward) -> None:
    rows = (torch.randn(2, 4),)
    frozen = to_torchscript(Net(forward).eval(), rows)
    for (name, wanted), (other, found) in zip(run_on(forward, rows), run_on(frozen, rows), strict=True):
        assert name == other
        torch.testing.assert_close(found, wanted)


def test_tuples_with_names_stay_tuples() -> None:
    frozen = to_torchscript(Net(lambda x: Pair(x, x > 0)).eval(), (torch.randn(2, 4),))
    first, second = frozen(torch.randn(1, 4))
    assert (first.dtype, second.dtype) == (torch.float32, torch.bool)


def test_a_random_model_is_no_branching_one() -> None:
    to_torchscript(Net(lambda x: x + torch.rand_like(x)).eval(), (torch.rand(2, 4),))


def test_a_model_that_changes_its_input_is_traced_on_a_copy() -> None:
    rows = torch.rand(2, 4)
    before = rows.clone()
    to_torchscript(Net(lambda x: x.sub_(5)).eval(), (rows,))
    assert torch.equal(rows, before)


def test_packed_with_its_signature(pack: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(
        "import torch\n\n\nclass Nested(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return {'z': x * 2, 'a': {'c': x.argmax(1), 'b': x > 0}, 'n': None}\n"
    )
    torch.save(torch.rand(2, 4), tmp_path / "x.pt")
    archive = pack(
        model_file=tmp_path / "nested.py", model_format="torchscript", example=tmp_path / "x.pt", verify=True
    )
    outputs = parse(open_archive(archive).read_text("signature.json")).outputs
    assert [(spec.name, spec.datatype) for spec in outputs] == [
        ("z", "FP32"),
        ("a.c", "INT64"),
        ("a.b", "BOOL"),
    ]


class Sentences(nn.Module):
    """An encoder of torch's, which leaves out padding at the end of rows."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.encoder(x, src_key_padding_mask=padded)
        return answer


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_traced_encoder_is_right_wherever_the_padding_is() -> None:
    torch.manual_seed(0)
    model = Sentences().eval().requires_grad_(False)
    behind = torch.tensor([[False, False, False, False], [False, False, True, True]])
    traced = to_torchscript(model, (torch.randn(2, 4, 8), behind))
    assert type(model.encoder) is nn.TransformerEncoder
    for padded in (behind, behind.flip(1), behind.roll(1, 1), torch.zeros_like(behind)):
        x = torch.randn(2, 4, 8)
        rows = [model(x[row : row + 1], padded[row : row + 1]) for row in range(2)]
        torch.testing.assert_close(traced(x, padded), torch.cat(rows))


class WithToken(nn.Module):
    """Puts a token before each row, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.ones(1, 1, 4)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def exported(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Any:
    return to_program(module, example, [batch_of(example, (1, 8))]).module()


@pytest.mark.parametrize(
    "made",
    [to_torchscript, exported, lambda *given: fold(*given).module],
    ids=["traced", "exported", "graph"],
)
def test_a_batch_that_the_code_takes_by_len_stays_free(made: Callable[..., Any]) -> None:
    module = WithToken().eval()
    found = made(module, (torch.rand(2, 5, 4),))
    rows = torch.rand(3, 5, 4)
    with torch.no_grad():
        torch.testing.assert_close(found(rows), module(rows))
    assert len is module.forward.__globals__.get("len", len)


class Detach(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("between", [(), (Detach(),)])
@pytest.mark.parametrize(
    ("norm", "shape", "folded"),
    [
        (nn.BatchNorm1d(6), (3, 8), True),
        (nn.BatchNorm1d(6), (3, 6, 8), False),
        (nn.BatchNorm2d(6), (3, 6, 4, 8), False),
        (nn.BatchNorm3d(6), (3, 6, 2, 4, 8), False),
    ],
)
def test_normalisation_is_folded_into_a_linear_layer_where_it_takes_rows(
    norm: Any, shape: tuple[int, ...], folded: bool, between: tuple[nn.Module, ...], script: bool
) -> None:
    norm.running_mean = torch.linspace(-1, 1, 6)
    example = torch.rand(shape)
    net = nn.Sequential(nn.Linear(8, 6), *between, norm).eval()
    made = to_torchscript(net, (example,), script=script)
    assert ("aten::batch_norm" not in str(made.graph)) is folded
    assert torch.allclose(made(example), net(example), atol=1e-5)


class Keeping(nn.Module):
    """Makes a tensor in its first run, and writes into it in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
        self.kept: Any = torch.jit.Attribute({}, dict[str, torch.Tensor])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "sum" not in self.kept:
            self.kept["sum"] = torch.zeros(6)
        return self.layers(x) + self.kept["sum"].mul_(0.5)


def test_a_module_that_keeps_tensors_runs_behind_the_look_at_its_normalisations() -> None:
    net, example = torch.jit.script(Keeping().eval()), torch.rand(3, 8)
    made = to_torchscript(net, (example,))
    with torch.no_grad():
        assert torch.allclose(made(example), net(example), atol=1e-5)


class Residual(nn.Module):
    """Adds a linear layer's output to its normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.norm.running_mean = torch.linspace(-1, 1, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.norm(y).relu() + y


@pytest.mark.parametrize("script", [False, True])
def test_normalisation_is_not_folded_into_a_linear_layer_that_others_read(script: bool) -> None:
    net, example = Residual().eval(), torch.rand(3, 8)
    made = to_torchscript(net, (example,), script=script)
    assert "aten::batch_norm" in str(made.graph)
    assert torch.allclose(made(example), net(example), atol=1e-5)


@pytest.mark.parametrize("script", [False, True])
def test_normalised_pictures_do_not_keep_it_from_being_folded_into_a_linear_layer(script: bool) -> None:
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(4, 6), nn.BatchNorm1d(6)),
    ).eval()
    made = to_torchscript(net, (torch.rand(2, 3, 8, 8),), script=script)
    assert str(made.graph).count("aten::batch_norm") == 1  # the one of the pictures, behind a ReLU


class Rounded(nn.Module):
    """Computes in bfloat16, with an operator that TorchScript splits into two."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 16) / 5)
        self.bias = nn.Parameter(torch.randn(16) / 10)
        self.bfloat16()
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x.bfloat16(), self.weight).float()
        return y * 2 if self.branches and x.sum() > 10 else y


def test_a_trace_of_bfloat16_may_round_otherwise() -> None:
    torch.manual_seed(0)
    example = torch.randn(3, 8)
    assert to_torchscript(Rounded(False).eval(), (example,), only_trace=True)(example).dtype is torch.float32
    with pytest.raises(ModelRefused, match="tracing kept the branches"):
        to_torchscript(Rounded(True).eval(), (example,), only_trace=True)
