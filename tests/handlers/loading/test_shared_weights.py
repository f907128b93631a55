"""Which file the loaders map: the one that versions share, unless the handler has put another there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchere.handlers.archive_import import ArchiveModules, forget_archive, open_archive
from torchere.handlers.loading.eager import load_eager
from torchere.handlers.loading.torchscript import load_torchscript
from torchere.handlers.loading.weights import file_to_map, shared_file

MODEL = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(600, 600)
"""


@pytest.fixture
def archive(write_archive: Callable[..., Path]) -> Iterator[ArchiveModules]:
    directory = str(write_archive({"model.py": MODEL}))
    yield open_archive("shares", "1.0", directory)
    forget_archive(directory)


def share(path: Path) -> Path:
    """Put a file with the same bytes where the server puts what versions share."""
    shared = Path(shared_file(str(path)))
    shared.parent.mkdir()
    shared.write_bytes(path.read_bytes())
    changed_ns = path.stat().st_mtime_ns
    os.utime(shared, ns=(changed_ns, changed_ns))
    return shared


def mapped_file(tensor: torch.Tensor) -> str:
    """The file whose page a tensor begins in; "" when it is on the heap."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *facts = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return facts[4] if len(facts) > 4 else ""
    raise AssertionError("the tensor is nowhere")


@pytest.fixture
def weights(archive: ArchiveModules) -> Path:
    path = Path(archive.model_dir, "w.pth")
    torch.save(torch.nn.Linear(600, 600).state_dict(), path)
    return path


def test_weights_that_nobody_shares_are_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"weights")
    assert file_to_map(str(tmp_path / "w.pt")) == str(tmp_path / "w.pt")


def test_a_state_dict_is_mapped_from_the_shared_file(archive: ArchiveModules, weights: Path) -> None:
    shared = share(weights)
    model = load_eager(archive, "model.py", str(weights))
    assert mapped_file(model.get_parameter("weight")) == str(shared)


def test_torchscript_is_mapped_from_the_shared_file(tmp_path: Path) -> None:
    path = tmp_path / "model" / "w.pt"
    path.parent.mkdir()
    torch.jit.save(torch.jit.script(torch.nn.Linear(600, 600).eval()), path)
    shared = share(path)
    module = load_torchscript(str(path), "cpu")
    assert mapped_file(module.weight) == str(shared)


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_weights_that_the_handler_has_changed_are_its_own(
    archive: ArchiveModules, weights: Path, how: str
) -> None:
    share(weights)
    changed = torch.nn.Linear(600, 600).state_dict()
    place = weights if how == "written to" else weights.with_name("new")
    torch.save(changed, place)
    os.replace(place, weights)
    model = load_eager(archive, "model.py", str(weights))
    assert torch.equal(model.get_parameter("weight"), changed["weight"])
    assert mapped_file(model.get_parameter("weight")) == str(weights)
