"""`torchere archive --quantize`: the archive records its engine and report, and serves what was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from torchere.archiver.models.quantize import candidates as quantise_candidates
from torchere.archiver.models.verify import compare as verify
from torchere.archiver.reader import open_archive
from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.serving.commands.cli import main

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        )

    def forward(self, x):
        return self.layers(x)
"""

pytestmark = pytest.mark.skipif(
    not torch.backends.quantized.supported_engines, reason="this build of torch has no int8 engine"
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line for static int8, its inputs beside it in the current directory."""
    monkeypatch.setattr(quantise_candidates, "_BUDGET_S", 0.01)
    monkeypatch.setattr(verify, "_BUDGET_S", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "samples").mkdir()
    torch.manual_seed(1)
    for index in range(4):
        torch.save(torch.rand(2, 3, 12, 12), tmp_path / "samples" / f"{index}.pt")
    return [
        *("archive", "--model-name", "net", "--model-file", "net.py"),
        *("--quantize", "int8-static", "--samples", "samples", "--example", "samples/0.pt"),
        "--accept-slower",
    ]


@pytest.mark.usefixtures("measured_memory")
def test_the_archive_says_which_engine_and_how_well_and_the_handler_answers_as_reported(
    command: list[str], tmp_path: Path
) -> None:
    assert main(command) == 0

    archive = open_archive(tmp_path / "net.mar")
    config = yaml.safe_load(archive.read_text("model-config.yaml"))
    report = json.loads(archive.read_text("MAR-INF/report.json"))
    assert config["torchscript"]["quantized_engine"] == report["engine"]
    assert report["engine"] in torch.backends.quantized.supported_engines
    assert report["accepted"] is True
    assert 0 < report["difference"]["drift"] < 0.1
    assert any("engines: " in note for note in report["notes"])
    assert report["packed"]["memory_bytes"] is not None
    folder = archive.extract(tmp_path / "unpacked")
    handler = BaseHandler()
    handler.initialize(
        Context(
            model_name="net",
            model_dir=str(folder),
            manifest=json.loads(archive.manifest.dump()),
            gpu=None,
            batch_size=1,
            mms_version="0",
            model_yaml_config=config,
        )
    )
    rows = torch.rand(3, 3, 12, 12)
    assert "quantized::" in str(handler.model.inlined_graph)
    assert handler.model(rows).shape == (3, 10)


def test_the_archive_holds_the_bytes_that_were_measured(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []
    real_load = torch.jit.load

    def spy(source: str | io.BytesIO, **options: Any) -> Any:
        if isinstance(source, io.BytesIO):
            measured.append(source.getvalue())
        return real_load(source, **options)

    monkeypatch.setattr(torch.jit, "load", spy)
    assert main(command) == 0

    folder = open_archive(tmp_path / "net.mar").extract(tmp_path / "unpacked")
    assert (folder / "model.pt").read_bytes() in measured
    said = capsys.readouterr().err
    assert said.count("tracing and freezing ...") == 1  # of fp32, to compare


def test_a_model_that_drifts_is_not_packed_and_the_status_is_2(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--max-drift", "1e-9"]) == 2

    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("torchere archive: the packed model answers too differently from the original one")
    assert not (tmp_path / "net.mar").exists()
    for advice in (["--max-drift", "0.5"], ["--max-drift", "1e-9", "--accept-drift"]):
        assert advice[-1] in last or advice[0] in last
        assert main([*command, *advice, "--force"]) == 0


def test_force_overwrites_and_does_not_accept_a_drift(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "net.mar").write_text("the old one")

    assert main([*command, "--max-drift", "1e-9", "--force"]) == 2

    assert (tmp_path / "net.mar").read_text() == "the old one"


def test_a_drift_that_is_accepted_is_packed_and_the_report_says_that_it_was_too_far(
    command: list[str], tmp_path: Path
) -> None:
    assert main([*command, "--max-drift", "1e-9", "--accept-drift"]) == 0

    report = json.loads(open_archive(tmp_path / "net.mar").read_text("MAR-INF/report.json"))
    assert (report["accepted"], report["max_drift"]) == (False, 1e-9)


@pytest.mark.parametrize(("method", "is_told"), [("int8-dynamic", True), ("int8-static", False)])
def test_that_a_batch_shares_one_scale_is_told_where_it_does(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, is_told: bool
) -> None:
    command[command.index("int8-static")] = method
    assert main(command) == 0
    said = capsys.readouterr()
    assert ("all rows of a batch share one scale" in said.out + said.err) is is_told
    report = json.loads(open_archive(tmp_path / "net.mar").read_text("MAR-INF/report.json"))
    assert any("all rows of a batch share one scale" in note for note in report["notes"]) is is_told


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_int8_is_compared_at_each_end_of_a_free_size(
    command: list[str], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum over a text grows with its length, beyond the ranges of the samples."""
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        torch.manual_seed(0)\n"
        "        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)\n\n"
        f"    def forward(self, x):\n        return self.second(self.first(x).relu().{kind}(1))\n"
    )
    for index in range(4):
        torch.save(torch.rand(2, 8, 8), tmp_path / "samples" / f"{index}.pt")

    assert main([*command, "--dynamic", "x:1=4:256"]) == (2 if kind == "sum" else 0)

    said = "when x_1 is 256: drift" in (refusal := capsys.readouterr().err)
    assert said is (kind == "sum")
    assert ("narrow --dynamic, calibrate with --samples of all its sizes" in refusal) is said


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("int8-static", "torchscript"),
        ("int8-dynamic", "torchscript"),
        ("int8-static", "export"),
    ],
)
def test_an_exported_program_is_quantised_as_the_model_that_it_was_made_from(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, target: str
) -> None:
    if target == "export":
        pytest.importorskip("torchao", reason="torchao is not installed (extra quantize)")
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    model = scope["Net"]().eval()
    sizes = ({0: torch.export.Dim("batch", max=64)},)
    program = torch.export.export(model, (torch.rand(2, 3, 12, 12),), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "net.pt2")
    at = command.index("--model-file")
    command[at : at + 2] = ["--serialized-file", "net.pt2"]
    command[command.index("int8-static")] = method

    assert main([*command, "--format", target]) == 0, capsys.readouterr().err

    report = json.loads(open_archive(tmp_path / "net.mar").read_text("MAR-INF/report.json"))
    assert 0 < report["difference"]["drift"] < 0.1
