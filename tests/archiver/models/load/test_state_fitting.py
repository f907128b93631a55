"""Which of the weights in a file are a model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.checkpoint import read_weights
from torchere.archiver.models.load.fitting import fitted, load_into

ZERO = torch.zeros(1)


def zeros(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1) for name in names}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = torch.nn.Embedding(5, 3)
        self.o = torch.nn.Linear(3, 5, bias=False)
        self.o.weight = self.e.weight


def test_weights_of_another_model_are_refused_with_their_names() -> None:
    with pytest.raises(ModelRefused, match="missing b; unexpected c"):
        fitted(zeros("a", "c"), zeros("a", "b"), Path("w.pt"))


def test_a_prefix_and_what_is_beside_it_are_taken_off() -> None:
    state = zeros("model._orig_mod.a.w", "model._orig_mod.b", "loss.w")
    assert sorted(fitted(state, zeros("a.w", "b"), Path("w.pt"))) == ["a.w", "b"]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_that_the_model_lacks_are_no_prefix(prefix: str) -> None:
    state = zeros(f"{prefix}a.w", f"{prefix}b", f"{prefix}extra.w", "loss.w" if prefix else f"{prefix}c")
    with pytest.raises(ModelRefused, match=r"missing none; unexpected (c, )?extra\.w$"):
        fitted(state, zeros("a.w", "b"), Path("w.pt"))


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("kept", ["e.weight", "o.weight"])
def test_of_weights_that_the_model_shares_one_name_is_enough(tmp_path: Path, kept: str, prefix: str) -> None:
    path, module = tmp_path / "tied.pth", Tied()
    torch.save({prefix + kept: torch.full((5, 3), 2.0)}, path)
    load_into(module, read_weights(path), path)
    assert module.o.weight is module.e.weight
    assert torch.equal(module.e.weight, torch.full((5, 3), 2.0))


def test_equal_weights_that_are_not_shared_are_all_needed(tmp_path: Path) -> None:
    module = Tied()
    module.o.weight = torch.nn.Parameter(module.e.weight.detach().clone())
    with pytest.raises(ModelRefused, match=r"missing o\.weight"):
        fitted({"e.weight": module.e.weight}, module.state_dict(), Path("w.pt"))


def test_complex_weights_are_not_cut_to_real_ones() -> None:
    with pytest.raises(ModelRefused, match=r"a is torch\.complex64, and the model's is torch\.float32"):
        fitted({"a": ZERO.to(torch.complex64)}, {"a": ZERO}, Path("w.pt"))
    assert fitted({"a": ZERO.to(torch.complex64)}, {"a": ZERO.to(torch.complex64)}, Path("w.pt"))


def test_an_empty_state_dict_is_that_of_a_model_without_parameters(tmp_path: Path) -> None:
    path = tmp_path / "empty.pth"
    torch.save({}, path)
    load_into(torch.nn.ReLU(), read_weights(path), path)
    with pytest.raises(ModelRefused, match="missing bias, weight"):
        load_into(torch.nn.Linear(1, 1), read_weights(path), path)
    torch.save({"state_dict": {}, "model": zeros("a")}, path)
    assert read_weights(path).states == {"model": zeros("a")}
