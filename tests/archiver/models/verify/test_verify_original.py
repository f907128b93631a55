"""Originals that nothing can be compared with, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.verify.compare import refuse_drift, verify
from torchere.archiver.models.verify.report import Report

SAMPLES: list[tuple[torch.Tensor, ...]] = [(torch.randn(2, 8),), (torch.randn(3, 8),)]


def random(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5)


def constant(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(2, 3)


def undefined(x: torch.Tensor) -> torch.Tensor:
    return x * math.nan


def report_of(model: object, samples: list[tuple[torch.Tensor, ...]] = SAMPLES) -> Report:
    return verify(model, model, samples, max_drift=1e-3, batched=False)  # type: ignore[arg-type]


def test_dropout_that_is_left_on_is_named_as_the_cause() -> None:
    report = report_of(random)

    with pytest.raises(ModelRefused, match=r"itself drifts by .*F\.dropout .* --accept-drift"):
        refuse_drift(report)
    assert "the original itself drifts by" in report.table()


def test_an_original_that_answers_with_nothing_but_nan_is_refused() -> None:
    report = report_of(undefined)

    assert report.difference.drift == 0.0
    assert not report.accepted
    with pytest.raises(ModelRefused, match=r"answers with nothing but not-a-number.*NaN in the weights"):
        refuse_drift(report)


def test_one_answer_to_all_samples_is_told_and_accepted() -> None:
    report = report_of(constant)

    assert report.accepted
    assert "gives the same answer to samples that differ" in report.table()
    assert report_of(constant, SAMPLES[:1]).doubts == ()


def test_of_a_sound_original_nothing_is_said() -> None:
    assert report_of(nn.Linear(8, 4).eval()).doubts == ()


def test_a_channel_that_went_silent_is_refused_though_the_drift_is_small() -> None:
    def packed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 0.0])

    samples = [(torch.rand(16, 2) * torch.tensor([1000.0, 1.0]),)]
    report = verify(lambda x: x, packed, samples, max_drift=0.4)

    assert report.difference.drift < 0.01
    assert not report.accepted
    with pytest.raises(ModelRefused, match=r"has lost outputs of.*1 of 2 channels \(dimension 1: 1\)"):
        refuse_drift(report)


def test_an_original_that_finds_nothing_is_told() -> None:
    text = "gives nothing for these samples, so that nothing was compared"
    assert text in report_of(lambda x: x[x > 100]).table()
    assert text not in report_of(lambda x: x[x > 0]).table()
