"""Which form of a model is packed, what is refused, and that the advice of a refusal works."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.files import Packed
from torchere.archiver.models.measure import cost
from torchere.archiver.models.measure.difference import Difference
from torchere.archiver.models.quantize import candidates, methods, trials
from torchere.archiver.models.quantize.trials import FP32, Trial, choose_trial, methods_tried, table
from torchere.archiver.models.verify.report import Machine, Report, Side
from torchere.archiver.reader import open_archive
from torchere.archiver.signature import Signature
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.serving.commands.cli import main

MODEL = """
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.{activation}(), nn.Conv2d(16, 16, 3), nn.{activation}(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        )
"""


def trial(method: str, ms: float, drift: float = 0.01) -> Trial:
    """A form that takes so long where fp32 takes 10 ms."""
    report = Report(
        Side("original", None, None, {1: 20.0}),
        Side("packed", None, None, {1: ms}),
        Difference(10, 0.1, 0.1, drift, None, None),
        0.25,
        10,
        Machine("a processor", "AVX2", False, "2.13.0"),
        fp32=Side("fp32", None, None, {1: 10.0}),
    )
    packed = Packed(Path("model.pt"), torch.relu, Path())
    return Trial(method, packed, TorchScriptOptions(), Signature((), ()), None, report)


@pytest.mark.parametrize(
    ("made", "method", "chosen"),
    [
        ([trial("int8-static", 4.0), trial("int8-dynamic", 3.0)], "int8", "int8-dynamic"),
        ([trial("int8-static", 4.0), trial("int8-dynamic", 3.0, drift=0.9)], "int8", "int8-static"),
        # None is within its limit: the fastest, for the verification to refuse.
        ([trial("int8-static", 4.0, 0.5), trial("int8-dynamic", 3.0, 0.9)], "int8", "int8-dynamic"),
        ([trial(FP32, 10.0, 0.0), trial("int8-static", 4.0), trial("bf16", 5.0)], "auto", "int8-static"),
        # Less than a tenth is not worth any drift.
        ([trial(FP32, 10.0, 0.0), trial("int8-static", 9.5)], "auto", FP32),
        ([trial(FP32, 10.0, 0.0), trial("int8-static", 2.0, drift=0.9)], "auto", FP32),
    ],
)
def test_the_fastest_form_that_agrees_is_chosen(made: list[Trial], method: str, chosen: str) -> None:
    assert choose_trial(made, method).method == chosen


def test_the_table_shows_each_candidate_with_its_time_drift_and_verdict() -> None:
    made = [
        trial(FP32, 10.0, 0.0),
        trial("int8-static", 4.0),
        trial("int8-dynamic", 9.5),
        trial("bf16", 20.0),
    ]

    lines = table(made, {"int8-trained": "no fake quantisation"}, made[1]).splitlines()

    assert [line.split("  ")[0] for line in lines] == [
        *("candidate", "int8-static", "int8-dynamic", FP32, "bf16", "int8-trained"),
    ]
    assert "0.40 x fp32" in lines[1]
    assert [line.rpartition("  ")[2] for line in lines[1:]] == [
        "packed",
        "gains too little",
        "slower",
        "not faster than fp32",
        "can't be made: no fake quantisation",
    ]


@pytest.mark.parametrize(
    ("module", "tried"),
    [
        (nn.Sequential(nn.Linear(4, 4)), ("int8-static", "int8-dynamic")),
        (nn.Sequential(*[nn.Conv1d(4, 4, 1) for _ in range(9)], nn.Linear(4, 4)), ("int8-static",)),
        (nn.Sequential(weight_norm(nn.Linear(4, 4))), ("int8-static", "int8-dynamic")),
        (nn.Sequential(nn.ReLU()), ()),
        (nn.LSTM(4, 4), ("int8-static", "int8-dynamic")),
    ],
    ids=["linear", "one linear layer behind convolutions", "weight normalisation", "no weights", "recurrent"],
)
def test_auto_tries_what_suits_the_layers(
    module: nn.Module, tried: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "processor_has_bf16", lambda: False)

    assert methods_tried(module, "auto", "torchscript", [0]) == tried
    assert "int8-static" not in methods_tried(module, "auto", "torchscript", [])


def kind_of(model: Any) -> str:
    """Return the method that a model was quantised by."""
    graph = str(getattr(model, "inlined_graph", ""))
    signs = {
        "quantized::conv2d": "int8-static",
        "quantized::linear_dynamic": "int8-dynamic",
        "BFloat16": "bf16",
    }
    return next((kind for sign, kind in signs.items() if sign in graph), FP32)


Prices = Callable[..., None]


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> Prices:
    """Set what each kind of model takes, in ms: which is faster on this machine matters to no test here."""

    def set_prices(**ms: float) -> None:
        known = {FP32: 10.0, **{name.replace("_", "-"): value for name, value in ms.items()}}

        def priced(models: Sequence[Any], _arguments: object, _budget_s: float) -> list[float]:
            return [known[kind_of(model)] for model in models]

        monkeypatch.setattr(cost, "processor_ms", priced)

    return set_prices


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Pack a network of convolutions with one linear layer; returns the exit status."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    Path("net.py").write_text(MODEL.format(activation="ReLU"))
    Path("samples").mkdir()
    for index in range(8):
        torch.save(torch.rand(2, 3, 12, 12), f"samples/{index}.pt")
    torch.save(nn.Sequential(), "unused.pt")

    def packed(*flags: str) -> int:
        command = ["archive", "--model-name", "net", "--model-file", "net.py", "--force"]
        return main([*command, "--example", "samples/0.pt", "--samples", "samples", *flags])

    return packed


def test_a_method_that_is_not_faster_is_refused_and_the_advice_works(
    pack: Callable[..., int], prices: Prices, capsys: pytest.CaptureFixture[str]
) -> None:
    prices(int8_dynamic=10.0, int8_static=4.0)

    assert pack("--quantize", "int8-dynamic") == 2

    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "int8-dynamic is not faster than fp32 on this processor: 10 -> 10 ms for a batch of 1" in last
    assert "leaves the 2 convolutions in fp32; --quantize int8-static with --samples" in last
    assert pack("--quantize", "int8-static") == 0
    assert pack("--quantize", "auto") == 0
    assert pack("--quantize", "int8-dynamic", "--accept-slower") == 0
    assert "warning: int8-dynamic is not faster than fp32" in capsys.readouterr().err


def test_bf16_that_is_slower_is_refused(
    pack: Callable[..., int],
    prices: Prices,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(methods, "processor_has_bf16", lambda: True)
    prices(bf16=23.0)

    assert pack("--quantize", "bf16") == 2

    assert "bf16 is not faster than fp32 on this processor: 10 -> 23 ms" in capsys.readouterr().err


def test_activations_that_stay_in_fp32_are_named_with_what_helps(
    pack: Callable[..., int], prices: Prices, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("net.py").write_text(MODEL.format(activation="SiLU"))
    prices(int8_static=9.5)

    assert pack("--quantize", "int8-static") == 0

    said = capsys.readouterr().err
    assert "int8-static gains little: 10 -> 9.5 ms for a batch of 1" in said
    assert "in TorchScript 2 SiLU compute in fp32 and convert from and to int8 each; --format aoti" in said


def test_auto_packs_the_fastest_with_one_table(
    pack: Callable[..., int],
    prices: Prices,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(trials, "processor_has_bf16", lambda: True)
    monkeypatch.setattr(methods, "processor_has_bf16", lambda: True)
    prices(int8_dynamic=10.0, int8_static=4.0, bf16=23.0)

    assert pack("--quantize", "auto") == 0

    said = capsys.readouterr().err
    (row,) = (line for line in said.splitlines() if line.startswith("int8-static, "))
    assert "0.40 x fp32" in row
    assert row.endswith("packed")
    (row,) = (line for line in said.splitlines() if line.startswith("bf16  "))
    assert row.endswith("not faster than fp32")
    report = json.loads(open_archive(tmp_path / "net.mar").read_text("MAR-INF/report.json"))
    assert report["speedup"] == pytest.approx(2.5)
    assert report["engine"] is not None


def test_auto_packs_fp32_where_nothing_gains_or_can_be_made(
    pack: Callable[..., int],
    prices: Prices,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(trials, "processor_has_bf16", lambda: False)
    monkeypatch.setattr(candidates, "calibrate", fail)
    prices(int8_dynamic=10.0)

    assert pack("--quantize", "auto") == 0

    said = capsys.readouterr().err
    assert "can't be made: int8-static failed: RuntimeError: no such operator" in said
    (row,) = (line for line in said.splitlines() if line.startswith("fp32 "))
    assert row.split() == ["fp32", "1.00", "x", "fp32", "0", "packed"]  # not a measurement of itself
    (head,) = (line for line in said.splitlines() if "original" in line)
    assert head.split() == ["original", "packed"]
    assert json.loads(open_archive(tmp_path / "net.mar").read_text("MAR-INF/report.json"))["engine"] is None


def test_int8_goes_on_with_the_other_method_when_one_fails_and_says_so(
    pack: Callable[..., int],
    prices: Prices,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(candidates, "calibrate", fail)
    prices(int8_dynamic=4.0)

    assert pack("--quantize", "int8") == 0

    assert "int8-static failed: RuntimeError: no such operator" in capsys.readouterr().err


def test_methods_that_choose_need_the_verification(
    pack: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack("--quantize", "auto", "--no-verify") == 2

    assert "chooses by measuring, which --no-verify leaves out" in capsys.readouterr().err


def test_a_model_that_torch_cannot_copy_is_refused_before_the_first_trial() -> None:
    model = weight_norm(nn.Linear(4, 4))
    model.last = model(torch.rand(2, 4))  # with a gradient
    with pytest.raises(ModelRefused, match=r"^looking for layers to quantise failed: "):
        methods_tried(model, "auto", "torchscript", [])
