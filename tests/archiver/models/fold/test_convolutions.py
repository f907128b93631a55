"""Padding, batch normalisation and ReLU6 move into the layers beside them; the function stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

from torchere.archiver.models.fold import convolutions as folding
from torchere.archiver.models.fold.convolutions import Axis, fold, folded_axis, folded_paddings
from torchere.archiver.models.fold.tracing import NotTraceable
from torchere.archiver.models.quantize.static import clipped_by_format

PICTURE = (torch.rand(1, 3, 9, 9),)
ONE_CHANNEL = (torch.rand(1, 1, 4, 4),)


class OwnConvolution(nn.Conv2d):
    """Pads by itself and calls the function, as EfficientNet-Lite's layers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.static_padding = nn.ZeroPad2d((0, 1, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(
            self.static_padding(x),
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


class Padded(nn.Module):
    """A normalised convolution behind a padding that is called as a function."""

    def __init__(self, sides: tuple[int, int, int, int], stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, 3, stride=stride, padding=1, dilation=dilation)
        self.normalisation = nn.BatchNorm2d(4)
        self.normalisation.running_mean = torch.randn(4)
        self.normalisation.running_var = torch.rand(4) + 0.5
        self.sides = sides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.normalisation(self.convolution(functional.pad(x, self.sides)))
        return normalised


def names_of(module: nn.Module) -> set[str]:
    return {type(layer).__name__ for layer in module.modules()}


