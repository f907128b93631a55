"""What `torchere archive` and `torchere compare` tell of an int8 model, beside the same by hand.

    python benchmarks/archive_and_compare.py                     three models, some five minutes
    python benchmarks/archive_and_compare.py --tree FOLDER       the commands of another checkout
    python benchmarks/archive_and_compare.py --only resnet

Photographs are given as files, as a user has them, to `image_classifier` with its default settings. By hand
means: the handler's transform, each file loaded as `model-config.yaml` says, processor time of one row on one
thread, the least of many runs. Exit status 1 when archive or compare is more than 0.02 off in drift, or 1.5
times in the ratio of times.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.paths import ROOT
from harness.report import aligned, markdown_table
from quantised import zoo
from torch import nn

from torchere.archiver import open_archive
from torchere.archiver.models.convert.optimize_gain import loaded
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.vision.transform import ImageTransform

_DRIFT, _RATIO = 0.02, 1.5  # how far the commands may be off what is measured by hand
_RUNS = 40


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, as a user packs it."""

    title: str
    factory: str  # module:name
    method: str
    photographs: bool


SUBJECTS = {
    "efficientnet": Subject(
        "EfficientNet-Lite0", "examples.image_classifier.network:pretrained", "int8-static", photographs=True
    ),
    "resnet": Subject("ResNet-18", "archive_and_compare:resnet", "int8-static", photographs=True),
    "encoder": Subject(
        "transformer encoder, 4 × 256, 32 steps",
        "archive_and_compare:encoder",
        "int8-dynamic",
        photographs=False,
    ),
}


@dataclass(frozen=True, slots=True)
class Told:
    """Figures of the int8 model against the fp32 one."""

    drift: float
    top1: float | None
    fp32_ms: float
    int8_ms: float

    def shown(self) -> str:
        """One cell of the table."""
        top1 = "" if self.top1 is None else f", {self.top1:.0%}"
        return f"{self.drift:.3f}{top1}; {self.fp32_ms:.3g} → {self.int8_ms:.3g} ms"


def resnet() -> nn.Module:
    """ResNet-18 with random weights; `--factory` calls it."""
    return zoo.make("resnet").module


def encoder() -> nn.Module:
    """A transformer encoder with random weights; `--factory` calls it."""
    return zoo.make("encoder").module


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print one line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout whose commands are run")
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [["model", "archive: drift, same first class; times", "compare", "by hand"]]
    far = False
    for key in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="torchere-claims-") as folder:
            told = _told(SUBJECTS[key], Path(folder), options.tree.resolve())
        lines.append([SUBJECTS[key].title, *(one.shown() for one in told)])
        far = far or any(_is_far(one, told[-1]) for one in told[:-1])
    print(markdown_table(lines) if options.markdown else aligned(lines))
    return 1 if far else 0


def _is_far(told: Told, hand: Told) -> bool:
    ratio = (told.fp32_ms / told.int8_ms) / (hand.fp32_ms / hand.int8_ms)
    return abs(told.drift - hand.drift) > _DRIFT or not 1 / _RATIO < ratio < _RATIO


def _told(subject: Subject, folder: Path, tree: Path) -> tuple[Told, Told, Told]:
    data = folder / "data"
    data.mkdir()
    flags = _write_data(subject, data)
    command = ["archive", "--factory", subject.factory, "--export-path", str(folder), *flags]
    command += ["--example", str(sorted(data.iterdir())[0]), "--samples", str(data)]
    _run(tree, *command, "--model-name", "fp32", "--format", "torchscript")
    _run(tree, *command, "--model-name", "int8", "--quantize", subject.method)
    report = json.loads(open_archive(folder / "int8.mar").read_text("MAR-INF/report.json"))
    archives = (str(folder / "fp32.mar"), str(folder / "int8.mar"))
    compared = json.loads(_run(tree, "compare", *archives, "--data", str(data), "--json", fails=True))
    return _read(report), _read(compared), _by_hand(subject, folder, data)


def _write_data(subject: Subject, data: Path) -> list[str]:
    """Write the samples, and return the flags that belong to them."""
    if not subject.photographs:
        for index, (rows,) in enumerate(zoo.make("encoder").held_out):
            torch.save(rows, data / f"{index}.pt")
        return []
    photographs = zoo.example_modules()[1]
    for name in photographs.CALIBRATION:
        shutil.copy(photographs.photograph(name), data)
    return ["--handler", "image_classifier"]


def _run(tree: Path, *arguments: str, fails: bool = False) -> str:
    paths = [tree / ".typing", tree, ROOT / "benchmarks"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [
        sys.executable,
        "-c",
        "import sys; from torchere.serving.commands.cli import main; sys.exit(main())",
    ]
    done = subprocess.run(
        [*command, *arguments], env=environment, cwd=tree, capture_output=True, text=True, check=False
    )
    if done.returncode and not fails:
        raise SystemExit(f"torchere {arguments[0]}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _read(report: dict[str, Any]) -> Told:
    found = report["difference"]
    fp32 = report.get("fp32") or report["original"]
    times = [side["latency_ms"]["1"] for side in (fp32, report["packed"])]
    return Told(found["drift"], found["top1"], *times)


def _by_hand(subject: Subject, folder: Path, data: Path) -> Told:
    files = sorted(data.iterdir())
    rows = [_row(file) if subject.photographs else torch.load(file) for file in files]
    models = [_served(folder / f"{name}.mar", folder / name) for name in ("fp32", "int8")]
    times = _least_ms(models, rows[0][:1])
    with torch.inference_mode():
        wanted, found = (torch.cat([model(row) for row in rows]) for model in models)
    drift = float((found - wanted).norm() / wanted.norm())
    top1 = float((found.argmax(1) == wanted.argmax(1)).float().mean())
    return Told(drift, top1, *times)


def _row(file: Path) -> torch.Tensor:
    from PIL import Image  # noqa: PLC0415

    with Image.open(file) as image:
        return ImageTransform()(image)[None]


def _served(archive: Path, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    import yaml  # noqa: PLC0415

    opened = open_archive(archive)
    root = opened.extract(folder)
    name = opened.manifest.config_file
    options = TorchScriptOptions.read(yaml.safe_load((root / name).read_text()) if name else {})
    model: Callable[[torch.Tensor], torch.Tensor] = loaded(root / "model.pt", options)
    return model


def _least_ms(models: Sequence[Callable[[torch.Tensor], torch.Tensor]], row: torch.Tensor) -> list[float]:
    least = [float("inf")] * len(models)
    with torch.inference_mode():
        for turn in range(_RUNS):
            for index, model in enumerate(models):
                started = time.thread_time()
                model(row)
                if turn >= 3:  # the first runs compile
                    least[index] = min(least[index], 1e3 * (time.thread_time() - started))
    return least


if __name__ == "__main__":
    sys.exit(main())
