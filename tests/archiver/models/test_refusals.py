"""Every kind of refusal of `archive`, and what comes of following its advice.

Those that only `convert` and `compare` have are in `test_refusals_of_archives.py`.
"""

from __future__ import annotations

import re
import shutil
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.models.load.torchscript import supported
from torchere.archiver.models.quantize import candidates
from torchere.archiver.models.verify.report import Report
from torchere.serving.commands.cli import main

ODD = '''\
import torch
from torch import nn


class Squares(nn.Module):
    """An image network; its sizes are multiples of four."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image):
        small = nn.functional.avg_pool2d(self.layer(image), 4)
        return image[:, :1] + nn.functional.interpolate(small, scale_factor=4.0)[:, :1]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x)


class Wide(Plain):
    def __init__(self, width):
        super().__init__()


def wide():
    return Wide(8)


def text():
    return "a model"


NUMBER = 3


class ByKeyword(Plain):
    def forward(self, *, x):
        return self.layer(x)


class Two(Plain):
    def forward(self, x, y):
        return self.layer(x) + self.layer(y)


class Mixing(Plain):
    def forward(self, x):
        return self.layer(x - x.mean(0))


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.layer(x) * self.seen


class Branching(Plain):
    def forward(self, x):
        if float(x.sum()) > 0:
            return self.layer(x)
        return self.layer(-x) + 1


class Conditional(Plain):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: self.layer(-x) + 1, (x,))


class Saying(Plain):
    def forward(self, x):
        return {"found": self.layer(x), "text": "fine"}


class Complex(Plain):
    def forward(self, x):
        return torch.fft.fft(self.layer(x))


class Real(Plain):
    def forward(self, x):
        return torch.view_as_real(torch.fft.fft(self.layer(x)))


class Doubles(Plain):
    def __init__(self):
        super().__init__()
        self.double()


class Singles(Doubles):
    def __init__(self):
        super().__init__()
        self.float()


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, image):
        return self.layer(image)


class Nothing(nn.Module):
    def forward(self, x):
        return x.relu() * 2
'''


def nothing(_patch: pytest.MonkeyPatch, _folder: Path) -> None:
    """Refuse by the arguments alone."""


def slow(patch: pytest.MonkeyPatch, _folder: Path) -> None:
    """Find the quantised model slower, however fast it is in this minute."""
    patch.setattr(Report, "speedup", property(lambda _report: 0.5))


def full(patch: pytest.MonkeyPatch, _folder: Path) -> None:
    patch.setattr(shutil, "disk_usage", lambda _path: types.SimpleNamespace(free=1))


def existing(_patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "net.mar").write_text("")


def no_files(_found: re.Match[str], _folder: Path) -> dict[str, Path]:
    return {}


def configured(found: re.Match[str], folder: Path) -> dict[str, Path]:
    """Add the lines of the advice to the configuration."""
    lines = "".join(f"  {line.strip()}\n" for line in found["lines"].split(","))
    (folder / "config.yaml").write_text(f"torchscript:\n  optimize_for_inference: false\n{lines}")
    return {"added": folder / "config.yaml"}


@dataclass(frozen=True)
class Case:
    """Arguments that are refused, a part of the text with the advice, and the arguments that follow it.

    `{x}` stands for the file `x`, and in `then` also for a group of `said`.
    """

    name: str
    given: str
    said: str  # a regular expression
    then: str
    during: Callable[[pytest.MonkeyPatch, Path], None] = nothing  # what causes the refusal besides
    after: Callable[[re.Match[str], Path], dict[str, Path]] = no_files  # follows what is no argument


