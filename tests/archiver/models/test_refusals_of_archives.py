"""Every refusal that `convert` and `compare` have of their own, and what comes of following its advice.

What they share with `archive` is followed in `test_refusals.py`; here is that `convert` has the same flags.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.archiver import commands, models
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.verify import compare as verification
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.serving.commands import compare
from torchere.serving.commands.cli import main

PREPARING = """\
import torch
from torchere.handlers.vision.tasks import ImageClassifier


class Preparing(ImageClassifier):
    def preprocess(self, requests):
        return torch.stack([torch.tensor(list(one["body"][-8:]), dtype=torch.float32) for one in requests])
"""
CONFIGURATIONS = {
    "sure": "torchscript:\n  optimize_for_inference: sure\n",
    "flow": "{torchscript: {optimize_for_inference: sure}}\n",
    "yaml": "a: [\n",
    "lacking": "torchscript:\n  optimize_for_inference: false\n",
}


@dataclass(frozen=True)
class Case:
    """A command that is refused, a part of the text with the advice, and the commands that follow it.

    `{x}` stands for the file `x`; `{to}` for what each conversion says. `unpack` is the user's own work.
    """

    name: str
    given: str
    said: str  # a regular expression
    then: tuple[str, ...]


CONVERTED = "convert {script_mar} {to}"
PICTURE = "convert {preparing_mar} --to=torchscript --no-verify --example={pictures}/a.png"
SAME = "compare {script_mar} {script_mar} --data {data}"
AGAIN = "archive --model-name=again --export-path={here} --force --no-verify {example} "
FROM_CLASS = AGAIN + "--model-file={net_module} --format=torchscript "
PACKED = FROM_CLASS + "--serialized-file={state}"
REPACKED = AGAIN + "--serialized-file={here}/unpacked/script.pt --config-file={good}"
CASES = (
    Case("convert: missing", "convert {here}/gone.mar {to}", r"gone\.mar: .*check the path", (CONVERTED,)),
    Case("convert: no archive", "convert {junk_mar} {to}", r"name a \.mar or a \.tar\.gz", (CONVERTED,)),
    Case("convert: cut off", "convert {cut_mar} {to}", "pack the archive again", (CONVERTED,)),
    Case("convert: edited", "convert {edited} {to}", "it is damaged or cut off", (CONVERTED,)),
    Case("convert: no model", "convert {alone_mar} {to}", "it holds no model.*torchere archive", (PACKED,)),
    Case(
        "convert: a class",
        "convert {class_mar} {to}",
        "say --allow-code if you trust",
        ("convert {class_mar} {to} --allow-code",),
    ),
    Case(
        "convert: no class",
        "convert {numbers_mar} {to}",
        r"numbers\.mar/state\.pt: .*--model-file.*unpack \S+/numbers\.mar and pack its files again",
        ("unpack {numbers_mar}", FROM_CLASS + "--serialized-file={here}/unpacked/state.pt"),
    ),
    Case(
        "convert: a pickle",
        "convert {pickle_mar} {to}",
        "or trust the file with --allow-pickle",
        ("convert {pickle_mar} {to} --allow-pickle",),
    ),
    Case(
        "convert: quantised TorchScript",
        "convert {script_mar} {to} --quantize=int8-dynamic",
        "quantise the eager model .*torchere archive --model-file or --factory",
        (PACKED + " --quantize=int8-dynamic",),
    ),
    Case(
        "convert: another format for a flag",
        "convert {script_mar} {to} --isa=avx2 --script",
        "expected --format (?P<format>torchscript)|expected --format aoti",
        ("convert {script_mar} {to} --format=torchscript --script",),
    ),
    Case("convert: ONNX", "convert {relu_mar} {to}", "start from the model that it was made from", (PACKED,)),
    Case(
        "convert: a version that no server takes",
        "convert {slashed_mar} --to=torchscript",  # refused before an example is missed
        r"slashed\.mar: its version is 'a/b', .* without '/': give another by --version",
        ("convert {slashed_mar} {to} --version=2.0",),
    ),
    Case(
        "convert: no example",
        "convert {script_mar} --to=torchscript",
        "give --example with inputs",
        (CONVERTED,),
    ),
    Case(
        "convert: an example that can't be made up",
        "convert {texts_mar} --to=torchscript",
        "'features' is BYTES; give --example with inputs",
        ("convert {texts_mar} {to}",),
    ),
    Case(
        "convert: a picture for code",
        PICTURE,
        "say --allow-code if you trust the archive, or give what the model takes",
        (
            f"{PICTURE} --allow-code",
            "convert {preparing_mar} {to}",
        ),
    ),
    Case(
        "convert: a wrong signature",
        "convert {unsigned_mar} {to}",
        r"unsigned\.mar: signature\.json: version is None; .*pack its files again by torchere archive",
        ("unpack {unsigned_mar}", REPACKED, "convert {again} {to}"),
    ),
    Case(
        "convert: a wrong configuration",
        "convert {sure_mar} {to}",
        r"sure\.mar/sure\.yaml: .*expected true or false.*pack its files again by torchere archive",
        ("unpack {sure_mar}", REPACKED, "convert {again} {to}"),
    ),
    Case(
        "convert: a configuration that lacks the engine",
        "convert {lacking_mar} {to} --allow-code --quantize=int8-dynamic",
        "add to its section torchscript: quantized_engine.*pack its files again by torchere archive",
        (
            "unpack {lacking_mar}",
            FROM_CLASS + "--serialized-file={here}/unpacked/state.pt --config-file={good}",
        ),
    ),
    Case(
        "convert: a handler that is not there",
        "convert {script_mar} {to} --handler=tensors",
        "expected one of .*(?P<handler>tensor),",
        ("convert {script_mar} {to} --handler={handler}",),
    ),
    Case(
        "convert: onto another",
        "convert {script_mar} --to=export --output={script_mar} --no-verify {example}",
        "specify --force/-f",
        (CONVERTED + " --force",),
    ),
    Case("compare: missing", "compare {script_mar} {here}/gone.mar --data {data}", "check the path", (SAME,)),
    Case(
        "compare: no class",
        "compare {script_mar} {numbers_mar} --data {data}",
        r"numbers\.mar/state\.pt can't be loaded.*pack the model as one of these by torchere archive",
        (PACKED, "compare {script_mar} {again} --data {data}"),
    ),
    Case(
        "compare: no data",
        "compare {script_mar} {script_mar} --data {here}/gone",
        "no such file or folder; expected a folder of inputs, or one input",
        (SAME,),
    ),
    Case("compare: data without files", f"{SAME}/nothing", "expected inputs, one per file", (SAME,)),
    Case("compare: data that can't be read", f"{SAME}/text", "expected JSON, a .pt, a .npy", (SAME,)),
    Case(
        "compare: inputs of another shape",
        "compare {signed_mar} {script_mar} --data {narrow}",
        r"is \(2, 7\); the model takes \(-1, 8\), in which -1 is any size: give one of that shape",
        ("compare {signed_mar} {script_mar} --data {data}",),
    ),
    Case(
        "compare: an input without a batch",
        "compare {script_mar} {script_mar} --data {single}",
        r"give inputs of the shapes and datatypes that script\.mar takes, a batch each",
        (SAME,),
    ),
    Case(
        "compare: inputs of other names",
        "compare {signed_mar} {script_mar} --data {named}",
        "the model has features: use these names",
        ("compare {signed_mar} {script_mar} --data {data}",),
    ),
    Case(
        "compare: a picture for code",
        "compare {preparing_mar} {script_mar} --data {pictures}",
        "say --allow-code if you trust the archive, or give what the model takes",
        (
            "compare {preparing_mar} {script_mar} --data {pictures} --allow-code",
            "compare {preparing_mar} {script_mar} --data {data}",
        ),
    ),
    Case(
        "compare: another model",
        "compare {script_mar} {linear_mar} --data {data}",
        "expected two forms of one model",
        (SAME,),
    ),
    Case(
        "compare: a model that drifts",
        "compare {script_mar} {other_mar} --data {data} --max-drift 0.00001",
        "answers too differently.*allow more by --max-drift",
        ("compare {script_mar} {other_mar} --data {data} --max-drift 9",),
    ),
    *(
        Case(
            f"compare: {name}",
            f"compare {{{name}_mar}} {{script_mar}} --data {{data}}",
            rf"{name}\.mar.*{said}.*unpack the archive, correct that, and pack the files again",
            (f"unpack {{{name}_mar}}", REPACKED, "compare {again} {script_mar} --data {data}"),
        )
        for name, said in (
            ("sure", "expected true or false"),
            ("flow", "expected true or false"),
            ("yaml", "not valid YAML"),
            ("unsigned", "expected 1 or 2"),
        )
    ),
    Case(
        "compare: a chart in no folder",
        SAME + " --picture {here}/gone/chart.svg",
        "gone/chart.svg: No such file or directory",
        (SAME + " --picture {here}/chart.svg",),
    ),
)
UNFOLLOWED = {
    "this needs PyTorch": "the tests need it",
    "name a --handler of your own": "only `archive` keeps ONNX; load/test_onnx.py follows it",
}
"""Own refusals that are not followed here, and why."""


@pytest.fixture(scope="module")
def files(forms: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("archives")
    made = {"net_module": forms.file("net_module.py")}
    _write_inputs(folder, forms)
    _write_archives(folder, forms)
    made |= {f"{path.stem}{'_mar' * (path.suffix == '.mar')}": path for path in folder.iterdir()}
    return {name: str(path) for name, path in made.items()} | {
        "example": f"--example={forms.file('example.npy')}",
        "to": f"--to=torchscript --no-verify --example={forms.file('example.npy')}",
    }


def _write_inputs(folder: Path, forms: Any) -> None:
    rows = forms.rows.numpy()
    for name in ("data", "narrow", "single", "named", "pictures"):
        (folder / name).mkdir()
    (folder / "data" / "nothing").mkdir()
    (folder / "data" / "text").mkdir()
    (folder / "data" / "text" / "notes.txt").write_text("no tensor")
    np.save(folder / "data" / "rows.npy", rows)
    np.save(folder / "narrow" / "rows.npy", rows[:, :7])
    np.save(folder / "single" / "row.npy", rows[0])
    np.savez(folder / "named" / "rows.npz", other=rows)
    Image.new("RGB", (4, 4)).save(folder / "pictures" / "a.png")
    (folder / "good.yaml").write_text("minWorkers: 1\n")
    (folder / "junk.mar").write_text("no archive")
    (folder / "handler.py").write_text("def handle(data, context):\n    return data\n")
    (folder / "preparing.py").write_text(PREPARING)
    for name, text in CONFIGURATIONS.items():
        (folder / f"{name}.yaml").write_text(text)


def _write_archives(folder: Path, forms: Any) -> None:
    """Write archives as torch-model-archiver does, and with files that a user wrote."""

    def write(name: str, **named: Any) -> Path:
        given: dict[str, Any] = {"version": "1.0", "handler": "base_handler", "export_path": folder, **named}
        return write_archive(ArchiveRequest(model_name=name, **given))

    script, state = folder / "script.pt", folder / "state.pt"
    script.write_bytes(forms.file("script.model").read_bytes())
    state.write_bytes(forms.file("state.weights").read_bytes())
    pickled, onnx, handler = forms.file("whole.weights"), forms.file("relu.onnx"), folder / "handler.py"
    other = torch.jit.script(type(forms.module)().eval())
    other.save(str(folder / "other.pt"))
    torch.jit.script(torch.nn.Linear(8, 2)).save(str(folder / "linear.pt"))
    write("script", serialized_file=script)
    write("slashed", serialized_file=script, version="a/b")
    for name in ("other", "linear"):
        write(name, serialized_file=folder / f"{name}.pt")
    write("alone", handler=handler)
    write("numbers", serialized_file=state, handler=handler)
    write("class", serialized_file=state, model_file=forms.file("net_module.py"))
    write("pickle", serialized_file=pickled)
    write("relu", serialized_file=onnx)
    write("preparing", serialized_file=script, handler=folder / "preparing.py")
    for name in CONFIGURATIONS:
        model = {"serialized_file": state, "model_file": forms.file("net_module.py")}
        model = model if name == "lacking" else {"serialized_file": script}
        write(name, config_file=folder / f"{name}.yaml", **model)
    features = {"name": "features", "datatype": "FP32", "shape": [-1, 8]}
    outputs = [{"name": name, "datatype": "FP32", "shape": [-1, 3]} for name in ("scores", "hidden")]
    signed = {"version": 1, "inputs": [features], "outputs": outputs}
    texts = {**signed, "inputs": [{**features, "datatype": "BYTES"}]}
    for name, signature in (("signed", signed), ("texts", texts), ("unsigned", {})):
        (folder / "signature.json").write_text(json.dumps(signature))
        write(name, serialized_file=script, extra_files=(folder / "signature.json",))
    (folder / "cut.mar").write_bytes((folder / "script.mar").read_bytes()[:-30])
    _unpack(folder / "script.mar", folder / "edited")
    (folder / "edited/script.pt").write_text("another")


def _unpack(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as package:
        package.extractall(folder)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time models for a moment, and start no processes to measure their memory."""
    monkeypatch.setattr(verification, "_BUDGET_S", 0.01)
    monkeypatch.setattr(verification, "resident_bytes", lambda *_: [None, None])


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the lines that refuse."""
    init = ModelRefused.__init__

    def noting(refusal: ModelRefused, text: str) -> None:
        frame = sys._getframe(1)
        REACHED.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        init(refusal, text)

    monkeypatch.setattr(ModelRefused, "__init__", noting)


REACHED: set[tuple[str, int]] = set()
RAN: set[str] = set()
FOLLOWED: set[str] = set()
"""Commands that succeeded: the advice of many refusals leads to the same ones."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_advice_of_a_refusal_of_an_archive_works(
    case: Case, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    RAN.add(case.name)
    known = {**files, "here": str(tmp_path), "again": str(tmp_path / "again.mar")}
    assert run(case.given, known) in (1, 2)
    refused = capsys.readouterr().err
    command = f"torchere {case.given.split()[0]}: "
    assert command in refused, refused
    refused = refused[refused.rindex(command) :].strip()
    assert "/torchere-" not in refused, "it names a file in a temporary folder"
    found = re.search(case.said, refused)
    assert found, refused
    for one in case.then:
        if one in FOLLOWED:
            continue
        assert run(one, {**known, **found.groupdict()}) == 0, f"{refused}\n{capsys.readouterr().err}"
        if "{here}" not in one and "{again}" not in one and not one.startswith("unpack"):
            FOLLOWED.add(one)


