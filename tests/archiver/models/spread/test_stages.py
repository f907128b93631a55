"""Models over the ranks of a pipeline, of forked processes over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.ranks import in_ranks
from torchere.archiver.models.spread import spread
from torchere.archiver.models.spread.stages import cut, stage_bounds
from torchere.archiver.split import Split

CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """A layer that is given more than its input, and returns more than its output, as transformers' did."""

    kind = "wide"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x, *, scale, state=None):
        return x + self.down(self.up(x).relu()) * scale, state


class Net(torch.nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, words, scale):
        x = self.words(words)
        for layer in self.layers:
            assert layer.kind == "wide"
            x = layer(x, scale=scale[:, :, None])[0]
        return {"scores": self.head(x), "names": ["a", None]}


class Dense(Net):
    """Uses the outputs of all layers at its end."""

    def forward(self, words, scale):
        x, found = self.words(words), []
        for layer in self.layers:
            x = layer(x, scale=scale[:, :, None])[0]
            found.append(x)
        return torch.stack(found).sum(0)


class Backwards(Net):
    def forward(self, words, scale):
        x = self.words(words)
        for layer in reversed(self.layers):
            x = layer(x, scale=scale[:, :, None])[0]
        return x


class Twice(Net):
    def forward(self, words, scale):
        x = self.words(words)
        for layer in [*self.layers, *self.layers]:
            x = layer(x, scale=scale[:, :, None])[0]
        return x


class Pair(NamedTuple):
    scores: torch.Tensor


class Trimmed(Net):
    """Returns as many columns as its first row says, or a named tuple."""

    def forward(self, words, scale):
        scores = super().forward(words, scale)["scores"]
        return Pair(scores) if scale[0, 0] < 0 else scores[:, : int(scale[0, 0])]


class Table(Net):
    """Looks the rows of one input up in the other, so that its rows are no batch."""

    def forward(self, x, table):
        return super().forward((x @ table.T).argmax(1, keepdim=True), x[:, :1])["scores"]


def inputs(rows: int, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randint(0, 10, (rows, length), generator=generator),
        torch.rand((rows, length), generator=generator),
    )


def over(split: Split, make: Callable[[], torch.nn.Module], use: Callable[[Any], Any]) -> list[Any]:
    """What `use` makes of the model, in each rank."""

    def work(_rank: int) -> Any:
        with torch.inference_mode():
            return use(spread(make().eval(), split, CPU))

    return in_ranks(split.ranks, work)


@pytest.mark.parametrize("split", [Split(pipeline=2), Split(pipeline=3), Split(tensor=2, pipeline=2)])
def test_all_ranks_answer_as_one_process_for_any_number_of_rows(split: Split) -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    whole = Net().eval()
    sizes = [(1, 5), (3, 5), (20, 5), (20, 2), (1, 5)]
    wanted = [whole(*inputs(*size))["scores"] for size in sizes]

    def use(model: Any) -> list[float]:
        found = [model(*inputs(*size)) for size in sizes]
        assert all(each["names"] == ["a", None] for each in found)
        return [(one["scores"] - other).abs().max().item() for one, other in zip(found, wanted, strict=True)]

    for differences in over(Split(split.tensor, split.pipeline, plan), Net, use):
        assert max(differences) <= 1e-5


def test_layers_of_the_list_itself_are_split_in_each_stage() -> None:
    kinds = (torch.nn.Embedding, torch.nn.Linear, torch.nn.Linear, torch.nn.Linear)
    sizes = ((6, 8), (8, 16), (16, 8), (8, 4))
    model = torch.nn.Sequential(*(kind(*size) for kind, size in zip(kinds, sizes, strict=True)))
    given = torch.tensor([[0, 5, 3]])
    wanted = model(given).detach()
    split = Split(2, 2, {"0": "rowwise", "1": "colwise", "2": "rowwise", "3": "colwise_rep"})
    for found in over(split, lambda: model, lambda each: each(given).tolist()):
        torch.testing.assert_close(torch.tensor(found), wanted)


