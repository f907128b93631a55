"""Rows of a batch: which models are taken for batched, and which would mix what clients send."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.build import build
from torchere.archiver.models.inputs.run import Run
from torchere.archiver.models.inputs.sizes import FreeSize, batch_of
from torchere.archiver.models.probe.derive import signature_of
from torchere.archiver.models.probe.precision import FINE, SHARED, precision_of
from torchere.archiver.request import BuildOptions
from torchere.archiver.signature import Limit

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
torch.manual_seed(0)
LINEAR, WORDS = nn.Linear(8, 3), nn.Embedding(50, 8)
NORM = nn.BatchNorm2d(3, track_running_stats=False)
FLOATS: dict[str, Run] = {
    "largest value of the batch": lambda x: LINEAR(x / x.abs().max()),
    "mean of the batch": lambda x: LINEAR(x - x.mean()),
    "a hundredth of the mean": lambda x: LINEAR(x - x.mean() / 100),
    "spread of the batch": lambda x: LINEAR((x - x.mean()) / x.std(unbiased=False)),
    "range of the batch": lambda x: LINEAR((x - x.min()) / (x.max() - x.min())),
    "least value so far": lambda x: LINEAR(x - x.cummin(0).values),
    "largest value so far": lambda x: LINEAR(x - x.cummax(0).values),
    "sum so far": lambda x: LINEAR(x.cumsum(0)),
    "sum of what follows": lambda x: LINEAR(x.flip(0).cumsum(0).flip(0)),
    "attention over the batch": lambda x: (x @ x.T).softmax(-1) @ x,
    "a matrix of all pairs": lambda x: x @ x.T,
    "number of the row": lambda x: LINEAR(x) + torch.arange(len(x))[:, None],
    "scores beside what is filled": lambda x: torch.cat(
        [x - x.mean(0) + x.sign(), torch.full_like(x, -1e9)], 1
    ),
    "small scores beside boxes": lambda x: torch.cat([x * 640, x / (1 + x.abs().sum(0))], 1),
    "columns of different sizes": lambda x: torch.stack([x[:, 0].sigmoid() * 640, x[:, 1] + x.max() / 5], 1),
}
IMAGES: dict[str, Run] = {
    "normalised by the batch": lambda x: NORM(x).flatten(1),
    "divided by the brightest of all": lambda x: (x / x.max()).flatten(1),
}
TEXTS: dict[str, Run] = {
    "cropped to the longest": lambda ids: WORDS(ids[:, : int((ids != 0).sum(1).max())]).mean(1),
    "mean over the tokens of all": lambda ids: (
        (WORDS(ids) * (ids != 0)[..., None]).sum(1) / ((ids != 0).sum() / len(ids))
    ),
}


COUNTS: dict[str, Run] = {
    "as many as the largest count of all": lambda n: torch.ones(len(n), 2) * int(n.max()),
}
FULL_TEXTS: dict[str, Run] = {
    "padding cut off that all rows have": lambda ids: WORDS(ids[:, : int((ids != 0).sum(1).max())]).mean(1),
    "the last token of the longest": lambda ids: WORDS(ids[:, int((ids != 0).sum(1).max()) - 1]),
}


def texts(rows: int) -> torch.Tensor:
    ids = torch.randint(1, 50, (rows, 8))
    ids[:, 5:] = 0
    return ids


def is_batched(run: Run, *example: torch.Tensor) -> bool:
    names = [f"input_{index}" for index in range(len(example))]
    with torch.no_grad():
        return signature_of(run, example, names, [], probe_batch=True).batched


def cases() -> list[tuple[Run, Callable[[int], torch.Tensor]]]:
    made: list[tuple[dict[str, Run], Callable[[int], torch.Tensor]]] = [
        (FLOATS, lambda rows: torch.randn(rows, 8)),
        (IMAGES, lambda rows: torch.rand(rows, 3, 8, 8)),
        (TEXTS, texts),
        (COUNTS, lambda rows: torch.full((rows,), 3)),
        (FULL_TEXTS, lambda rows: torch.randint(1, 50, (rows, 8))),
    ]
    return [(run, make) for models, make in made for run in models.values()]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("run", "make"), cases(), ids=[*FLOATS, *IMAGES, *TEXTS, *COUNTS, *FULL_TEXTS])
def test_a_model_whose_rows_depend_on_one_another_is_not_batched(
    run: Run, make: Callable[[int], torch.Tensor], rows: int
) -> None:
    assert not is_batched(run, make(rows))


@pytest.mark.parametrize("counts", [[3, 1], [1, 3], [3, 3, 1, 3, 3, 3]])
def test_rows_of_the_example_are_tried_without_one_another(counts: list[int]) -> None:
    def run(n: torch.Tensor) -> torch.Tensor:
        return LINEAR(n[:, None].expand(-1, 8) / n.max().clamp(min=1))

    example = torch.tensor(counts)
    assert not is_batched(run, example)
    assert is_batched(lambda n: LINEAR(n[:, None].expand(-1, 8) / 3), example)
    with pytest.raises(ModelRefused, match="depends on the other rows of the batch"):
        signature_of(run, (example,), ["n"], [batch_of((example,), (1, 8))], probe_batch=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("shape", [(5, 1, 4), (1, 1, 4), (1, 3, 4)])
def test_a_recurrent_layer_is_batched_only_if_its_batch_is_first(
    kind: Callable[..., nn.Module], shape: tuple[int, int, int]
) -> None:
    def run(layer: nn.Module) -> Run:
        return lambda x: layer(x)[0]

    assert not is_batched(run(kind(4, 8)), torch.randn(shape))
    assert is_batched(run(kind(4, 8, batch_first=True)), torch.randn(shape))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 4])
def test_a_model_that_drops_the_dimension_of_a_single_row_is_not_batched(rows: int, width: int) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x.sum(-1, keepdim=True) * torch.ones(1, 1, width)).squeeze()

    said: list[str] = []
    example = (torch.rand(rows, 1, 8),)
    assert not signature_of(run, example, ["x"], [], probe_batch=True, say=said.append).batched
    if rows > 1:
        assert "for one row; expected as many rows (squeeze() removes this dimension" in said[-1]
        with pytest.raises(ModelRefused, match="for one row; expected as many rows"):
            signature_of(run, example, ["x"], [batch_of(example, (1, 8))], probe_batch=True)
    assert is_batched(lambda x: run(x).reshape(len(x), width), *example)


def test_numbers_with_one_dimension_are_varied_too() -> None:
    assert not is_batched(lambda x: x / x.max(), torch.rand(1) + 1)
    assert not is_batched(lambda n: n - n.sum(), torch.tensor([3]))
    assert not is_batched(lambda n: n & n.all(), torch.tensor([True]))
    assert is_batched(lambda x: x * 2, torch.rand(1))


class Padded(nn.Module):
    """Takes a short cut where all padding is on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, padding_idx=0)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.layers(
            self.words(ids), src_key_padding_mask=ids == 0 if mask is None else mask
        )
        return found


