"""Which layers tensor parallelism splits, and what is refused; no rank is started but in the last test."""

from collections.abc import Callable

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.ranks import in_ranks
from torchere.archiver.models.spread import spread
from torchere.archiver.models.spread.tensor import styles_of
from torchere.archiver.split import Split


class Attention(torch.nn.Module):
    """Linear layers that are no pair: used twice, with a sum between them, or with a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        y = self.one(x)
        return self.four(torch.softmax(self.two(y + x), 1) * self.three(y).relu())


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 6), torch.nn.Linear(6, 8)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x))) + x


def test_auto_splits_pairs_of_linear_layers_with_elementwise_functions_between() -> None:
    model = torch.nn.Sequential(Pair(), Pair())
    assert styles_of(model, "auto", 2) == {
        **{"0.up": "colwise", "0.down": "rowwise"},
        **{"1.up": "colwise", "1.down": "rowwise"},
    }


def differences(model: torch.nn.Module, plan: str | dict[str, str], given: torch.Tensor) -> list[float]:
    """The largest difference from the model's answer in each of two ranks."""

    def work(_rank: int) -> float:
        with torch.inference_mode():
            wanted = model(given)
            found = spread(model, Split(tensor=2, plan=plan), torch.device("cpu"))(given)
        return (found - wanted).abs().max().item()

    return in_ranks(2, work)


class Named(Pair):
    def forward(self, x):
        return self.down(input=torch.nn.functional.gelu(input=self.up(input=x))) + x


def test_auto_splits_pairs_that_take_their_inputs_by_name() -> None:
    assert styles_of(Named(), "auto", 2) == {"up": "colwise", "down": "rowwise"}
    model, given = Named(), torch.rand(3, 8)
    assert max(differences(model, "auto", given)) <= 1e-6


def test_auto_takes_the_plan_that_a_model_has() -> None:
    model = Pair()
    model.tp_plan = {"up": "colwise_rep"}  # type: ignore[assignment]  # as a class of transformers has it
    assert styles_of(model, "auto", 2) == {"up": "colwise_rep"}


def test_auto_splits_nothing_that_other_layers_need_whole() -> None:
    with pytest.raises(ValueError, match="auto finds no pair of linear layers"):
        styles_of(Attention(), "auto", 2)
    shared = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match="auto finds no pair"):
        styles_of(torch.nn.Sequential(shared, torch.nn.ReLU(), shared), "auto", 2)


def test_a_plan_names_layers_by_patterns() -> None:
    model = torch.nn.Sequential(Pair(), Pair())
    assert styles_of(model, {"*.down": "rowwise"}, 2) == {"0.down": "rowwise", "1.down": "rowwise"}
    with pytest.raises(ValueError, match=r"no layer is called \*.up2"):
        styles_of(model, {"*.up2": "colwise"}, 2)
    with pytest.raises(ValueError, match=r"0\.up of size 6 can't be split over 4 ranks"):
        styles_of(model, {"0.up": "colwise"}, 4)
    with pytest.raises(ValueError, match="0 is a ReLU, expected a linear layer or an embedding"):
        styles_of(torch.nn.Sequential(torch.nn.ReLU()), {"0": "colwise"}, 2)


def test_an_embedding_is_split_by_words_or_by_features() -> None:
    words = torch.nn.Sequential(torch.nn.Embedding(6, 4))
    assert styles_of(words, {"0": "embedding_rowwise"}, 3) == {"0": "embedding_rowwise"}
    assert styles_of(words, {"0": "colwise_rep"}, 4) == {"0": "colwise_rep"}
    with pytest.raises(ValueError, match="0 of size 6 can't be split over 4 ranks"):
        styles_of(words, {"0": "rowwise"}, 4)
    with pytest.raises(ValueError, match="0 of size 4 can't be split over 3 ranks"):
        styles_of(words, {"0": "colwise_rep"}, 3)
    with pytest.raises(ValueError, match="0 has a max_norm"):
        styles_of(torch.nn.Sequential(torch.nn.Embedding(6, 4, max_norm=1.0)), {"0": "rowwise"}, 2)


@pytest.mark.parametrize("style", ["rowwise", "embedding_rowwise", "colwise_rep"])
def test_a_split_embedding_finds_each_word(style: str) -> None:
    words = torch.nn.Sequential(torch.nn.Embedding(6, 4))
    given = torch.tensor([[0, 5, 3]])
    assert differences(words, {"0": style}, given) == [0.0, 0.0]


class Tied(torch.nn.Module):
    """An embedding and a linear layer that have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x))


@pytest.mark.parametrize("plan", [{"head": "colwise_rep"}, {"words": "rowwise"}])
def test_a_weight_that_layers_share_is_not_split_for_one_of_them(plan: dict[str, str]) -> None:
    with pytest.raises(ModelRefused, match=r"words\.weight and head\.weight are one weight"):
        in_ranks(2, lambda _rank: bool(spread(Tied(), Split(tensor=2, plan=plan), torch.device("cpu"))))


def test_a_weight_that_layers_share_is_split_for_all_of_them() -> None:
    model, given = Tied(), torch.tensor([[0, 5, 3]])
    plan = {"words": "rowwise", "head": "colwise_rep"}
    assert max(differences(model, plan, given)) <= 1e-6


class Listed(Pair):
    """Its layers have a second name each, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(self.up, torch.nn.ReLU(), self.down)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("plan", ["auto", {"layers.0": "colwise", "layers.2": "rowwise"}])
def test_a_layer_with_two_names_is_split_under_both(plan: str | dict[str, str]) -> None:
    model, given = Listed(), torch.rand(3, 8)
    assert styles_of(model, plan, 2) == {"up": "colwise", "down": "rowwise"}
    assert max(differences(model, plan, given)) <= 1e-6


@pytest.mark.parametrize("normed", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_a_weight_that_is_computed_is_not_split(normed: Callable[..., torch.nn.Module]) -> None:
    model = torch.nn.Sequential(normed(torch.nn.Linear(4, 6, bias=False)))
    split = Split(tensor=2, plan={"0": "colwise_rep"})
    with pytest.raises(ModelRefused, match=r"0\.weight is no parameter"):
        in_ranks(2, lambda _rank: bool(spread(model, split, torch.device("cpu"))))
