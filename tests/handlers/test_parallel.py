"""A rank's part of an archive's weights: what it reads, and how much memory that takes. Ranks are forked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from torchere.archiver.models.spread import join
from torchere.archiver.models.spread.trial import in_ranks
from torchere.archiver.split import Split
from torchere.handlers.archive_import import archive_at
from torchere.handlers.loading.parallel import load_part

CPU = torch.device("cpu")
MB = 1_000_000
WIDE = """
import torch

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(16))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)
        self.counted = COUNTED

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale[0] + self.counted


def Layer():
    return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of 134 MB, with its weights in safetensors and as torch.save writes them."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "wide.py").write_text(WIDE.replace("COUNTED", "0"))
    (folder / "computing.py").write_text(WIDE.replace("COUNTED", "float(self.layers[0][0].weight.sum()) * 0"))
    space: dict[str, Any] = {}
    exec(WIDE.replace("COUNTED", "0"), space)
    torch.manual_seed(1)
    state = space["Wide"]().state_dict()
    save_file(state, folder / "w.safetensors")
    torch.save(state, folder / "w.pth")
    return folder


def row() -> torch.Tensor:
    return torch.linspace(-1, 1, 512).reshape(1, -1)


def whole_answer(folder: Path) -> list[float]:
    def work(_rank: int) -> list[float]:
        with torch.inference_mode():
            weights = str(folder / "w.pth")
            split = Split(tensor=1)
            found: list[float] = load_part(archive_at(str(folder)), "wide.py", weights, split, CPU)(
                row()
            ).tolist()
            return found

    return in_ranks(1, work)[0]


class Peak:
    """The largest PSS of this process in the block, above that at its begin."""

    def __enter__(self) -> Peak:
        self._process, self._ended = psutil.Process(), threading.Event()
        self._before = self._pss()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, self._pss() - self._before)

    def _pss(self) -> int:
        return int(self._process.memory_full_info().pss)


@pytest.mark.parametrize("weights", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("split", [Split(tensor=2), Split(pipeline=2), Split(tensor=2, pipeline=2)])
def test_a_rank_reads_its_own_part_and_never_holds_more(folder: Path, split: Split, weights: str) -> None:
    wanted = torch.tensor(whole_answer(folder))

    def work(_rank: int) -> tuple[int, float]:
        archive = archive_at(str(folder))
        with torch.inference_mode():
            join(split, CPU)  # what torch takes for its groups is not the model's
            with Peak() as peak:
                model = load_part(archive, "wide.py", str(folder / weights), split, CPU)
            found = model(row())
            return peak.bytes, (found - wanted).abs().max().item()

    size = (folder / weights).stat().st_size
    assert size > 100 * MB
    for peak_bytes, difference in in_ranks(split.ranks, work):
        assert difference <= 1e-4
        # A half or a quarter is its share; the rest is noise: fewer that share a page count more of it each.
        assert peak_bytes <= (0.7 if split.ranks == 2 else 0.45) * size


def test_a_small_file_that_is_read_and_not_mapped_keeps_its_weights(tmp_path: Path) -> None:
    source = WIDE.replace("COUNTED", "0").replace("2048", "64")
    (tmp_path / "wide.py").write_text(source.replace("range(16)", "range(2)"))
    space: dict[str, Any] = {}
    exec((tmp_path / "wide.py").read_text(), space)
    torch.manual_seed(1)
    model = space["Wide"]()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    assert (tmp_path / "w.pth").stat().st_size < 2**20
    wanted = model(row()).detach()

    def work(_rank: int) -> float:
        with torch.inference_mode():
            weights = str(tmp_path / "w.pth")
            part = load_part(archive_at(str(tmp_path)), "wide.py", weights, Split(tensor=2), CPU)
            difference: float = (part(row()) - wanted).abs().max().item()
            return difference

    assert max(in_ranks(2, work)) <= 1e-4


def test_a_class_that_computes_with_its_weights_is_made_with_them(folder: Path) -> None:
    wanted = torch.tensor(whole_answer(folder))

    def work(_rank: int) -> float:
        with torch.inference_mode():
            weights = str(folder / "w.safetensors")
            model = load_part(archive_at(str(folder)), "computing.py", weights, Split(tensor=2), CPU)
            return (model(row()) - wanted).abs().max().item()

    assert max(in_ranks(2, work)) <= 1e-4
