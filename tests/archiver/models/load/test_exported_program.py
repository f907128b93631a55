"""Exported programs with inputs by keyword are packed and served as others are: by position."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.models.load.exported_program import (
    ServedProgram,
    keyword_inputs,
    take_by_position,
)
from torchere.archiver.models.load.source import read_source
from torchere.handlers.compiled import load as aot


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 2)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, shift: torch.Tensor
    ) -> torch.Tensor:
        y: torch.Tensor = self.one(x) + shift
        return y if mask is None else y * mask


X, SHIFT, MASK = torch.ones(2, 4), torch.full((2, 2), 2.0), torch.full((2, 2), 3.0)


@pytest.fixture
def module() -> Masked:
    torch.manual_seed(0)
    return Masked().eval()


@pytest.fixture
def program(module: Masked, tmp_path: Path) -> Path:
    """Its keywords stand in another order than in `forward`."""
    path = tmp_path / "masked.pt2"
    given = {"shift": SHIFT, "mask": MASK}
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    free = {"x": batch, "shift": batch, "mask": batch}
    torch.export.save(torch.export.export(module, (X,), given, dynamic_shapes=free), path)
    return path


def test_inputs_by_keyword_are_taken_by_position(program: Path, module: Masked) -> None:
    exported = torch.export.load(program)
    assert keyword_inputs(exported) == (1, ("shift", "mask"))
    take_by_position(exported)
    assert keyword_inputs(exported) == (3, ())
    wanted = module(X, mask=MASK, shift=SHIFT)
    assert torch.allclose(exported.module()(X, SHIFT, MASK), wanted)
    take_by_position(exported)
    assert keyword_inputs(exported) == (3, ())


def test_the_example_of_such_a_program_is_in_the_order_of_its_inputs(program: Path) -> None:
    source = read_source(program, None, None, False)
    assert source.names == ("x", "shift", "mask")
    assert source.example is not None
    assert torch.equal(source.example[2], MASK)


@pytest.mark.parametrize("wanted", ["keep", "torchscript", "export"])
def test_such_a_program_is_packed_and_answers(
    program: Path, module: Masked, pack: Any, serve: Any, wanted: str
) -> None:
    archive = pack(serialized_file=program, model_format=wanted, verify=True)
    with zipfile.ZipFile(archive) as opened:
        signature = json.loads(opened.read("signature.json"))
    assert [spec["name"] for spec in signature["inputs"]] == ["x", "shift", "mask"]
    row = {"x": X[0].tolist(), "shift": SHIFT[0].tolist(), "mask": MASK[0].tolist()}
    (answer,) = serve(archive, [{"body": row}])
    assert answer == pytest.approx(module(X, MASK, shift=SHIFT)[0].tolist(), rel=1e-5)


def test_a_server_goes_on_taking_keywords(program: Path, module: Masked, tmp_path: Path) -> None:
    run = aot.load_package(str(program), str(tmp_path), "cpu")
    wanted = module(X, mask=MASK, shift=SHIFT)
    assert torch.allclose(run(X, shift=SHIFT, mask=MASK), wanted)
    assert torch.allclose(run(X, SHIFT, MASK), wanted)


class Counting(torch.nn.Module):
    """Counts its calls in a buffer, and answers in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 2)
        self.dropout = torch.nn.Dropout(0.5)
        self.calls = torch.nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        return {"y": self.dropout(self.one(x)), "calls": self.calls.clone()}


@pytest.fixture
def served() -> ServedProgram:
    torch.manual_seed(0)
    free = ({0: torch.export.Dim("batch", min=1, max=8)},)
    return ServedProgram(torch.export.export(Counting().eval(), (X,), dynamic_shapes=free))


def test_inputs_of_one_kind_are_checked_once_and_answered_alike(served: ServedProgram) -> None:
    checked: list[Any] = []
    served.checked.register_forward_hook(lambda *_: checked.append(1))
    answers = [served(X) for _ in range(3)]
    assert len(checked) == 1
    assert all(torch.equal(one["y"], answers[0]["y"]) for one in answers)
    served(torch.ones(3, 4))
    assert len(checked) == 2


def test_what_a_program_writes_into_a_buffer_is_seen_with_checks_and_without(served: ServedProgram) -> None:
    calls = [float(served(rows)["calls"]) for rows in (X, X, torch.ones(3, 4), X)]
    assert calls == [1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [torch.ones(9, 4), torch.ones(2, 5), torch.ones(2, 4).double(), [1.0]])
def test_what_a_program_does_not_take_is_refused_behind_what_it_takes(
    served: ServedProgram, wrong: Any
) -> None:
    served(X)
    served(X)
    for _ in range(2):
        with pytest.raises((RuntimeError, AssertionError, TypeError, ValueError, AttributeError)):
            served(wrong)


def test_weights_that_are_replaced_are_used_without_checks_too(served: ServedProgram) -> None:
    before = served(X)["y"]
    served._apply(lambda tensor: tensor * 2)
    assert torch.allclose(served(X)["y"], 2 * before)


def test_the_kinds_of_inputs_that_are_remembered_are_bounded(
    served: ServedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchere.archiver.models.load.exported_program._MOST_KINDS", 3)
    for rows in range(1, 9):
        served(torch.ones(rows, 4))
    assert len(served._passed) <= 3
