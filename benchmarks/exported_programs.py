"""How fast small exported programs run as a server runs them, beside eager mode and compiled forms.

    python benchmarks/exported_programs.py

Processor time of one run on one thread, the tenth percentile of rounds in turns, in microseconds, and the
ratio to eager mode. `torch's module` is `program.module()`, which servers ran before; `served` is
`ServedProgram`.
"""

from __future__ import annotations

import platform
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchere.archiver.models.convert.aotinductor import compile_aoti, load_aoti
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.load.exported_program import ServedProgram
from torchere.archiver.models.measure.cost import processor_ms
from torchere.archiver.models.steps import silent

BUDGET_S = 3.0


class Dlrm(nn.Module):
    """A small recommender: 8 tables of 1000 x 16, dense features, their products, two small MLPs."""

    def __init__(self, tables: int = 8, rows: int = 1000, size: int = 16) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, size), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, size, mode="sum") for _ in range(tables))
        self.pairs = nn.Buffer(torch.tril_indices(tables + 1, tables + 1, -1))
        self.top = nn.Sequential(nn.Linear(size + self.pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return a probability for each row."""
        dense = self.bottom(dense)
        features = torch.stack([dense, *(table(ids[:, at]) for at, table in enumerate(self.tables))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        found: torch.Tensor = self.top(torch.cat([dense, products], 1)).sigmoid()
        return found


class Transformer(nn.Module):
    """Two encoder layers of 64 with 4 heads, over 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return two scores for each text."""
        hidden = self.tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        found: torch.Tensor = self.head(hidden.mean(1))
        return found


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Return small models, in eval mode, with inputs of two rows."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return {
        "MLP, 32-64-64-4": (mlp.eval(), (torch.randn(2, 32),)),
        "DLRM, 8 tables": (Dlrm().eval(), (torch.randn(2, 13), torch.randint(0, 1000, (2, 8, 3)))),
        "transformer, 2 x 64": (Transformer().eval(), (torch.randint(0, 1000, (2, 16)),)),
    }


def forms(module: nn.Module, example: tuple[torch.Tensor, ...], work: Path) -> dict[str, Callable[..., Any]]:
    """Return the model in each form."""
    batch = FreeSize("batch", tuple((index, 0) for index in range(len(example))), 1, 64)
    program = to_program(module, example, [batch])
    found: dict[str, Callable[..., Any]] = {
        "eager": module,
        "torch's module": program.module(),
        "served": ServedProgram(program),
    }
    with torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)
        found["torchscript"] = torch.jit.freeze(traced)
    compile_aoti(program, work / "model.pt2", None, silent)
    found["aoti"] = load_aoti(work / "model.pt2")
    return found


def main() -> None:
    """Measure each model, and print a row for it."""
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    print(
        f"{'model':<22}{'rows':>5}" + "".join(f"{name:>22}" for name in ("eager", "torch's module")), end=""
    )
    print("".join(f"{name:>22}" for name in ("served", "torchscript", "aoti")))
    for name, (module, example) in models().items():
        with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs = forms(module, example, Path(work))
            for rows in (1, 8):
                given = tuple(torch.cat([one] * 4)[:rows] for one in example)
                times = processor_ms(list(runs.values()), given, BUDGET_S)
                cells = [f"{1e3 * ms:.0f} us ({times[0] / ms:.2f} x)" for ms in times]
                print(f"{name:<22}{rows:>5}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
