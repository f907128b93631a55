"""Which layers of a model go to which rank; no rank is started."""

import pytest
import torch

from torchere.handlers.loading.parallel import first_layers, styles_of
from torchere.handlers.loading.split import Split


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
    with pytest.raises(ValueError, match="0 of size 0 can't be split"):
        styles_of(torch.nn.Sequential(torch.nn.ReLU()), {"0": "colwise"}, 2)


def test_stages_have_as_many_layers_of_the_longest_list() -> None:
    model = torch.nn.Module()
    model.short, model.layers = torch.nn.ModuleList([Pair()]), torch.nn.ModuleList([Pair() for _ in range(6)])
    assert first_layers(model, 3) == ["layers.2", "layers.4"]
    assert first_layers(torch.nn.Sequential(Pair(), Pair(), Pair()), 2) == ["2"]
    with pytest.raises(ValueError, match="no list of 7 layers"):
        first_layers(model, 7)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, None),
        (True, None),
        ({"workers": 2}, None),  # a key of the user's own
        ({"tensor": 2}, Split(tensor=2)),
        ({"pipeline": 4}, Split(pipeline=4)),
        ({"tensor": 2, "plan": {"a": "colwise"}}, Split(tensor=2, plan={"a": "colwise"})),
    ],
)
def test_the_section_is_read(section, expected) -> None:
    assert Split.read({"parallel": section}) == expected


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"tensor": 0}, "expected whole numbers from 1"),
        ({"tensor": "2"}, "expected whole numbers from 1"),
        ({"tensor": 2, "pipeline": 2}, "expected one of them"),
        ({"tensor": 2, "plans": {}}, "plans is not known"),
        ({"tensor": 2, "plan": {"a": "diagonal"}}, "expected auto, or colwise"),
        ({"tensor": 2, "plan": "all"}, "expected auto, or colwise"),
    ],
)
def test_a_wrong_section_is_refused_with_what_was_expected(section, text) -> None:
    with pytest.raises(ValueError, match=text):
        Split.read({"parallel": section})
