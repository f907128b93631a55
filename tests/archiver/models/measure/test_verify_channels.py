"""Drift channel by channel: what one figure over a whole output does not show, and what is no alarm."""

from __future__ import annotations

import pytest
import torch

from torchere.archiver.models.measure.difference import Difference, difference


def compared(wanted: torch.Tensor, found: torch.Tensor, samples: int = 1) -> Difference:
    """Of these values, given in so many samples along dimension 0."""
    return difference(
        ((one,), (other,)) for one, other in zip(wanted.chunk(samples), found.chunk(samples), strict=True)
    )


@pytest.fixture
def detections() -> torch.Tensor:
    """[4, 64, 24]: four coordinates up to 640 and twenty scores for each of 64 places."""
    torch.manual_seed(0)
    return torch.cat([torch.rand(4, 64, 4) * 640, torch.rand(4, 64, 20)], 2)


def silent(detections: torch.Tensor, channels: slice) -> torch.Tensor:
    found = detections.clone()
    found[:, :, channels] = 0.0
    return found


@pytest.mark.parametrize("samples", [1, 4])
def test_scores_that_are_all_zero_are_seen_beside_boxes_that_are_much_larger(
    detections: torch.Tensor, samples: int
) -> None:
    found = compared(detections, silent(detections, slice(4, None)), samples)

    assert found.drift < 0.01
    assert found.channel is not None
    assert (found.channel.dimension, found.channel.channel >= 4, found.channel.drift > 1) == (2, True, True)
    (one,) = found.silenced
    assert (one.dimension, one.count, one.of, one.first) == (2, 20, 24, (4, 5, 6))
    assert "20 of 24 channels (dimension 2: 4, 5, 6, ...)" in one.note


def test_channels_along_dimension_1_are_seen_too(detections: torch.Tensor) -> None:
    wanted, got = (one.transpose(1, 2) for one in (detections, silent(detections, slice(4, None))))

    (one,) = compared(wanted, got).silenced

    assert (one.dimension, one.count) == (1, 20)


def test_the_worst_channel_is_measured_by_its_own_spread(detections: torch.Tensor) -> None:
    got = detections.clone()
    got[:, :, 7] = detections[:, :, 7] + 0.1

    found = compared(detections, got)

    assert found.silenced == ()
    assert found.channel is not None
    assert found.channel.channel == 7
    assert found.channel.drift == pytest.approx(0.1 / 0.289, rel=0.1)  # of a uniform distribution


def test_a_channel_far_from_zero_keeps_its_small_spread_exactly() -> None:
    wanted = torch.rand(1000, 2, dtype=torch.float64) * torch.tensor([1.0, 100.0]) + 300.0
    got = wanted.clone()
    got[:, 1] += 10.0

    found = compared(wanted, got, samples=10)

    assert found.channel is not None
    assert found.channel.drift == pytest.approx(10.0 / 28.9, rel=0.1)


def test_few_values_tell_nothing() -> None:
    wanted = torch.rand(7, 4)

    found = compared(wanted, torch.zeros(7, 4))

    assert (found.silenced, found.channel) == ((), None)
    assert compared(torch.rand(8, 4), torch.zeros(8, 4)).silenced != ()


def test_a_channel_that_is_near_constant_in_the_original_may_be_constant() -> None:
    wanted = torch.cat([torch.rand(100, 1), 5.0 + torch.rand(100, 1) / 10], 1)
    got = torch.cat([wanted[:, :1], torch.full((100, 1), 5.05)], 1)

    assert compared(wanted, got).silenced == ()


def test_a_rare_and_small_activation_that_is_rounded_away_is_no_alarm() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(40, 512)
    wanted[:, :20] = 0.0
    wanted[torch.arange(20), torch.arange(20)] = 0.001  # each in one row of 40
    got = wanted.clone()
    got[:, :20] = 0.0

    assert compared(wanted, got, samples=40).silenced == ()


def test_outliers_alone_are_no_alarm() -> None:
    wanted = torch.zeros(40, 3)
    wanted[3, 0] = wanted[7, 0] = 1.0
    wanted[:, 1:] = torch.rand(40, 2)
    got = wanted.clone()
    got[:, 0] = 0.0

    assert compared(wanted, got).silenced == ()


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 0), (5,), (2, 0, 3)])
def test_outputs_without_channels_are_compared_as_ever(shape: tuple[int, ...]) -> None:
    rows = torch.ones(shape)

    found = difference([((rows,), (rows.clone(),))])

    assert (found.drift, found.channel, found.silenced) == (0.0, None, ())


def test_samples_of_different_sizes_have_no_channels_there() -> None:
    torch.manual_seed(0)
    pairs = [((torch.rand(4, size, 8),), (torch.zeros(4, size, 8),)) for size in (5, 6, 7)]

    found = difference(pairs)

    assert {one.dimension for one in found.silenced} == {2}
