from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torchere.handlers.archive_import import ArchiveModules, forget_archive, open_archive
from torchere.handlers.loading.eager import load_eager

MODEL = """
import torch
from shapes import FEATURES

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, 1)
"""

MORE = """
class Config:
    width = 4

Model = Net
"""


@pytest.fixture
def archive(write_archive: Callable[..., Path]) -> Iterator[ArchiveModules]:
    directory = write_archive(
        {
            "model.py": MODEL,
            "shapes.py": "FEATURES = 3",
            "two.py": MODEL + "class B(Net): pass",
            "more.py": MODEL + MORE,
        }
    )
    yield open_archive("eager", "1.0", str(directory))
    forget_archive(str(directory))


def test_the_class_gets_the_weights_of_the_state_dict(archive: ArchiveModules, tmp_path: Path) -> None:
    weights = {"weight": torch.tensor([[1.0, 2.0, 3.0]]), "bias": torch.zeros(1)}
    torch.save(weights, tmp_path / "w.pth")
    model = load_eager(archive, "model.py", str(tmp_path / "w.pth"))
    assert model(torch.ones(1, 3)).tolist() == [[6.0]]


def test_without_a_file_the_class_keeps_its_own_weights(archive: ArchiveModules) -> None:
    assert load_eager(archive, "model.py", None)(torch.ones(1, 3)).shape == (1, 1)


def test_a_missing_model_file_is_reported(archive: ArchiveModules) -> None:
    with pytest.raises(RuntimeError, match=r"Missing the model\.py file: the manifest names net\.py"):
        load_eager(archive, "net.py", None)


def test_two_models_in_the_model_file_are_refused(archive: ArchiveModules) -> None:
    with pytest.raises(ValueError, match="Expected only one class as model definition"):
        load_eager(archive, "two.py", None)


def test_other_classes_and_a_second_name_beside_the_model_do_not_matter(archive: ArchiveModules) -> None:
    assert load_eager(archive, "more.py", None)(torch.ones(1, 3)).shape == (1, 1)


