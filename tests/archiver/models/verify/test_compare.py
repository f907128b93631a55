"""The packed model against the original: what is measured, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.measure.cost import batch_of
from torchere.archiver.models.measure.difference import Difference, chance_of_worst
from torchere.archiver.models.verify.compare import (
    refuse_drift,
    refuse_other_sizes,
    verify,
    with_memory,
)
from torchere.archiver.models.verify.report import Machine, Report, Side
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.serving.commands.compare import picture

Run = Callable[..., torch.Tensor]
SAMPLES = [(torch.randn(2, 8),), (torch.randn(3, 8),)]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


@pytest.fixture
def report() -> Report:
    """One that is accepted, with everything in it."""
    return Report(
        Side("fp32.mar", 4_000_000, 9_000_000, {1: 4.0, 8: 24.0}),
        Side("int8.mar", 1_000_000, None, {1: 2.0, 8: 8.0}),
        Difference(5, 0.5, 0.01, 0.05, 0.999, 0.8),
        0.3,
        2,
        Machine("a processor", "AVX2", False, "2.13.0"),
        engine="onednn",
        notes=("engines: onednn 2 ms",),
    )


def test_a_model_that_answers_as_the_original_is_accepted(network: nn.Module) -> None:
    report = verify(network, to_torchscript(network, SAMPLES[0]), SAMPLES, max_drift=1e-3)

    assert report.accepted
    assert report.difference.rows == 5
    assert report.samples == 2
    assert set(report.packed.latency_ms) == {1, 8}
    assert all(latency > 0 for latency in report.original.latency_ms.values())
    refuse_drift(report)


def test_a_model_that_drifts_is_refused_in_one_line_that_says_by_how_much(network: nn.Module) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = network(x)
        return answer * 1.5

    report = verify(network, wrong, SAMPLES, max_drift=0.3)

    assert not report.accepted
    assert "REFUSED" in report.table()
    with pytest.raises(
        ModelRefused, match=r"drift 0\.5, expected at most 0\.3.*--max-drift.*--accept-drift"
    ) as refusal:
        refuse_drift(report)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ModelRefused, match=r"\(largest difference [\d.]+\); take another --format, or allow"):
        refuse_drift(report, quantised=False)


def test_a_model_without_batches_is_timed_on_the_sample_as_it_is() -> None:
    report = verify(torch.relu, torch.relu, [(torch.randn(3),)], max_drift=0.0, batched=False)

    assert set(report.packed.latency_ms) == {1}


def test_verifying_without_samples_is_refused() -> None:
    with pytest.raises(ModelRefused, match="there are no samples"):
        verify(torch.relu, torch.relu, [], max_drift=0.0)


def test_a_model_that_changes_its_input_does_not_spoil_the_comparison() -> None:
    samples = [(torch.tensor([[-1.0, 2.0]]),)]

    report = verify(torch.relu_, torch.relu, samples, max_drift=0.0)

    assert report.accepted
    assert samples[0][0].tolist() == [[-1.0, 2.0]]


def test_torch_uses_as_many_threads_afterwards_as_before(network: nn.Module) -> None:
    before = torch.get_num_threads()

    verify(network, network, SAMPLES, max_drift=0.0)

    assert torch.get_num_threads() == before


def test_size_and_memory_are_measured_on_the_files(network: nn.Module, tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1_000_000, bias=False)  # 32 MB

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.layer(x)
            return rows[:, :4]

    files = (tmp_path / "small.pt", tmp_path / "large.pt")
    models = (to_torchscript(network, SAMPLES[0]), to_torchscript(Large().eval(), SAMPLES[0]))
    for model, file in zip(models, files, strict=True):
        model.save(str(file))

    report = verify(*models, SAMPLES, max_drift=1.0, files=files)
    report = with_memory(report, files, (TorchScriptOptions(), TorchScriptOptions()), SAMPLES[0])

    assert report.packed.size_bytes == files[1].stat().st_size
    assert report.original.memory_bytes is not None
    assert report.packed.memory_bytes is not None
    assert report.packed.memory_bytes > report.original.memory_bytes + 25e6


def test_a_file_that_does_not_load_has_no_memory_figure(network: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "broken.pt"
    file.write_bytes(b"no model")

    report = verify(network, network, SAMPLES, max_drift=0.0, files=(None, file))
    report = with_memory(report, (None, file), (TorchScriptOptions(), TorchScriptOptions()), SAMPLES[0])

    assert (report.packed.size_bytes, report.packed.memory_bytes) == (8, None)


def test_the_json_says_all_and_holds_no_infinity(report: Report) -> None:
    found = json.loads(report.to_json())

    assert found["accepted"] is True
    assert (found["engine"], found["notes"]) == ("onednn", ["engines: onednn 2 ms"])
    assert found["packed"] == {
        "name": "int8.mar",
        "size_bytes": 1_000_000,
        "memory_bytes": None,
        "latency_ms": {"1": 2.0, "8": 8.0},
    }
    broken = Report(
        report.original,
        report.packed,
        Difference(1, float("inf"), float("nan"), float("inf"), None, None),
        0.3,
        1,
        report.machine,
    )
    assert json.loads(broken.to_json())["difference"]["drift"] is None
    assert json.loads(broken.to_json())["accepted"] is False


def test_the_table_shows_ratios_and_leaves_out_what_was_not_measured(report: Report) -> None:
    lines = report.table().splitlines()

    assert lines[1].split() == ["file", "4.00", "MB", "1.00", "MB", "4.00", "x", "smaller"]
    assert lines[2].split() == ["memory", "9.00", "MB", "-"]
    assert "4.00 x larger" in replace(report, original=report.packed, packed=report.original).table()
    assert lines[4].split() == ["batch", "of", "8", "24", "ms", "8", "ms", "3.00", "x", "faster"]
    assert lines[-1] == "drift 0.05, at most 0.3 wanted: accepted"
    unmeasured = replace(report, original=replace(report.original, memory_bytes=None))
    assert [line.split()[0] for line in unmeasured.table().splitlines()[1:3]] == ["file", "batch"]


def test_rows_of_values_are_not_said_to_be_classes(report: Report) -> None:
    for text in (report.table(), picture(report)):
        assert "largest value at the same place in 80.0% of rows, cosine 0.9990" in text
        assert "class" not in text
    plain = replace(report, difference=Difference(1, 0.0, 0.0, 0.0, None, None))
    assert "drift 0</text>" in picture(plain)


def test_the_picture_has_a_bar_for_each_figure_of_both_and_escapes_names(report: Report) -> None:
    text = picture(report)

    assert text.count("<rect") == 1 + 2 + 2 * 3  # the ground, the legend; file and two batches
    assert "fp32.mar" in text
    assert "4.0 MB" in text
    named = Report(Side("<a&b>", 1, 1, {}), report.packed, report.difference, 0.3, 1, report.machine)
    assert "&lt;a&amp;b&gt;" in picture(named)


@pytest.mark.parametrize(("size", "expected"), [(1, [0]), (3, [0, 1, 2]), (5, [0, 1, 2, 0, 1])])
def test_a_batch_is_made_of_the_samples_rows_and_repeats_them(size: int, expected: list[int]) -> None:
    samples = [(torch.tensor([[0], [1]]),), (torch.tensor([[2]]),), (torch.tensor([[9, 9]]),)]

    (rows,) = batch_of(samples, size)

    assert rows[:, 0].tolist() == expected


def test_a_model_is_timed_before_it_is_compared_and_a_batch_of_one_first(network: nn.Module) -> None:
    # An int8 layer of oneDNN prepares its weights for the shape of its first run: a server's warm-up.
    rows: list[int] = []

    def packed(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        answer: torch.Tensor = network(x)
        return answer

    verify(network, packed, SAMPLES, max_drift=0.0)

    assert rows[0] == 1
    assert rows[-2:] == [2, 3]  # the samples


def test_a_channel_that_is_off_is_refused_though_the_outputs_as_a_whole_are_near() -> None:
    torch.manual_seed(0)
    network = nn.Linear(8, 4).eval()
    network.weight.data[2] *= 0.3
    other = nn.Linear(8, 4).eval()
    other.load_state_dict(network.state_dict())
    other.weight.data[2] += 0.55 * network.weight.data[2].norm() / 8**0.5 * torch.tensor([1.0, -1.0] * 4)

    report = verify(network, other, [(torch.randn(400, 8),)], max_drift=0.25)

    assert report.difference.drift < 0.25
    assert not report.accepted
    with pytest.raises(ModelRefused, match=r"in one output: worst channel: drift 0\.\d+ .*more samples"):
        refuse_drift(report)


def test_the_worst_of_many_channels_over_few_values_may_be_further_off_by_chance() -> None:
    assert chance_of_worst(1000, 13) == pytest.approx(3.0, abs=0.1)
    assert chance_of_worst(10, 100_000) == pytest.approx(1.0, abs=0.01)
    assert chance_of_worst(1, 1) == 1.0


def test_with_a_form_in_fp32_the_ratios_are_to_that(report: Report) -> None:
    found = replace(report, fp32=Side("fp32", 2_000_000, None, {1: 3.0, 8: 8.0}))

    lines = found.table().splitlines()

    assert lines[0].split() == ["fp32.mar", "fp32", "int8.mar"]
    assert lines[3].split() == ["batch", "of", "1", "4", "ms", "3", "ms", "2", "ms", "1.50", "x", "faster"]
    assert found.speedup == pytest.approx(1.5**0.5)
    assert json.loads(found.to_json())["speedup"] == pytest.approx(1.5**0.5)


def test_another_answer_at_another_size_is_refused() -> None:
    """A loop that was unrolled for the example's length gives a shape that is right."""
    example, sizes = (torch.rand(2, 7),), [FreeSize("length", ((0, 1),), 2, 50)]

    def original(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)

    refuse_other_sizes(original, original, example, sizes, 1e-3)
    refuse_other_sizes(original, lambda x: x[:, :7].sum(1), example, [], 1e-3)
    with pytest.raises(ModelRefused, match=r"when length is 9: drift .* --format torchscript --script, "):
        refuse_other_sizes(original, lambda x: x[:, :7].sum(1), example, sizes, 1e-3, quantised=False)
    with pytest.raises(ModelRefused, match=r"when length is 50: drift "):
        refuse_other_sizes(original, lambda x: x[:, :40].sum(1), example, sizes, 1e-3)


def test_a_random_model_gets_the_same_numbers_in_both_forms_at_another_size() -> None:
    sizes = [FreeSize("length", ((0, 1),), 2, 50)]
    refuse_other_sizes(
        lambda x: x + torch.rand_like(x), lambda x: x + torch.rand_like(x), (torch.rand(2, 7),), sizes, 1e-3
    )


def test_indices_of_a_quantised_model_that_change_places_are_named_with_advice_on_that() -> None:
    sizes = [FreeSize("batch", ((0, 0),), 1, 64)]

    def original(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.argsort(1)

    def packed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.argsort(1, descending=len(x) != 4)

    with pytest.raises(
        ModelRefused, match=r"^the quantised model answers .* in output 1 \(INT64\), "
    ) as refusal:
        refuse_other_sizes(original, packed, (torch.rand(4, 8),), sizes, 0.05)
    assert "another --quantize, or allow more by --max-drift; --accept-drift" in str(refusal.value)
    assert "--script" not in str(refusal.value)
