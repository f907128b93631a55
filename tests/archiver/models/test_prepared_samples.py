"""Pictures as example and samples: prepared by the handler, in `archive` and in `compare` alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.archiver.models.quantize import candidates
from torchere.archiver.models.verify import compare as verify
from torchere.archiver.reader import open_archive
from torchere.handlers.vision.transform import ImageTransform
from torchere.serving.commands.cli import main

MODEL = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        )
"""
IMAGE = "handler: {image: {resize: 36, crop: 32, mean: [0.5, 0.4, 0.3], std: [0.2, 0.2, 0.2]}}\n"
TRANSFORM = ImageTransform(36, 32, (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten photographs of 45 x 60 pixels in `photos`, one in `photo.png`, and what describes the model."""
    monkeypatch.setattr(candidates, "_BUDGET_S", 0.01)
    monkeypatch.setattr(verify, "_BUDGET_S", 0.01)
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    Path("model-config.yaml").write_text(IMAGE)
    Path("photos").mkdir()
    random = np.random.default_rng(0)
    for index in range(10):
        pixels = (random.random((45, 60, 3)) * random.integers(20, 255)).astype(np.uint8)
        Image.fromarray(pixels).save(f"photos/{index}.png")
    Image.open("photos/0.png").save("photo.png")
    np.save("tensor.npy", random.random((1, 3, 32, 32), np.float32))
    return tmp_path


def pack(name: str, *flags: str, example: str = "photo.png") -> int:
    return main(
        [
            *("archive", "--model-name", name, "--model-file", "net.py", "--example", example),
            *("--handler", "image_classifier", "--config-file", "model-config.yaml", "--force"),
            *flags,
        ]
    )


def test_an_example_photograph_gives_a_signature_of_the_size_that_the_handler_crops_to(
    folder: Path,
) -> None:
    assert pack("net", "--format", "torchscript") == 0

    signature = json.loads(open_archive(folder / "net.mar").read_text("signature.json"))
    assert signature["inputs"][0]["shape"] == [-1, 3, 32, 32]


@pytest.mark.parametrize(
    ("batch_size", "flags", "rows"),
    [
        (8, ("--format=export", "--dynamic-batch=1:8"), None),
        (9, ("--format=export", "--dynamic-batch=1:8"), 8),
        (8, ("--format=export",), 1),
        (1, ("--format=export",), None),
        (8, ("--format=export", "--handler=tensor"), None),  # it gives the model rows one by one
        (8, ("--format=torchscript",), None),
    ],
)
def test_a_batch_size_above_the_rows_that_the_model_takes_is_told(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    batch_size: int,
    flags: tuple[str, ...],
    rows: int | None,
) -> None:
    Path("model-config.yaml").write_text(f"batchSize: {batch_size}\n{IMAGE}")
    assert pack("net", "--no-verify", *flags) == 0
    told = f"model-config.yaml has batchSize: {batch_size}, and the model takes {rows} in its first dimension"
    said = capsys.readouterr().err
    assert (told in said, "batchSize" in said) == (rows is not None, rows is not None)


def test_archive_and_compare_tell_the_same_of_the_same_photographs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack("fp32", "--format", "torchscript") == 0
    flags = ("--quantize", "int8-static", "--samples", "photos", "--max-drift", "0.9", "--accept-slower")
    assert pack("int8", *flags) == 0
    report = json.loads(open_archive(folder / "int8.mar").read_text("MAR-INF/report.json"))
    capsys.readouterr()

    assert main(["compare", "fp32.mar", "int8.mar", "--data", "photos", "--json"]) == 0

    compared = json.loads(capsys.readouterr().out)
    for figure in ("rows", "drift", "top1"):
        assert compared["difference"][figure] == pytest.approx(report["difference"][figure], rel=1e-3)


def test_photographs_and_tensors_prepared_by_hand_give_the_same_archive(folder: Path) -> None:
    flags = ("--quantize", "int8-static", "--no-verify")
    assert pack("photos", *flags, "--samples", "photos") == 0
    Path("tensors").mkdir()
    for file in Path("photos").iterdir():
        np.save(f"tensors/{file.stem}.npy", TRANSFORM(Image.open(file))[None].numpy())
    assert pack("tensors", *flags, "--samples", "tensors", example="tensors/0.npy") == 0

    rows = torch.stack([TRANSFORM(Image.open(file)) for file in sorted(Path("photos").iterdir())])
    answers = [
        torch.jit.load(
            str(open_archive(folder / f"{name}.mar").extract(folder / f"{name}-unpacked") / "model.pt")
        )(rows)
        for name in ("photos", "tensors")
    ]
    assert torch.equal(*answers)


def test_convert_prepares_the_example_as_the_archives_handler_does(folder: Path) -> None:
    assert pack("net", "--format", "torchscript") == 0
    arguments = ["--to", "export", "--example", "photo.png", "-o", "new.mar", "--no-verify"]

    assert main(["convert", "net.mar", *arguments]) == 0

    signature = json.loads(open_archive(folder / "new.mar").read_text("signature.json"))
    assert signature["inputs"][0]["shape"][1:] == [3, 32, 32]


def test_the_first_sample_serves_as_the_example_where_none_is_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model-file", "net.py", "--handler", "image_classifier", "--config-file", "model-config.yaml")
    flags = ("--format", "torchscript", "--samples", "photos", "--no-verify")

    assert main(["archive", "--model-name", "net", *given, *flags]) == 0

    assert "the example: photos/0.png, the first of --samples, since" in capsys.readouterr().err
    signature = json.loads(open_archive(folder / "net.mar").read_text("signature.json"))
    assert signature["inputs"][0]["shape"] == [-1, 3, 32, 32]


def test_a_handler_that_takes_no_pictures_is_told_how_they_are_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model-config.yaml").write_text("")

    assert pack("net", "--format", "torchscript", "--handler", "base_handler") == 0

    assert "the handler prepares no pictures: they are taken in their own size" in capsys.readouterr().err


def test_a_folder_of_many_samples_is_used_in_part_and_that_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--format", "torchscript", "--samples", "photos", "--max-samples", "4")

    assert pack("net", *flags) == 0

    assert "samples: 4 of 10 files, evenly spaced; --max-samples sets how many" in capsys.readouterr().err
    report = json.loads(open_archive(folder / "net.mar").read_text("MAR-INF/report.json"))
    assert report["samples"] == 4


def test_a_sample_that_is_no_picture_is_one_line_and_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("photos/notes.txt").write_text("no picture")

    assert pack("net", "--format", "torchscript", "--samples", "photos") == 2

    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "photos/notes.txt: no example that can be read: The request body is not an image" in last


def test_convert_runs_a_handler_of_the_archives_own_only_when_it_is_trusted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(
        "import pathlib\nfrom torchere.handlers.vision.tasks import ImageClassifier\n"
        "pathlib.Path('ran').touch()\n\n\nclass Own(ImageClassifier):\n    pass\n"
    )
    assert pack("net", "--format", "torchscript", "--handler", "own.py", example="tensor.npy") == 0
    assert not Path("ran").exists()  # no picture, so nothing to prepare
    arguments = [
        "convert",
        "net.mar",
        "--to",
        "export",
        "--example",
        "photo.png",
        "-o",
        "new.mar",
        "--no-verify",
    ]

    assert main(arguments) == 2
    assert "say --allow-code if you trust the archive" in capsys.readouterr().err
    assert not Path("ran").exists()

    assert main([*arguments, "--allow-code"]) == 0
    assert Path("ran").exists()