COLUMNS = nn.ModuleList(nn.Embedding(count, 4) for count in (1000, 3, 12))


def columns(ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([words(ids[:, at]) for at, words in enumerate(COLUMNS)], 1)


def positive_definite(rows: int) -> torch.Tensor:
    made = torch.rand(rows, 4, 4)
    return made @ made.mT + torch.eye(4)


GOOD: dict[str, tuple[Run, tuple[torch.Tensor, ...]]] = {
    "a logarithm, which is not a number for the others": (lambda x: x.log(), (torch.rand(2, 4) + 1,)),
    "numbers that must lie in a range": (
        lambda x: torch.distributions.Bernoulli(x).logits,
        (torch.rand(2, 4) / 2 + 0.25,),
    ),
    "an embedding of the largest index": (WORDS, (torch.tensor([[49, 3, 0]]),)),
    "lengths, of which none may be 0": (
        lambda x, n: nn.utils.rnn.pad_packed_sequence(
            nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False),
            batch_first=True,
            total_length=6,
        )[0],
        (torch.rand(2, 6, 3), torch.tensor([4, 2])),
    ),
    "a text with its mask": (
        lambda ids, mask: (WORDS(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
        (texts(1), (texts(1) != 0).long()),
    ),
    "a padded text": (Padded().eval(), (texts(1),)),
    "padded texts": (Padded().eval(), (texts(3),)),
    "a padded text with its mask of booleans": (Padded().eval(), (text := texts(1), text == 0)),
    "columns with a vocabulary each": (columns, (torch.tensor([[873, 2, 11]]),)),
    "matrices of one kind": (torch.linalg.cholesky, (positive_definite(1),)),
    "wide integers": (lambda n: n.float() * 2, (torch.tensor([[5, 6, 7]]).to(torch.uint64),)),
    "bfloat16": (nn.Linear(8, 3).bfloat16(), (torch.randn(2, 8).bfloat16(),)),
    "infinite values": (
        lambda x: torch.where(x > x.mean(1, keepdim=True), x, -math.inf),
        (torch.randn(2, 8),),
    ),
    "all zero": (lambda x: x * 0, (torch.randn(2, 8),)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_model_whose_rows_leave_one_another_alone_is_batched(name: str) -> None:
    run, example = GOOD[name]
    assert is_batched(run, *example)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_int8_whose_scale_is_that_of_the_batch_is_batched() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(layers.eval(), {nn.Linear})
    rows = torch.randn(2, 64)
    assert precision_of(quantised, (rows,)) == SHARED
    assert precision_of(layers, (rows,)) == FINE
    assert is_batched(quantised, rows)


def test_a_model_that_changes_its_input_does_not_change_the_example() -> None:
    rows = torch.randn(2, 8)
    before = rows.clone()
    assert is_batched(lambda x: LINEAR(x.sub_(5.0).div_(2.0)), rows)
    torch.testing.assert_close(rows, before, rtol=0, atol=0)


def test_what_a_model_returns_may_be_changed_by_its_next_run() -> None:
    kept = torch.zeros(1)
    assert not is_batched(lambda x: kept.add_(1), torch.rand(1, 2))


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_random_model_is_tried_with_the_same_random_numbers(is_asked_for: bool) -> None:
    rows, said = (torch.rand(2, 8),), list[str]()
    sizes = [batch_of(rows, (1, 64))] if is_asked_for else []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    assert signature_of(noisy, rows, ["x"], sizes, probe_batch=True, say=said.append).batched
    assert said == [
        "two runs on the same example differ: the model is random, and is tried with fixed random numbers"
    ]
    assert not is_batched(lambda x: noisy(x - x.mean(0)), *rows)


def test_a_model_that_keeps_state_takes_no_batch_and_is_told_the_way_out() -> None:
    rows, kept = (torch.rand(2, 8),), torch.zeros(1)
    said = list[str]()

    def counting(x: torch.Tensor) -> torch.Tensor:
        return x + kept.add_(1)

    assert not signature_of(counting, rows, ["x"], [], probe_batch=True, say=said.append).batched
    assert len(said) == 1 and "keeps state" in said[0]
    with pytest.raises(ModelRefused, match=r"keeps state .* leave --dynamic-batch out"):
        signature_of(counting, rows, ["x"], [batch_of(rows, (1, 64))], probe_batch=True)


def test_why_there_is_no_batch_is_said_in_one_line() -> None:
    said: list[str] = []
    signature_of(
        FLOATS["mean of the batch"], (torch.randn(2, 8),), ["x"], [], probe_batch=True, say=said.append
    )
    assert len(said) == 1 and "depends on the other rows of the batch" in said[0]


def test_a_first_dimension_by_another_name_is_a_batch_if_its_rows_are_independent() -> None:
    rows, free, said = (torch.randn(2, 8),), [FreeSize("x_0", ((0, 0),), 1, 64)], list[str]()
    assert signature_of(LINEAR, rows, ["x"], free, probe_batch=True).batched
    found = signature_of(FLOATS["sum so far"], rows, ["x"], free, probe_batch=True, say=said.append)
    assert found.inputs[0].shape == (-1, 8) and found.one_by_one and not found.batched
    assert found.inputs[0].limits == (Limit(0, 1, 64),)
    assert said[0].startswith("the first dimensions are free and no batch")
    with pytest.raises(ModelRefused, match=r"depends on the other rows.*say --dynamic x\.0=1: instead"):
        signature_of(FLOATS["sum so far"], rows, ["x"], [batch_of(rows, (1, 64))], probe_batch=True)


def test_two_first_dimensions_that_vary_apart_are_no_batch() -> None:
    points, apart = (torch.randn(2, 8), torch.randn(3, 8)), list[FreeSize]()
    for index in range(2):
        apart.append(FreeSize(f"size_{index}", ((index, 0),), 1, 64))
    for example in (points, (points[0], points[0])):
        found = signature_of(
            lambda x, y: (x.cumsum(0), y.cumsum(0)), example, ["x", "y"], apart, probe_batch=False
        )
        assert found.one_by_one and [spec.shape for spec in found.outputs] == [(-1, 8), (-1, 8)]


def test_a_batch_of_one_size_has_its_rows_tried_by_others_in_their_place() -> None:
    rows = (torch.randn(3, 8),)
    fixed = [batch_of(rows, (3, 3))]
    assert signature_of(LINEAR, rows, ["x"], fixed, probe_batch=False).batched
    with pytest.raises(ModelRefused, match="depends on the other rows"):
        signature_of(FLOATS["mean of the batch"], rows, ["x"], fixed, probe_batch=False)


def test_machine_code_whose_scales_are_those_of_the_batch_is_batched_when_this_is_known() -> None:
    def coded(x: torch.Tensor) -> torch.Tensor:
        values = x.numpy()  # from here on torch sees no operators
        scale = abs(values).max() / 31
        return torch.from_numpy((values / scale).round() * scale)

    rows = torch.randn(2, 8)
    assert not signature_of(coded, (rows,), ["x"], [], probe_batch=True).batched
    assert signature_of(coded, (rows,), ["x"], [], probe_batch=True, scales_by_batch=True).batched


def test_a_model_that_does_not_run_on_another_batch_is_not_batched() -> None:
    assert not is_batched(lambda x: LINEAR(x.reshape(2, 8)), torch.randn(2, 8))


def test_a_class_that_stays_as_it_is_is_tried_and_told_why_it_takes_no_batches(tmp_path: Path) -> None:
    (tmp_path / "timed.py").write_text(
        "import torch\n\n\nclass Timed(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.LSTM(4, 8)\n\n"
        "    def forward(self, x):\n        return self.layer(x)[0]\n"
    )
    torch.save(torch.rand(5, 1, 4), tmp_path / "x.pt")
    work, said = tmp_path / "work", list[str]()
    work.mkdir()
    build(BuildOptions(model_file=tmp_path / "timed.py", example=tmp_path / "x.pt"), work, said.append)
    assert [line for line in said if line.startswith("not batched")] == [
        "not batched, requests go through the model one by one: the output 'output' of a row depends on the "
        "other rows of the batch, which are other clients'"
    ]
    assert "  in: x FP32[5, 1, 4]" in said


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        ("x.softmax(-1)", "it takes the batch size of the example only; --dynamic-batch 1:64 lets it vary"),
        ("x / (1 + x.abs().amax())", "not batched, requests go through the model one by one: the output "),
    ],
)
def test_an_export_is_told_to_free_its_batch_only_where_rows_are_independent(
    forward: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        f"    def forward(self, x):\n        return {forward}\n"
    )
    torch.save(torch.rand(2, 4), tmp_path / "x.pt")
    work, said = tmp_path / "work", list[str]()
    work.mkdir()
    options = BuildOptions(
        model_file=tmp_path / "net.py", example=tmp_path / "x.pt", model_format="export", verify=False
    )
    build(options, work, said.append)
    told = [one for one in said if one.startswith(("it takes the batch size", "not batched"))]
    assert len(told) == 1
    assert told[0].startswith(line)