def test_a_pickle_with_code_is_not_run(archive: ArchiveModules, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (marker,)

    torch.save({"weight": Bomb()}, tmp_path / "w.pth")
    with pytest.raises(RuntimeError, match="holds more than tensors") as caught:
        load_eager(archive, "model.py", str(tmp_path / "w.pth"))
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:.*TorchScript archive:UserWarning")
def test_torchscript_with_a_model_file_is_refused_with_what_to_do(
    archive: ArchiveModules, tmp_path: Path
) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    with pytest.raises(RuntimeError, match="is TorchScript, which brings its own code; pack it without"):
        load_eager(archive, "model.py", str(tmp_path / "script.pt"))


def test_weights_that_are_no_dict_are_refused(archive: ArchiveModules, tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "w.pth")
    with pytest.raises(RuntimeError, match="holds a Tensor; expected a state_dict"):
        load_eager(archive, "model.py", str(tmp_path / "w.pth"))


def test_a_class_of_an_archive_can_be_scripted_and_compiled(archive: ArchiveModules) -> None:
    model = load_eager(archive, "model.py", None).eval()
    row = torch.ones(1, 3)
    expected = model(row).tolist()
    assert torch.jit.script(model)(row).tolist() == expected
    assert torch.compile(model, backend="eager")(row).tolist() == expected


WIDE = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(600, 600)
"""


@pytest.fixture
def wide_archive(write_archive: Callable[..., Path]) -> Iterator[ArchiveModules]:
    directory = str(write_archive({"model.py": WIDE}))
    yield open_archive("wide", "1.0", directory)
    forget_archive(directory)


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    spans = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
    return any(low <= tensor.data_ptr() < high for low, high in spans)


def test_large_weights_are_mapped_where_they_lie(wide_archive: ArchiveModules, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    weights = torch.nn.Linear(600, 600).state_dict()
    torch.save(weights, path)
    model = load_eager(wide_archive, "model.py", str(path))
    assert all(is_mapped(tensor, path) for tensor in model.state_dict().values())
    assert torch.equal(model.get_parameter("weight"), weights["weight"])


HOLDERS = """
import torch
from functools import partial
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(600, 600)
        self.tied = nn.Linear(600, 600, bias=False)
        self.tied.weight = self.names.weight
        self.head = partial(nn.functional.linear, weight=self.names.weight)
        self.gate, self.bias = nn.Parameter(torch.rand(4, 600)), nn.Parameter(torch.rand(4))
        self.gates = {"open": (self.gate, self.bias)}
        self.norm = nn.BatchNorm1d(4)
        self.rows = [self.norm.running_mean]

    def forward(self, ids):
        found = self.tied(self.names(ids)) + self.head(self.names(ids))
        (weight, bias), = self.gates.values()
        return self.norm(nn.functional.linear(found, weight, bias)) + self.rows[0]
"""
VIEWING = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(600, 600)
        self.views = {"first": [self.weight.detach()[:4]]}

    def forward(self, x):
        return torch.nn.functional.linear(x, self.views["first"][0])
"""
VIEWING_FROM_AFAR = """
import numpy
import torch
from functools import partial
from torch.nn.functional import linear

class Table:
    def __init__(self, rows):
        self.rows = rows

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(600, 600, bias=False)
        self.array = numpy.zeros(600, dtype="float32")
        self.bias = torch.nn.Parameter(torch.from_numpy(self.array))
        turned = self.weight.t()
        self.ways = [CHOSEN]

    def forward(self, x):
        return self.ways[0](x)
"""
VIEWS = [
    "partial(linear, weight=self.weight.detach())",
    "lambda x: x @ turned",
    "lambda x, table=Table(self.weight.data.view(600, 600)): linear(x, table.rows)",
    "lambda x: x + torch.from_numpy(self.array)",
]
HOOKED = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(600, 600)
        self.register_load_state_dict_pre_hook(self.turned)

    def turned(self, module, state, prefix, *rest):
        state["weight"] = state["weight"].t()
"""


@pytest.mark.parametrize(
    ("source", "mapped"),
    [
        (HOLDERS, True),
        (VIEWING, False),
        *((VIEWING_FROM_AFAR.replace("CHOSEN", view), False) for view in VIEWS),
        (HOOKED, False),
    ],
)
def test_each_reference_to_a_weight_sees_the_file(
    write_archive: Callable[..., Path], tmp_path: Path, source: str, mapped: bool
) -> None:
    definition: dict[str, Any] = {"__name__": "packing"}
    exec(source, definition)
    trained = definition["Net"]().eval()
    for name, tensor in trained.state_dict().items():
        if name.startswith("norm.running"):
            tensor.uniform_(1, 2)
    path = tmp_path / "w.pth"
    torch.save(trained.state_dict(), path)
    copied = definition["Net"]().eval()
    copied.load_state_dict(torch.load(path))
    directory = str(write_archive({"model.py": source}))
    model = load_eager(open_archive("holders", "1.0", directory), "model.py", str(path)).eval()
    forget_archive(directory)
    given = torch.arange(4) if mapped else torch.rand(4, 600)
    assert torch.equal(model(given), copied(given))
    assert len(list(model.parameters())) == len(list(trained.parameters()))
    assert all(is_mapped(tensor, path) for tensor in model.state_dict().values()) == mapped


LAYERS = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(600, 600), nn.LSTM(4, 4), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 1))
        self.register_buffer("ruler", torch.zeros(8).view(2, 4))
"""


@pytest.mark.parametrize("counts_owners", [True, False])
def test_only_tensors_that_may_share_their_memory_are_copied(
    write_archive: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts_owners: bool
) -> None:
    if not counts_owners:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    directory = str(write_archive({"model.py": LAYERS}))
    modules = open_archive("layers", "1.0", directory)
    path = tmp_path / "w.pth"
    weights = load_eager(modules, "model.py", None).state_dict()
    weights["ruler"].fill_(7)
    torch.save(weights, path)
    loaded = load_eager(modules, "model.py", str(path)).state_dict()
    forget_archive(directory)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    mapped = {name for name in loaded if is_mapped(loaded[name], path)}
    assert mapped == (loaded.keys() - {"ruler"} if counts_owners else set())


EXPANDED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        ones = torch.ones(2, 1)
        self.register_buffer("scale", ones.expand(2, 3))
        self.views = [ones]
"""


@pytest.mark.parametrize("stored", [torch.Tensor.clone, torch.Tensor.contiguous])
def test_an_expanded_buffer_gets_the_values_that_it_has_room_for(
    write_archive: Callable[..., Path], tmp_path: Path, stored: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    directory = str(write_archive({"model.py": EXPANDED}))
    modules = open_archive("expanded", "1.0", directory)
    path, values = str(tmp_path / "w.pth"), torch.tensor([[3.0], [5.0]])
    torch.save({"scale": stored(values.expand(2, 3))}, path)
    model: Any = load_eager(modules, "model.py", path)
    assert torch.equal(model.scale, values.expand(2, 3))
    assert torch.equal(model.views[0], values)
    torch.save({"scale": torch.arange(6.0).view(2, 3)}, path)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        load_eager(modules, "model.py", path)
    forget_archive(directory)


def test_large_weights_of_another_type_are_converted(wide_archive: ArchiveModules, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    weights = torch.nn.Linear(600, 600).double().state_dict()
    torch.save(weights, path)
    model = load_eager(wide_archive, "model.py", str(path))
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.get_parameter("weight"), weights["weight"].float())


def test_large_weights_in_the_format_before_1_6_are_loaded(
    wide_archive: ArchiveModules, tmp_path: Path
) -> None:
    weights = torch.nn.Linear(600, 600).state_dict()
    torch.save(weights, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    model = load_eager(wide_archive, "model.py", str(tmp_path / "w.pth"))
    assert torch.equal(model.get_parameter("weight"), weights["weight"])


def test_safetensors_are_loaded(archive: ArchiveModules, tmp_path: Path) -> None:
    header = json.dumps(
        {
            "weight": {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12]},
            "bias": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
        }
    ).encode()
    numbers = struct.pack("<4f", 1.0, 2.0, 3.0, 0.5)
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + numbers)
    model = load_eager(archive, "model.py", str(tmp_path / "w.safetensors"))
    assert model(torch.ones(1, 3)).tolist() == [[6.5]]


def test_safetensors_that_versions_share_are_mapped_from_the_shared_file(
    archive: ArchiveModules, tmp_path: Path
) -> None:
    folder = tmp_path / "version"
    shared = tmp_path / "version.shared"
    for place, value in ((folder, 1.0), (shared, 2.0)):
        place.mkdir()
        path = place / "w.safetensors"
        save_file({"weight": torch.full((1, 3), value), "bias": torch.zeros(1)}, path)
        os.utime(path, (0, 0))
    model = load_eager(archive, "model.py", str(folder / "w.safetensors"))
    assert model.get_parameter("weight").tolist() == [[2.0, 2.0, 2.0]]


def test_damaged_safetensors_are_refused(archive: ArchiveModules, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(RuntimeError, match="damaged safetensors"):
        load_eager(archive, "model.py", str(tmp_path / "w.safetensors"))