@given(
    sides=st.tuples(*[st.integers(0, 3)] * 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    size=st.integers(8, 12),
)
@settings(deadline=None, max_examples=60)
def test_a_folded_padding_gives_the_same_result_whatever_its_sides(
    sides: tuple[int, int, int, int], stride: int, dilation: int, size: int
) -> None:
    network = Padded(sides, stride, dilation).eval()
    picture = torch.randn(2, 3, size, size + 1)

    folded = fold(network, (picture,))

    torch.testing.assert_close(folded.module(picture), network(picture), rtol=1e-4, atol=1e-4)


def test_an_uneven_padding_and_the_normalisation_end_up_in_one_plain_convolution() -> None:
    folded = fold(Padded((0, 1, 0, 1), stride=2), PICTURE)

    assert folded.paddings == folded.normalisations == 1
    assert names_of(folded.module) & {"BatchNorm2d", "ZeroPad2d"} == set()
    (layer,) = [layer for layer in folded.module.modules() if isinstance(layer, nn.Conv2d)]
    assert layer.kernel_size == (4, 4)
    assert [node.op for node in folded.module.graph.nodes] == ["placeholder", "call_module", "output"]


def test_a_layer_that_pads_by_itself_becomes_a_plain_convolution() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(OwnConvolution(3, 6, 3, stride=2, groups=3), nn.BatchNorm2d(6), nn.ReLU6()).eval()
    picture = torch.randn(1, 3, 9, 9)

    folded = fold(network, (picture,))

    assert (folded.functional, folded.paddings, folded.normalisations) == (1, 1, 1)
    assert folded.note == "1 functional convolutions, 1 paddings, 1 batch normalisations"
    torch.testing.assert_close(folded.module(picture), network(picture), rtol=1e-4, atol=1e-5)


def test_the_original_is_left_as_it_was() -> None:
    network = Padded((1, 1, 1, 1)).eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    fold(network, PICTURE)

    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_convolution_that_two_callers_share_keeps_its_padding_outside() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            once: torch.Tensor = self.convolution(functional.pad(x, (1, 1, 1, 1)))
            twice: torch.Tensor = self.convolution(once)
            return twice

    network, picture = Shared().eval(), torch.randn(1, 3, 6, 6)

    folded = fold(network, (picture,))

    assert folded.paddings == 0
    torch.testing.assert_close(folded.module(picture), network(picture))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_a_padding_that_is_not_zero_stays(mode: str) -> None:
    class Mirrored(Padded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            convolved: torch.Tensor = self.convolution(functional.pad(x, self.sides, mode=mode))
            return convolved

    assert fold(Mirrored((1, 1, 1, 1)), PICTURE).paddings == 0


def test_a_model_that_branches_on_values_is_refused_with_what_to_do() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(NotTraceable, match=r"Branching can't be traced.*take the branch out of its forward"):
        fold(Branching(), PICTURE)
    with pytest.raises(NotTraceable, match=r"Branching can't be traced.*use int8-dynamic"):
        fold(Branching(nn.Linear(2, 2)), PICTURE)


@pytest.mark.parametrize(
    ("before", "after", "dilation", "axis"),
    [
        (1, 1, 1, Axis(1, 0, 0)),
        (0, 1, 1, Axis(1, 1, 0)),
        (2, 0, 1, Axis(2, 0, 2)),
        (0, 2, 2, Axis(2, 1, 0)),
        (0, 1, 2, None),
        (-1, 0, 1, None),
    ],
)
def test_uneven_padding_grows_the_kernel_on_the_side_that_has_less(
    before: int, after: int, dilation: int, axis: Axis | None
) -> None:
    assert folded_axis(before, after, dilation) == axis


@pytest.mark.parametrize(
    "clip",
    [nn.ReLU6(), nn.Hardtanh(0.0, 6.0), functional.relu6, lambda x: torch.clamp(x, 0.0, 6.0)],
)
def test_relu6_behind_a_convolution_becomes_relu_however_it_is_written(clip: Any) -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(1, 1, 1)
            self.clip = clip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clipped: torch.Tensor = self.clip(self.convolution(x))
            return clipped

    graph = fold(Clipped(), ONE_CHANNEL).module

    names = clipped_by_format(graph)

    assert names[0] == "convolution"
    assert len(names) == 2
    assert isinstance(graph.get_submodule(names[1]), nn.ReLU)


def test_a_clip_at_another_limit_stays() -> None:
    graph = fold(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Hardtanh(-1.0, 1.0)), ONE_CHANNEL).module

    assert clipped_by_format(graph) == ()


class Typed(nn.Module):
    """Branches on whether its input is a tensor; a symbol of tracing is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = Padded((1, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.padded(x)
        return answer if isinstance(x, torch.Tensor) else answer * 2


def test_paddings_of_a_model_that_stays_in_fp32_are_folded() -> None:
    module, example = Padded((0, 1, 0, 1), stride=2).eval(), (torch.rand(2, 3, 9, 9),)
    folded = folded_paddings(module, example)
    assert folded is not None
    assert folded.paddings == 1
    torch.testing.assert_close(folded.module(*example), module(*example))


@pytest.mark.parametrize(
    "settings",
    [
        {"dilation": (2,)},
        {"padding": (1,), "stride": (2,), "dilation": [2]},
        {"padding": "same", "dilation": (2,)},
    ],
)
def test_paddings_of_convolutions_with_one_number_for_all_axes_are_folded(settings: dict[str, Any]) -> None:
    module = nn.Sequential(nn.ZeroPad2d((0, 2, 0, 2)), nn.Conv2d(3, 4, 3, **settings)).eval()
    example = (torch.rand(2, 3, 9, 9),)
    folded = folded_paddings(module, example)
    assert folded is not None
    torch.testing.assert_close(folded.module(*example), module(*example))


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (nn.Linear(3, 4), torch.rand(2, 3)),
        (nn.Conv2d(3, 4, 3, padding=1), torch.rand(2, 3, 9, 9)),
    ],
)
def test_a_model_without_paddings_is_left_alone(module: nn.Module, example: torch.Tensor) -> None:
    assert folded_paddings(module.eval(), (example,)) is None


class Normalised(nn.Module):
    """A normalisation behind a linear layer, with statistics that do something."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.normalisation = nn.Linear(8, wide), nn.BatchNorm1d(wide)
        self.normalisation.running_mean = torch.randn(wide)
        self.normalisation.running_var = torch.rand(wide) * 4 + 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.normalisation(self.linear(x))
        return normalised


def test_a_normalisation_behind_a_linear_layer_of_rows_is_folded() -> None:
    module, rows = Normalised(16).eval(), torch.randn(4, 8)

    folded = fold(module, (rows,))

    assert folded.normalisations == 1
    torch.testing.assert_close(folded.module(rows), module(rows), rtol=1e-4, atol=1e-4)


def test_a_normalisation_over_steps_is_not_folded_into_a_linear_layer_that_is_as_wide() -> None:
    module, steps = Normalised(16).eval(), torch.randn(4, 16, 8)

    folded = fold(module, (steps,))

    assert folded.normalisations == 0
    torch.testing.assert_close(folded.module(steps), module(steps))


def test_where_the_folded_model_answers_otherwise_nothing_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: fx.GraphModule, example: object) -> int:
        graph.get_parameter("convolution.weight").data *= 2
        return 1

    monkeypatch.setattr(folding, "fold_normalisations", wrong)
    module = Padded((0, 1, 0, 1), stride=2).eval()

    folded = fold(module, PICTURE)

    assert folded.note == ""
    torch.testing.assert_close(folded.module(*PICTURE), module(*PICTURE))


