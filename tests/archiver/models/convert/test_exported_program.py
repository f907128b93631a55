"""Exported programs as files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx, nn

from torchere.archiver.models.convert.exported_program import save_program, to_program


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
