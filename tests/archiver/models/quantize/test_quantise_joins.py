"""What joins outputs stays in fp32, so that each part of a joined output keeps its own scale."""

from __future__ import annotations

import torch
from int8_models import model_of, needs_engine
from torch import nn

from torchere.archiver.models.fold.convolutions import fold
from torchere.archiver.models.measure.difference import difference
from torchere.archiver.models.quantize.methods import quantise
from torchere.archiver.models.quantize.static import joined_apart


class Detector(nn.Module):
    """Boxes up to 640 and scores up to 1 in one output, as exported detectors have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(32, 4, 1), nn.Conv2d(32, 20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        boxes, scores = self.boxes(features).sigmoid() * 640.0, (self.scores(features) * 20).sigmoid()
        return torch.cat([boxes, scores], 1).flatten(2).transpose(1, 2)


class Inner(nn.Module):
    """Joins in the middle, where a layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.two(torch.cat([self.one(x), x], 1).relu())
        return y


class Several(nn.Module):
    """Several outputs, of which one is a join and one is read by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"joined": self.norm(torch.cat([x, y], 1)), "y": y}


def test_the_join_of_outputs_and_what_is_behind_it_become_one_module() -> None:
    module, x = Detector().eval(), torch.rand(2, 3, 16, 16)
    graph = fold(module, (x,)).module

    name = joined_apart(graph)

    assert name is not None
    assert [node.op for node in graph.graph.nodes][-2:] == ["call_module", "output"]
    assert not [node for node in graph.graph.nodes if node.target is torch.cat]
    torch.testing.assert_close(graph(x), module(x))


def test_outputs_in_a_dict_stay_as_they_are() -> None:
    module, x = Several().eval(), torch.rand(2, 4)
    graph = fold(module, (x,)).module

    assert joined_apart(graph) is not None
    torch.testing.assert_close(graph(x), module(x))


def test_a_join_that_a_layer_reads_stays_where_it_is() -> None:
    graph = fold(Inner().eval(), (torch.rand(2, 4),)).module

    assert joined_apart(graph) is None


@needs_engine
def test_int8_scores_beside_boxes_are_no_longer_zero() -> None:
    module = Detector().eval()
    torch.manual_seed(1)
    samples = [(torch.rand(1, 3, 32, 32),) for _ in range(8)]

    made = quantise(model_of(module, *samples[0]), "int8-static", samples)

    with torch.inference_mode():
        answers = [(module(*one), made.module(*one)) for one in samples]
    found = difference(((wanted,), (got,)) for wanted, got in answers)
    assert found.silenced == ()
    assert difference(((wanted[..., 4:],), (got[..., 4:],)) for wanted, got in answers).drift < 0.1