TORCHSCRIPT = "--format=torchscript --no-verify"
PLAIN = f"--factory=odd:Plain --example={{x}} {TORCHSCRIPT}"
IMAGES = f"--factory=odd:Images --example={{image}} {TORCHSCRIPT}"
QUANTIZED = "--factory=odd:Plain --example={x}"
NET = "--model-file={net_module} --example={example}"
CASES = (
    Case("no model", "", "expected --serialized-file, --model-file or --factory", PLAIN),
    Case("two ways to the class", f"--model-file={{net_module}} {PLAIN}", "expected one of them", PLAIN),
    Case(
        "weights without a class",
        f"--serialized-file={{state}} --example={{example}} {TORCHSCRIPT}",
        r"--model-file model\.py, or --factory",
        f"--serialized-file={{state}} {NET} {TORCHSCRIPT}",
    ),
    Case(
        "weights without a class, with a handler",
        "--serialized-file={state} --handler=base_handler",
        r"give the file of the class \(--model-file\)",
        "--serialized-file={state} --model-file={net_module} --handler=base_handler",
    ),
    Case(
        "TorchScript under another suffix",
        "--serialized-file={script} --handler=base_handler",
        "or give --format keep",
        "--serialized-file={script} --handler=base_handler --format=keep",
    ),
    Case(
        "no example, kept",
        "--serialized-file={script}",
        "give --example",
        "--serialized-file={script} --example={example}",
    ),
    Case(
        "no example, kept, with a handler",
        "--serialized-file={script}",
        "or name another handler",
        "--serialized-file={script} --handler=base_handler --format=keep",
    ),
    Case("no example, changed", f"--factory=odd:Plain {TORCHSCRIPT}", "give --example with inputs", PLAIN),
    Case(
        "damaged weights",
        f"--serialized-file={{cut}} {TORCHSCRIPT}",
        "damaged",
        f"--serialized-file={{script}} --example={{example}} {TORCHSCRIPT}",
    ),
    Case(
        "a pickle of more than tensors",
        f"--serialized-file={{whole}} --example={{example}} {TORCHSCRIPT}",
        "or trust the file with --allow-pickle",
        f"--serialized-file={{whole}} --example={{example}} --allow-pickle {TORCHSCRIPT}",
    ),
    Case(
        "a pickle, weights alone",
        f"--serialized-file={{whole}} {NET} {TORCHSCRIPT}",
        r"save the weights alone with torch\.save\(model\.state_dict\(\)",
        f"--serialized-file={{state}} {NET} {TORCHSCRIPT}",
    ),
    Case(
        "a whole module that is kept",
        "--serialized-file={whole} --allow-pickle --example={example} --format=keep",
        "expected --format (?P<format>torchscript)",
        "--serialized-file={whole} --allow-pickle --example={example} --format={format} --no-verify",
    ),
    Case(
        "an unknown method",
        f"{QUANTIZED} --quantize=int9",
        "expected one of int8-static, (?P<method>[a-z0-9-]+),",
        f"{PLAIN} --quantize={{method}}",
    ),
    Case(
        "quantised and kept",
        f"{QUANTIZED} --format=keep --quantize=int8-dynamic",
        "expected another format",
        f"{PLAIN} --quantize=int8-dynamic",
    ),
    Case(
        "scripted and exported",
        f"{QUANTIZED} --format=export --script",
        "expected --format torchscript",
        f"{PLAIN} --script",
    ),
    Case(
        "auto without measuring",
        f"{PLAIN} --quantize=auto",
        "name one of int8-static, (?P<method>int8-dynamic)",
        f"{PLAIN} --quantize={{method}}",
    ),
    Case(
        "a factory without a colon",
        f"--factory=odd.Plain --example={{x}} {TORCHSCRIPT}",
        r"expected package\.module:function; did you mean odd:Plain\?",
        PLAIN,
    ),
    Case(
        "a factory that is not there",
        f"--factory=gone:Plain --example={{x}} {TORCHSCRIPT}",
        r"'gone' is not there; expected gone\.py .* set PYTHONPATH to its folder",
        PLAIN,
    ),
    Case(
        "a factory in a file's name",
        f"--factory=odd.py:Plain --example={{x}} {TORCHSCRIPT}",
        r"the factory's module is 'odd\.py'; expected 'odd', without \.py",
        PLAIN,
    ),
    Case(
        "a factory that is misspelt",
        f"--factory=odd:Plian --example={{x}} {TORCHSCRIPT}",
        r"the factory odd:Plian is not there; .* odd defines .*did you mean Plain\?",
        PLAIN,
    ),
    Case(
        "a factory that is a number",
        f"--factory=odd:NUMBER --example={{x}} {TORCHSCRIPT}",
        r"odd:NUMBER is a int, which can't be called; expected a torch\.nn\.Module's class",
        PLAIN,
    ),
    Case(
        "a folder of weights",
        f"--serialized-file={{weights}} {TORCHSCRIPT}",
        r"a folder of notes\.txt, w\.pth, and no model: .*give .*weights/w\.pth, with --model-file",
        PLAIN,
    ),
    Case(
        "a factory of a text",
        f"--factory=odd:text --example={{x}} {TORCHSCRIPT}",
        r"expected a torch\.nn\.Module",
        PLAIN,
    ),
    Case(
        "a class with arguments",
        f"--factory=odd:Wide --example={{x}} {TORCHSCRIPT}",
        "name a function without arguments",
        f"--factory=odd:wide --example={{x}} {TORCHSCRIPT}",
    ),
    Case(
        "a file of several modules",
        f"--model-file={{odd}} --example={{x}} {TORCHSCRIPT}",
        r"--factory odd:\w+",
        PLAIN,
    ),
    Case(
        "a file of no module",
        f"--model-file={{empty}} --example={{x}} {TORCHSCRIPT}",
        "or name the function that makes it: --factory",
        PLAIN,
    ),
    Case(
        "a missing example", f"--factory=odd:Plain --example=gone.npy {TORCHSCRIPT}", "check the path", PLAIN
    ),
    Case(
        "a missing handler",
        f"{PLAIN} --handler=tensors",
        "expected one of .*(?P<handler>tensor),",
        f"{PLAIN} --handler={{handler}}",
    ),
    Case(
        "an example that is none",
        f"--factory=odd:Plain --example={{empty}} {TORCHSCRIPT}",
        "no example that can be read",
        PLAIN,
    ),
    Case(
        "an example of another shape",
        f"--factory=odd:Plain --example={{narrow}} {TORCHSCRIPT}",
        "give an --example with the shapes and datatypes",
        PLAIN,
    ),
    Case(
        "an input of another name",
        f"--factory=odd:Plain --example={{named}} {TORCHSCRIPT}",
        "the model has x",
        PLAIN,
    ),
    Case(
        "a first input that is missing",
        f"--factory=odd:Two --example={{named}} {TORCHSCRIPT}",
        "not the inputs before: x, y; give these, too",
        f"--factory=odd:Two --example={{both}} {TORCHSCRIPT}",
    ),
    Case(
        "a signature with other inputs",
        "--serialized-file={onnx} --example={pair}",
        "give one tensor for each",
        "--serialized-file={onnx} --example={x}",
    ),
    Case(
        "a signature with other shapes",
        "--serialized-file={onnx} --example={image}",
        "give one of that shape",
        "--serialized-file={onnx} --example={x}",
    ),
    Case(
        "samples of another form",
        f"{PLAIN} --quantize=int8-static --samples={{image}}",
        "expected the example's",
        f"{PLAIN} --quantize=int8-static --samples={{x}}",
    ),
    Case(
        "an empty folder of samples",
        f"{PLAIN} --quantize=int8-static --samples={{nothing}}",
        "expected inputs, one per file",
        f"{PLAIN} --quantize=int8-static --samples={{x}}",
    ),
    Case(
        "int8-static without samples",
        f"{PLAIN} --quantize=int8-static",
        "like real requests with --samples",
        f"{PLAIN} --quantize=int8-static --samples={{x}}",
    ),
    Case(
        "exported int8-static without samples",
        f"{QUANTIZED} --format=export --no-verify --quantize=int8-static",
        "with --samples",
        f"{QUANTIZED} --format=export --no-verify --quantize=int8-static --samples={{x}}",
    ),
    Case(
        "int8-static of a branch",
        f"--factory=odd:Branching --example={{x}} --samples={{x}} {TORCHSCRIPT} --quantize=int8-static",
        "use (?P<method>int8-dynamic)",
        f"--factory=odd:Branching --example={{x}} {TORCHSCRIPT} --quantize={{method}}",
    ),
    Case(
        "int8-dynamic of convolutions",
        f"{IMAGES} --quantize=int8-dynamic",
        "use (?P<method>int8-static) with calibration samples",
        f"{IMAGES} --quantize={{method}} --samples={{image}}",
    ),
    Case(
        "int8-static of no layers",
        f"--factory=odd:Nothing --example={{x}} --samples={{x}} {TORCHSCRIPT} --quantize=int8-static",
        "leave --quantize out",
        f"--factory=odd:Nothing --example={{x}} {TORCHSCRIPT}",
    ),
    Case(
        "int8-trained of fp32",
        f"{PLAIN} --quantize=int8-trained",
        "trained in fp32 is for int8-static or (?P<method>int8-dynamic)",
        f"{PLAIN} --quantize={{method}}",
    ),
    Case(
        "int8 of TorchScript",
        f"--serialized-file={{script}} --example={{example}} {TORCHSCRIPT} --quantize=int8-dynamic",
        r"quantise the eager model .*--model-file",
        f"--serialized-file={{state}} {NET} {TORCHSCRIPT} --quantize=int8-dynamic",
    ),
    Case(
        "bf16 of TorchScript",
        f"--serialized-file={{script}} --example={{example}} {TORCHSCRIPT} --quantize=bf16",
        "cast the eager model",
        f"--serialized-file={{state}} {NET} {TORCHSCRIPT} --quantize=int8-dynamic",
    ),
    Case(
        "int8 of doubles",
        f"--factory=odd:Doubles --example={{x64}} {TORCHSCRIPT} --quantize=int8-dynamic",
        r"make them FP32 in its class \(self\.float\(\)\)",
        f"--factory=odd:Singles --example={{x}} {TORCHSCRIPT} --quantize=int8-dynamic",
    ),
    Case(
        "int8 that drifts",
        f"{QUANTIZED} --quantize=int8-dynamic --max-drift=1e-9 --accept-slower",
        "--accept-drift packs it all the same",
        f"{QUANTIZED} --quantize=int8-dynamic --max-drift=1e-9 --accept-slower --accept-drift",
    ),
    Case(
        "int8 that drifts, with another limit",
        f"{QUANTIZED} --quantize=int8-dynamic --max-drift=1e-9 --accept-slower",
        "allow more by --max-drift",
        f"{QUANTIZED} --quantize=int8-dynamic --max-drift=0.5 --accept-slower",
    ),
    Case(
        "int8 that gains nothing",
        f"{QUANTIZED} --quantize=int8-dynamic",
        "--accept-slower packs it all the same",
        f"{QUANTIZED} --quantize=int8-dynamic --accept-slower",
        slow,
    ),
    Case(
        "int8 that gains nothing, by auto",
        f"{QUANTIZED} --quantize=int8-dynamic",
        "--quantize (?P<method>auto) tries the other methods",
        f"{QUANTIZED} --quantize={{method}}",
        slow,
    ),
    Case(
        "inputs by keyword only",
        f"--factory=odd:ByKeyword --example={{x}} {TORCHSCRIPT}",
        r"take the \* out of its parameters",
        PLAIN,
    ),
    Case(
        "a text among the results",
        f"--factory=odd:Saying --example={{x}} {TORCHSCRIPT}",
        "expected tensors",
        PLAIN,
    ),
    Case(
        "complex numbers",
        f"--factory=odd:Complex --example={{x}} {TORCHSCRIPT}",
        r"torch\.view_as_real",
        f"--factory=odd:Real --example={{x}} {TORCHSCRIPT}",
    ),
    Case(
        "rows that meet",
        f"--factory=odd:Mixing --example={{x}} {TORCHSCRIPT} --dynamic-batch=1:8",
        "leave --dynamic-batch out",
        f"--factory=odd:Mixing --example={{x}} {TORCHSCRIPT}",
    ),
    Case(
        "rows that meet, as a size",
        f"--factory=odd:Mixing --example={{x}} {TORCHSCRIPT} --dynamic-batch=1:8",
        r"say --dynamic (?P<size>x\.0=1:) instead",
        f"--factory=odd:Mixing --example={{x}} {TORCHSCRIPT} --dynamic={{size}}",
    ),
    Case(
        "a state",
        "--factory=odd:Counting --example={x} --format=export --no-verify --dynamic-batch=1:8",
        "leave --dynamic-batch out",
        "--factory=odd:Counting --example={x} --format=export --no-verify",
    ),
    Case(
        "a batch that is no range",
        f"{PLAIN} --dynamic-batch=many",
        "as 1:64",
        f"{PLAIN} --dynamic-batch=1:64",
    ),
    Case(
        "a size that is no size",
        f"{PLAIN} --dynamic=x",
        r"as ids,mask\.1=2:512",
        f"{PLAIN} --dynamic=x.0=1:64",
    ),
    Case(
        "a size of an unknown input",
        f"{PLAIN} --dynamic=y.0=1:64",
        "expected (?P<input>x)",
        f"{PLAIN} --dynamic={{input}}.0=1:64",
    ),
    Case(
        "a size of no dimension",
        f"{PLAIN} --dynamic=x.5=1:64",
        "expected a dimension 5",
        f"{PLAIN} --dynamic=x.0=1:64",
    ),
    Case(
        "a size beside the example's",
        f"{PLAIN} --dynamic=x.0=5:64",
        "expected one of 5 to 64",
        f"{PLAIN} --dynamic=x.0=1:64",
    ),
    Case(
        "a size in steps",
        f"--factory=odd:Squares --example={{image}} {TORCHSCRIPT} --dynamic=image.3=4:64",
        r"it was found to run with --dynamic (?P<size>\S+)$",
        f"--factory=odd:Squares --example={{image}} {TORCHSCRIPT} --dynamic={{size}}",
    ),
    Case(
        "a fixed size",
        f"{PLAIN} --dynamic=x.1=1:64",
        r"leave --dynamic x\.1 out",
        PLAIN,
    ),
    Case(
        "a branch, exported",
        "--factory=odd:Branching --example={x} --format=export --no-verify",
        "take --format (?P<format>torchscript)",
        "--factory=odd:Branching --example={x} --no-verify --format={format}",
    ),
    Case(
        "no trace",
        f"--factory=odd:Conditional --example={{x}} {TORCHSCRIPT}",
        "take --format (?P<format>export)",
        "--factory=odd:Conditional --example={x} --no-verify --format={format}",
    ),
    Case(
        "only a trace",
        f"--factory=odd:Branching --example={{x}} {TORCHSCRIPT} --trace",
        "--script keeps branches",
        f"--factory=odd:Branching --example={{x}} {TORCHSCRIPT} --script",
    ),
    Case(
        "weights of other names",
        f"--serialized-file={{partly}} {NET} {TORCHSCRIPT}",
        "--no-strict takes the weights",
        f"--serialized-file={{partly}} {NET} {TORCHSCRIPT} --no-strict",
    ),
    Case(
        "weights of another class",
        f"--serialized-file={{state}} {PLAIN} --no-strict",
        "name the class that it was saved from",
        f"--serialized-file={{state}} {NET} {TORCHSCRIPT}",
    ),
    Case(
        "weights of an adapter",
        f"--serialized-file={{lora}} {NET} {TORCHSCRIPT}",
        r"merge it into its model .* and save that",
        f"--serialized-file={{state}} {NET} {TORCHSCRIPT}",
    ),
    Case(
        "a folder of no checkpoint",
        f"--serialized-file={{nothing}} {NET} {TORCHSCRIPT}",
        "a folder of nothing, and no model",
        f"--serialized-file={{sharded}} {NET} {TORCHSCRIPT}",
    ),
    Case(
        "a cut checkpoint",
        f"--serialized-file={{cutshards}} {NET} {TORCHSCRIPT}",
        "copy the whole folder again",
        f"--serialized-file={{sharded}} {NET} {TORCHSCRIPT}",
    ),
    Case(
        "TorchScript that writes files",
        f"--serialized-file={{writing}} --example={{x}} {TORCHSCRIPT}",
        "or trust the file with --allow-pickle",
        f"--serialized-file={{writing}} --example={{x}} {TORCHSCRIPT} --allow-pickle",
    ),
    Case(
        "ONNX to convert",
        f"--serialized-file={{onnx}} --example={{x}} {TORCHSCRIPT}",
        "start from the model that it was made from",
        PLAIN,
    ),
    Case(
        "damaged ONNX",
        "--serialized-file={badonnx} --example={x}",
        "export it again",
        "--serialized-file={onnx} --example={x}",
    ),
    Case(
        "a configuration that lacks the engine",
        f"{QUANTIZED} --quantize=int8-dynamic --no-verify --config-file={{config}}",
        "add to its section torchscript: (?P<lines>[^;]+)$",
        f"{QUANTIZED} --quantize=int8-dynamic --no-verify --config-file={{added}}",
        after=configured,
    ),
    Case(
        "a configuration that is no text",
        f"{PLAIN} --config-file={{latin}} --quantize=int8-dynamic",
        "is not UTF-8",
        f"{PLAIN} --config-file={{good}} --quantize=int8-dynamic",
    ),
    Case("a full disk", PLAIN, "name another folder in TMPDIR", PLAIN, full),
    Case("an archive that exists", PLAIN, "--force/-f", f"{PLAIN} --force", existing),
)
UNFOLLOWED = {
    "torch is missing": "the tests need it",
    "transformers, torchao or onnxruntime is missing": "the tests of each have it",
    "bf16 on a processor without it": "another processor",
    "no int8 engine": "each build of torch for x86 and Arm has one",
    "machine code of another machine, or beyond this one's": "another processor",
    "machine code whose signature is not known": "test_hostile_packages.py follows it",
    "an adapter of PEFT, weights of another library": "load/test_huggingface_models.py follows it",
    "a damaged file": "there is nothing to do but to get or write it again, as for the damaged ones above",
}
"""Advice that is not followed here, and why."""


