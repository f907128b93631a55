"""When two results are the same within what a model's arithmetic allows."""

from __future__ import annotations

import pytest
import torch

from torchere.archiver.models.probe.precision import COARSE, FINE, Precision


@pytest.mark.parametrize("precision", [FINE, COARSE])
def test_classes_are_equal_or_not(precision: Precision) -> None:
    classes = torch.tensor([[20, 3, 7, 0]])
    assert precision.differs(classes, torch.tensor([[20, 4, 7, 0]]))
    assert not precision.differs(classes, classes)


def test_few_of_many_classes_may_fall_on_the_other_side() -> None:
    classes = torch.arange(100)[None]
    other = classes.clone()
    other[0, 5] += 1
    assert not COARSE.differs(classes, other)
    assert FINE.differs(classes, other)


@pytest.mark.parametrize("filling", [-1e9, -1e4, torch.finfo(torch.float32).min, float("-inf")])
@pytest.mark.parametrize("precision", [FINE, COARSE])
def test_what_fills_places_hides_no_other_value(precision: Precision, filling: float) -> None:
    wanted = torch.tensor([[0.5, 1.0, filling, filling]])
    assert precision.differs(wanted, torch.tensor([[0.4, 1.0, filling, filling]]))
    assert not precision.differs(wanted, wanted.clone())


def test_values_that_are_nearly_0_are_rounded_as_those_beside_them() -> None:
    wanted = torch.tensor([[1e-6, 2.0, -1.0]])
    assert not FINE.differs(wanted, torch.tensor([[2e-6, 2.0, -1.0]]))