def test_a_model_that_tracing_misunderstands_is_refused_with_what_to_do() -> None:
    for made in (fold, folded_paddings):
        with pytest.raises(NotTraceable, match=r"Typed answers otherwise.*take the branch"):
            made(Typed().eval(), PICTURE)


class Flagged(nn.Module):
    """Takes options after its input, which no example has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Padded((0, 1, 0, 1))

    def forward(
        self,
        x: torch.Tensor,
        features: bool = False,
        scales: tuple[int, ...] = (1, 2),
        mask: torch.Tensor | None = None,
        *,
        deep: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x)
        if features:
            return hidden
        if mask is not None:
            hidden = hidden * mask
        for scale in scales:
            hidden = hidden * (scale if not deep and not more else 0)
        return hidden.mean((2, 3))


class Summed(nn.Module):
    """Takes any number of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Padded((0, 1, 0, 1))

    def forward(self, *pictures: torch.Tensor) -> torch.Tensor:
        return sum(self.inner(one) for one in pictures)


def test_parameters_that_the_example_lacks_have_their_defaults() -> None:
    module = Flagged().eval()
    folded = fold(module, PICTURE)
    assert (folded.paddings, folded.normalisations) == (1, 1)
    assert type(module) is Flagged
    torch.testing.assert_close(folded.module(*PICTURE), module(*PICTURE))
    assert len([node for node in folded.module.graph.nodes if node.op == "placeholder"]) == 1


def test_a_model_of_any_number_of_inputs_is_folded_for_as_many_as_the_example_has() -> None:
    module = Summed().eval()
    pair = (PICTURE[0], PICTURE[0] * 2)
    torch.testing.assert_close(fold(module, pair).module(*pair), module(*pair))


