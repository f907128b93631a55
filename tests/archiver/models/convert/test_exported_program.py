"""Exported programs as files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.aotinductor import compile_aoti
from torchere.archiver.models.convert.exported_program import save_program, to_program
from torchere.archiver.models.convert.files import changes_inputs, needed_isa
from torchere.archiver.models.inputs.sizes import FreeSize, batch_of


def exported() -> torch.export.ExportedProgram:
    """A program of a graph that was traced before, as one with folded layers is."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    graph = fx.Interpreter(fx.symbolic_trace(layers))
    traced = torch.fx.experimental.proxy_tensor.make_fx(graph.run)(torch.ones(1, 3, 8, 8))
    return to_program(traced.eval(), (torch.ones(1, 3, 8, 8),), [])


def test_the_same_model_is_the_same_file_wherever_its_graph_lies_in_memory(tmp_path: Path) -> None:
    programs = [exported(), exported()]  # both alive, and so at two places
    contents = []
    for program in programs:
        save_program(program, tmp_path / "model.pt2")
        contents.append((tmp_path / "model.pt2").read_bytes())
    assert contents[0] == contents[1]


class Last(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer = kind(4, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


class Translator(nn.Module):
    """Torch's transformer with a mask that it looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.layers(x, x, tgt_mask=later)


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch.export
LENGTH = FreeSize("length", ((0, 1),), 2, 50)


@pytest.mark.parametrize(
    ("module", "width"),
    [(Last(nn.LSTM), 4), (Last(nn.GRU), 4), (Translator(), 8)],
    ids=["lstm", "gru", "mask"],
)
def test_recurrent_layers_and_torchs_transformer_keep_their_lengths_free(
    module: nn.Module, width: int
) -> None:
    module.eval()
    example = (torch.rand(2, 7, width),)
    with torch.no_grad():
        module(*example)  # torch keeps what it chose for a layer
        found = to_program(module, example, [batch_of(example, (1, 8)), LENGTH]).module()
        rows = torch.rand(3, 12, width)
        torch.testing.assert_close(found(rows), module(rows))


def test_a_torch_without_loops_for_recurrent_layers_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.export._patches", raising=False)  # as with torch 2.10
    monkeypatch.setitem(sys.modules, "torch.export._patches", None)
    monkeypatch.delitem(sys.modules, "torchere.archiver.models.convert.exported_program")
    module = importlib.import_module("torchere.archiver.models.convert.exported_program")
    example = torch.ones(2, 4)
    layer = nn.Linear(4, 3).eval()
    assert torch.equal(module.to_program(layer, (example,), []).module()(example), layer(example))


def test_a_gru_of_a_free_length_is_not_compiled(tmp_path: Path) -> None:
    example = (torch.rand(2, 7, 4),)
    program = to_program(Last(nn.GRU).eval(), example, [LENGTH])
    with pytest.raises(ModelRefused, match="take --format export or torchscript"):
        compile_aoti(program, tmp_path / "net.pt2", None, lambda _line: None)


def test_code_without_small_whole_numbers_needs_no_vnni() -> None:
    rows = torch.rand(2, 4)
    plain = to_program(torch.nn.Linear(4, 2).eval(), (rows,), [])

    class Small(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.int8).float()

    small = to_program(Small(), (rows,), [])
    assert needed_isa("avx512 avx512_vnni", plain) == "avx512"
    assert needed_isa("avx512 avx512_vnni", small) == "avx512 avx512_vnni"
    assert needed_isa("avx2", plain) == "avx2"


def test_a_model_that_writes_into_its_inputs_is_noticed() -> None:
    rows = (torch.rand(2, 4), torch.ones(2))
    assert changes_inputs(lambda x, y: x.add_(1), rows)
    assert changes_inputs(lambda x, y: y.mul_(2), rows)
    assert not changes_inputs(lambda x, y: x + y.sum(), rows)
    assert torch.equal(rows[1], torch.ones(2))


def test_an_example_of_one_step_keeps_its_multiples_free() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Upsample(scale_factor=2)
    ).eval()
    example = (torch.rand(2, 3, 32, 32),)
    sizes = [FreeSize("height", ((0, 2),), 32, 256, 32), FreeSize("width", ((0, 3),), 32, 256, 32)]
    found = to_program(module, example, sizes).module()
    rows = torch.rand(2, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(found(rows), module(rows))


class Remembering(nn.Module):
    """Begins with the state that the last run left in an attribute: a tensor, or a tuple of them."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer, self.hidden = kind(4, 6), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, self.hidden = self.layer(x, self.hidden)
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_state_that_a_program_would_lose_is_refused(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    module = Remembering(kind).eval()
    with pytest.raises(ModelRefused, match=r"in 'hidden', .* an exported program keeps the value of packing"):
        to_program(module, (torch.rand(1, 5, 4),), [])
    assert module.hidden is None


class Counting(nn.Module):
    """Keeps state in a buffer, to which it assigns, and makes a table that each run makes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: torch.Tensor
        self.register_buffer("runs", torch.zeros(()))
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs = self.runs + 1
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(4.0)
        return x * self.runs + torch.arange(4.0)


def test_state_in_a_buffer_is_kept() -> None:
    found = to_program(Counting().eval(), (torch.ones(2, 4),), []).module()
    answers = [found(torch.ones(2, 4))[0, 0].item() for _ in range(2)]
    assert answers == [1, 2]


class Numbering(nn.Module):
    """Multiplies by the number of its runs, which it keeps in a tuple, a list or a dict."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"tuple": (0, "runs"), "list": [[0]], "dict": {"runs": 0}}
        self.state = kinds[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.state, tuple):
            self.state = (self.state[0] + 1, "runs")
            return x * self.state[0]
        held, at = (self.state, "runs") if isinstance(self.state, dict) else (self.state[0], 0)
        held[at] += 1
        return x * held[at]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_numbers_that_a_program_would_lose_are_refused(kind: str) -> None:
    with pytest.raises(ModelRefused, match=r"in 'state', .* an exported program keeps the value of packing"):
        to_program(Numbering(kind).eval(), (torch.rand(2, 4),), [])


class Caching(nn.Module):
    """Keeps a table that grows with the length of its inputs."""

    added: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"dict": {}, "list": [], "dicts": [{}, {}], "attribute": None}
        self.kind, self.held = kind, kinds[kind]

    def table(self, length: int) -> torch.Tensor:
        return torch.arange(length, dtype=torch.float32)[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.kind == "list":
            if not self.held or len(self.held[-1]) < length:
                self.held.append(self.table(length))
            return x + self.held[-1][:length]
        if self.kind == "attribute":
            if not hasattr(self, "added") or len(self.added) < length:
                self.added = self.table(length)
            return x + self.added[:length]
        held = self.held[1] if self.kind == "dicts" else self.held
        if "table" not in held or len(held["table"]) < length:
            held["table"] = self.table(length)
        return x + held["table"][:length]


@pytest.mark.parametrize("kind", ["dict", "list", "dicts", "attribute"])
def test_a_table_that_grows_keeps_the_length_free(kind: str) -> None:
    module = Caching(kind).eval()
    found = to_program(module, (torch.rand(1, 6, 4),), [LENGTH]).module()
    assert module.held == Caching(kind).held
    assert not hasattr(module, "added")
    for length in (4, 20):
        rows = torch.rand(1, length, 4)
        assert torch.equal(found(rows), module(rows))


def test_a_free_size_may_have_a_name_that_is_no_identifier() -> None:
    sizes = [FreeSize("1.scores_0", ((0, 0),), 2, 8), FreeSize("1.scores_1", ((0, 1),), 2, 8, 2)]
    program = to_program(nn.ReLU(), (torch.ones(3, 4),), sizes)
    assert program.module()(torch.ones(5, 6)).shape == (5, 6)