@pytest.fixture(autouse=True)
def one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run finds the engine of the first one fastest, however busy the machine is."""
    monkeypatch.setattr(candidates, "supported", lambda: supported()[-1:])


@pytest.fixture(scope="module")
def files(forms: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd.py").write_text(ODD)
    (folder / "empty.py").write_text("answer = 42\n")
    torch.manual_seed(0)
    np.save(folder / "x.npy", np.random.default_rng(0).random((2, 8), dtype=np.float32))
    np.save(folder / "image.npy", np.random.default_rng(0).random((2, 3, 8, 8), dtype=np.float32))
    np.savez(folder / "named.npz", y=np.ones((2, 8), np.float32))
    np.savez(folder / "both.npz", x=np.ones((2, 8), np.float32), y=np.ones((2, 8), np.float32))
    np.save(folder / "narrow.npy", np.ones((2, 7), np.float32))
    np.save(folder / "x64.npy", np.ones((2, 8)))
    torch.save((torch.ones(2, 8), torch.ones(2, 8)), folder / "pair.pt")
    (folder / "nothing").mkdir()
    (folder / "weights").mkdir()
    for name in ("w.pth", "notes.txt"):
        (folder / "weights" / name).write_text("")
    made = {path.stem: path for path in folder.iterdir()}
    made |= {name: forms.file(f"{name}.weights") for name in ("state", "whole")}
    made |= {"script": forms.file("script.model"), "example": forms.file("example.npy")}
    made |= {"net_module": forms.file("net_module.py"), "sharded": forms.file("sharded")}
    made |= {"onnx": forms.file("relu.onnx")}
    return made | _damaged(made, folder) | _configurations(folder)


def _damaged(made: dict[str, Path], folder: Path) -> dict[str, Path]:
    found = {name: folder / name for name in ("cut", "partly", "lora", "cutshards", "writing", "badonnx")}
    found["cut"].write_bytes(made["script"].read_bytes()[:500])
    state = torch.load(made["state"], weights_only=True)
    torch.save({"one.weight": state["one.weight"], "other.weight": torch.ones(2)}, found["partly"])
    torch.save({f"{key}.lora_A.weight": value for key, value in state.items()}, found["lora"])
    shutil.copytree(made["sharded"], found["cutshards"])
    for shard in found["cutshards"].glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:100])
    torch.jit.script(_Writing()).save(str(found["writing"]))
    found["badonnx"].write_bytes(made["onnx"].read_bytes()[:20])
    return found


class _Writing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 7:
            x = torch.from_file("gone", False, 8)
        return x * 2


def _configurations(folder: Path) -> dict[str, Path]:
    found = {name: folder / f"{name}.yaml" for name in ("config", "latin", "good")}
    found["config"].write_text("minWorkers: 1\ntorchscript:\n  optimize_for_inference: false\n")
    found["latin"].write_bytes("# größer\n".encode("latin-1"))
    found["good"].write_text("# größer\n", encoding="utf-8")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_advice_of_a_refusal_leads_to_an_archive(
    case: Case, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(str(files["odd"].parent))
    with monkeypatch.context() as patch:
        case.during(patch, tmp_path)
        status = archived(case.given.format(**files), tmp_path)
    refused = capsys.readouterr().err
    assert status in (1, 2), refused
    refused = refused[refused.index("torchere archive: ") :].strip()
    found = re.search(case.said, refused)
    assert found, refused
    followed = case.then.format(**files, **case.after(found, tmp_path), **found.groupdict())
    if followed in PACKED:
        return
    assert archived(followed, tmp_path) == 0, f"{refused}\n{capsys.readouterr().err}"
    assert open_archive(tmp_path / "net.mar").manifest.model_name == "net"
    PACKED.add(followed)


PACKED: set[str] = set()
"""Arguments that led to an archive: the advice of many refusals leads to the same ones."""


def archived(arguments: str, folder: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return main(["archive", "--model-name=net", f"--export-path={folder}", *arguments.split()])