def test_folding_that_is_skipped_though_the_model_pads_is_told() -> None:
    class Masking(Padded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            return found if found.sum() > 0 else -found

    with pytest.raises(
        NotTraceable, match=r"Masking can't be traced as a graph.*take the branch out"
    ) as caught:
        folded_paddings(Masking((0, 1, 0, 1)).eval(), PICTURE)
    assert "int8" not in str(caught.value)


@pytest.mark.parametrize("word", ["same", "valid"])
@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (lambda word: nn.Conv1d(4, 6, 5, padding=word), (2, 4, 20)),
        (lambda word: nn.Conv1d(4, 6, 4, padding=word, groups=2), (2, 4, 20)),
        (lambda word: nn.Conv1d(4, 6, 4, padding=word, dilation=3), (2, 4, 20)),
        (lambda word: nn.Conv1d(4, 6, 5, padding=word, padding_mode="reflect"), (2, 4, 20)),
        (lambda word: nn.Conv2d(4, 6, (3, 4), padding=word, dilation=(2, 1), bias=False), (2, 4, 9, 11)),
        (lambda word: nn.Conv3d(4, 6, (3, 2, 1), padding=word), (1, 4, 5, 6, 7)),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")
def test_paddings_that_are_words_become_numbers(layer: Any, sizes: tuple[int, ...], word: str) -> None:
    module, example = nn.Sequential(layer(word)).eval(), torch.rand(sizes)
    made = fold(module, (example,)).module
    torch.testing.assert_close(made(example), module(example), atol=1e-5, rtol=1e-5)
    assert not [one for one in made.modules() if isinstance(getattr(one, "padding", None), str)]


class Changing(Padded):
    """Changes a value by a statement, which changes nothing of `PICTURE`."""

    last: torch.Tensor

    def __init__(self, change: Any, reads_part: bool = False) -> None:
        super().__init__((0, 1, 0, 1))
        self.register_buffer("last", torch.zeros(1, 3, 9, 9))
        self.rectify, self.same = nn.ReLU(inplace=True), nn.Identity()
        self.change, self.reads_part = change, reads_part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        part = y[:, 0]
        self.change(self, y, part)
        found: torch.Tensor = super().forward(y)
        return found + part.sum() if self.reads_part else found


@pytest.mark.parametrize(
    "change",
    [
        lambda _model, y, _part: (y.clamp_(0, 2), y.mul_(2).sub_(1)),
        lambda model, y, _part: model.same(y).clamp_(0, 2),
        lambda model, y, _part: model.rectify(y),
        lambda _model, y, _part: functional.relu(y, inplace=True),
        lambda _model, y, _part: torch.clamp(y, 0, 2, out=y),
    ],
)
def test_a_change_in_place_stays(change: Any) -> None:
    module, picture = Changing(change).eval(), torch.randn(1, 3, 9, 9) * 4
    folded = fold(module, PICTURE)
    assert (folded.paddings, folded.normalisations) == (1, 1)
    torch.testing.assert_close(folded.module(picture), module(picture), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reads_part", "told"),
    [
        (lambda model, y, _part: model.last.copy_(y), False, "copy_.*stays from call to call"),
        (lambda _model, _y, part: part.clamp_(0, 2), False, "clamp_.*reads under another name .mul"),
        (lambda _model, y, _part: y.clamp_(0, 2), True, "clamp_.*reads under another name .getitem"),
    ],
    ids=["state", "part", "whole"],
)
def test_a_change_in_place_that_a_graph_loses_is_refused_with_what_to_do(
    change: Any, reads_part: bool, told: str
) -> None:
    for made in (fold, folded_paddings):
        with pytest.raises(NotTraceable, match=rf"changes in place \({told}.*let it make a new value"):
            made(Changing(change, reads_part).eval(), PICTURE)


def test_a_change_of_one_half_of_a_value_stays_beside_the_other() -> None:
    class Gated(Padded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = super().forward(x).chunk(2, 1)
            return torch.cat([left.sigmoid_(), right], 1)

    module, pictures = Gated((0, 1, 0, 1)).eval(), torch.randn(2, 3, 9, 9)
    folded = fold(module, (pictures,))
    assert folded.paddings == 1
    with torch.no_grad():
        torch.testing.assert_close(folded.module(pictures), module(pictures), rtol=1e-4, atol=1e-4)


def test_a_padding_of_a_value_that_changes_before_the_convolution_stays() -> None:
    class Between(Padded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = functional.pad(x, self.sides)
            x.clamp_(0, 2)
            convolved: torch.Tensor = self.convolution(padded)
            return convolved + x.sum()

    assert fold(Between((0, 1, 0, 1)).eval(), PICTURE).paddings == 0


class Weighed(nn.Module):
    """Multiplies by its mask only if that is a tensor; a symbol of tracing is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Padded((0, 1, 0, 1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x * mask if isinstance(mask, torch.Tensor) else x)
        return found


class Counting(Padded):
    """Counts its calls without a value that tracing sees."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__((0, 1, 0, 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return super().forward(x) + self.count


@pytest.mark.parametrize(
    ("kind", "example"), [(Weighed, (*PICTURE, torch.ones(1, 3, 9, 9))), (Counting, PICTURE)]
)
def test_a_graph_that_answers_only_the_first_example_alike_is_refused(
    kind: type[nn.Module], example: tuple[torch.Tensor, ...]
) -> None:
    with pytest.raises(NotTraceable, match=f"{kind.__name__} answers otherwise when it is traced"):
        fold(kind().eval(), example)


def test_values_that_the_model_refuses_are_left_out_of_the_comparison() -> None:
    class Fractions(Padded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._assert((x <= 1).all(), "expected values from 0 to 1")
            return super().forward(x)

    assert fold(Fractions((0, 1, 0, 1)).eval(), PICTURE).paddings == 1


class Hooked(nn.Module):
    """Layers that are folded, each alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.padding, self.convolution = nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3, stride=2)
        self.even, self.normalisation = nn.Conv2d(4, 4, 2, padding="same"), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.normalisation(self.even(self.convolution(self.padding(x))))
        return found


@pytest.mark.parametrize(
    ("name", "folded"),
    [("padding", (0, 1)), ("convolution", (0, 1)), ("even", (1, 0)), ("normalisation", (1, 0))],
)
@pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")
def test_layers_with_hooks_stay(name: str, folded: tuple[int, int]) -> None:
    module = Hooked().eval()
    module.get_submodule(name).register_forward_hook(lambda _layer, _given, found: found + 1)
    made = fold(module, PICTURE)
    assert (made.paddings, made.normalisations) == folded
    torch.testing.assert_close(made.module(*PICTURE), module(*PICTURE), rtol=1e-4, atol=1e-4)


def test_a_model_with_hooks_of_its_own_is_refused_with_what_to_do() -> None:
    module = Padded((0, 1, 0, 1)).eval()
    module.register_forward_pre_hook(lambda _module, given: (given[0],))
    with pytest.raises(NotTraceable, match=r"Padded has hooks.*let its forward do their work"):
        fold(module, PICTURE)