def test_inputs_that_are_no_batch_are_not_cut() -> None:
    x, table = torch.rand(10, 8), torch.rand(10, 8)
    with torch.inference_mode():
        wanted = Table()(x, table)
    for found in over(Split(pipeline=2, batched=False), Table, lambda model: model(x, table).tolist()):
        torch.testing.assert_close(torch.tensor(found), wanted)


@pytest.mark.parametrize("kind", [Dense, Backwards, Twice])
def test_a_model_that_uses_its_layers_otherwise_is_refused_and_never_answers_wrongly(kind: Any) -> None:
    with pytest.raises(
        ModelRefused, match=r"once each, in their order|in another stage|must be on the same|meta"
    ):
        over(Split(pipeline=3), kind, lambda model: model(*inputs(2)).tolist())


def test_an_input_that_the_model_refuses_fails_in_all_ranks_and_leaves_them_in_step() -> None:
    def failures() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.full((9, 2), 99), torch.ones(9, 2)  # before the layers
        yield torch.ones((9, 2), dtype=torch.int64), torch.ones(9, 3)  # in them

    def use(model: Any) -> list[str]:
        texts = []
        for failing in failures():
            with pytest.raises((IndexError, RuntimeError)) as caught:
                model(*failing)
            texts.append(str(caught.value))
        return [*texts, model(*inputs(9))["scores"].sum().item()]

    first, *others = over(Split(pipeline=3), Net, use)
    assert "index out of range" in first[0]
    assert "must match the size of tensor b" in first[1]
    assert [each[2] for each in others] == [first[2]] * 2


def test_a_result_that_can_not_be_joined_or_sent_fails_in_all_ranks_and_leaves_them_in_step() -> None:
    words, same = torch.ones((2, 3), dtype=torch.int64), torch.ones(2, 3)

    def use(model: Any) -> list[str]:
        texts = []
        for scale in (torch.tensor([[1.0] * 3, [2.0] * 3]), -same, -same):
            with pytest.raises((RuntimeError, NotImplementedError)) as caught:
                model(words, scale)
            texts.append(str(caught.value))
        return [*texts, str(model(words, same).tolist())]

    found = over(Split(pipeline=2), Trimmed, use)
    for texts in found:
        assert "Sizes of tensors must match" in texts[0]
        assert all("Pair" in text for text in texts[1:3])
    assert found[0][3] == found[1][3]


def test_only_a_stage_has_the_weights_of_its_layers() -> None:
    model = Net(6)
    place = stage_bounds(model, 3)
    assert place == ("layers", [0, 2, 4, 6])
    cut(model, place, 1)
    assert {name.split(".")[1] for name in model.state_dict() if name.startswith("layers")} == {"2", "3"}
    assert [layer.kind for layer in model.layers] == ["wide"] * 6


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_layers_whose_weights_a_hook_computes_answer_as_one_process() -> None:
    model = torch.nn.Sequential(*(torch.nn.utils.weight_norm(torch.nn.Linear(4, 4)) for _ in range(4)))
    given = torch.rand(3, 4)
    wanted = model(given).detach()
    for found in over(Split(pipeline=2), lambda: model, lambda each: each(given).tolist()):
        torch.testing.assert_close(torch.tensor(found), wanted)


def test_stages_are_made_of_the_list_with_most_weights() -> None:
    model = torch.nn.Module()
    model.short = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(9))
    model.blocks = torch.nn.ModuleList(
        torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5))) for _ in range(3)
    )
    assert stage_bounds(model, 2) == ("blocks", [0, 2, 3])
    assert stage_bounds(torch.nn.Sequential(Layer(), Layer(), Layer()), 2) == ("", [0, 2, 3])
    with pytest.raises(ValueError, match="no list of 10 layers"):
        stage_bounds(model, 10)
