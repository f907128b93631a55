from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchere.handlers.archive_import import ArchiveModules, forget_archive, open_archive
from torchere.handlers.eager import load_eager

MODEL = """
import torch
from shapes import FEATURES

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, 1)
"""


@pytest.fixture
def archive(write_archive: Callable[..., Path]) -> Iterator[ArchiveModules]:
    directory = write_archive(
        {"model.py": MODEL, "shapes.py": "FEATURES = 3", "two.py": MODEL + "class B: pass"}
    )
    yield open_archive("eager", "1.0", str(directory))
    forget_archive("eager", "1.0")


def test_the_class_gets_the_weights_of_the_state_dict(archive: ArchiveModules, tmp_path: Path) -> None:
    weights = {"weight": torch.tensor([[1.0, 2.0, 3.0]]), "bias": torch.zeros(1)}
    torch.save(weights, tmp_path / "w.pth")
    model = load_eager(archive, "model.py", str(tmp_path / "w.pth"), "cpu")
    assert model(torch.ones(1, 3)).tolist() == [[6.0]]


def test_without_a_file_the_class_keeps_its_own_weights(archive: ArchiveModules) -> None:
    assert load_eager(archive, "model.py", None, "cpu")(torch.ones(1, 3)).shape == (1, 1)


def test_a_missing_model_file_is_reported(archive: ArchiveModules) -> None:
    with pytest.raises(RuntimeError, match=r"Missing the model\.py file: the manifest names net\.py"):
        load_eager(archive, "net.py", None, "cpu")


def test_two_classes_in_the_model_file_are_refused(archive: ArchiveModules) -> None:
    with pytest.raises(ValueError, match="Expected only one class as model definition"):
        load_eager(archive, "two.py", None, "cpu")


def test_a_pickle_with_code_is_not_run(archive: ArchiveModules, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (marker,)

    torch.save({"weight": Bomb()}, tmp_path / "w.pth")
    with pytest.raises(RuntimeError, match="holds more than tensors") as caught:
        load_eager(archive, "model.py", str(tmp_path / "w.pth"), "cpu")
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not marker.exists()


def test_weights_that_are_no_dict_are_refused(archive: ArchiveModules, tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "w.pth")
    with pytest.raises(RuntimeError, match="holds a Tensor; expected a state_dict"):
        load_eager(archive, "model.py", str(tmp_path / "w.pth"), "cpu")


def test_a_class_of_an_archive_can_be_scripted_and_compiled(archive: ArchiveModules) -> None:
    model = load_eager(archive, "model.py", None, "cpu").eval()
    row = torch.ones(1, 3)
    expected = model(row).tolist()
    assert torch.jit.script(model)(row).tolist() == expected
    assert torch.compile(model, backend="eager")(row).tolist() == expected