def test_archives_of_onnx_are_compared(files: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("onnxruntime", reason="has no release for Python 3.10")
    assert run("compare {relu_mar} {relu_mar} --data {data}", {**files, "here": str(tmp_path)}) == 0
    assert "drift 0, " in capsys.readouterr().out


def run(command: str, known: dict[str, str]) -> int:
    verb, *arguments = command.format(**known).split()
    here = Path(known["here"])
    if verb == "unpack":
        _unpack(Path(arguments[0]), here / "unpacked")
        return 0
    if verb == "convert" and not any(one.startswith("--output") for one in arguments):
        arguments += [f"--output={here / 'new.mar'}", "--force"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return main([verb, *arguments])


def test_each_own_refusal_of_convert_and_compare_is_followed() -> None:
    if len(RAN) < len(CASES):
        pytest.skip("only where all cases ran in this process")
    for module in (commands, compare):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ModelRefused":
                text = str(ast.get_source_segment(source, node))
                lines = {
                    (Path(str(module.__file__)).name, at)
                    for at in range(node.lineno, text.count("\n") + node.lineno + 1)
                }
                assert lines & REACHED or any(part in text for part in UNFOLLOWED), text


def test_convert_has_the_flags_that_refusals_of_models_name() -> None:
    parser = argparse.ArgumentParser()
    commands.add_convert_arguments(parser)
    named = {
        flag
        for file in Path(str(models.__file__)).parent.rglob("*.py")
        for flag in re.findall(r"--[a-z][a-z-]+", file.read_text(encoding="utf-8"))
    }
    assert {"--format", "--allow-pickle"} <= named
    # Where these are named, the refusal names a file of the archive, `torchere archive` or a handler, too.
    lacking = {"--model-file", "--factory", "--serialized-file", "--parallel", "--extra-files"}
    assert named - set(parser._option_string_actions) == lacking
