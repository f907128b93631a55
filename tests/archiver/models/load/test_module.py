"""Model files as people write them: packed as they are, and served."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.cli import tidy_when_ended
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.source import read_source
from torchere.archiver.signature import parse

Pack = Callable[..., Path]
Serve = Callable[..., list[Any]]
NET = """
import torch


class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = {layer}

    def forward(self, x):
        return {result}
"""


def written(file: Path, *, name: str = "Net", layer: str = "torch.nn.Identity()", **more: str) -> Path:
    """A model file; `more` may hold `result`, and text to go `before` and `after` the class."""
    source = NET.format(name=name, layer=layer, result=more.get("result", "self.layer(x) * 2"))
    file.parent.mkdir(exist_ok=True)
    file.write_text(more.get("before", "") + source + more.get("after", ""))
    return file


def block() -> str:
    """The source of another class, which adds 1."""
    return NET.format(name="Block", layer="torch.nn.Identity()", result="x + 1")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    torch.save(torch.ones(2, 2), tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.mark.parametrize("result", ["(x * 2, None)", "{'loss': None, 'y': x * 2}"])
def test_none_among_the_results_is_no_output(
    pack: Pack, serve: Serve, tmp_path: Path, example: Path, result: str
) -> None:
    archive = pack(model_file=written(tmp_path / "some.py", result=result), example=example)

    assert serve(archive, [{"body": [1.0, 2.0]}]) == [[2.0, 4.0]]


def test_a_class_that_is_changed_at_once_is_not_the_old_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    found = []
    for factor in (2, 3):  # files of one length, and of one second or nearly
        module = read_source(None, written(tmp_path / "net.py", result=f"x * {factor}"), None, False).module
        assert module is not None
        found.append(module(torch.ones(1)).item())
    assert found == [2, 3]
    assert not (tmp_path / "__pycache__").exists()


def test_a_configuration_and_a_second_name_beside_the_model_do_not_matter(
    pack: Pack, serve: Serve, tmp_path: Path, example: Path
) -> None:
    config = "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    width: int = 4\n"
    model = written(tmp_path / "configured.py", before=config, after="\n\nModel = Net\n")

    archive = pack(model_file=model, example=example)

    assert serve(archive, [{"body": [1.0, 2.0]}]) == [[2.0, 4.0]]


def test_the_files_beside_the_model_that_it_imports_go_into_the_archive(
    pack: Pack, serve: Serve, tmp_path: Path, example: Path
) -> None:
    written(
        tmp_path / "beside_one.py", name="One", before="from beside_parts.two import Two\n", layer="Two()"
    )
    written(tmp_path / "beside_parts" / "two.py", name="Two", before="from . import three\n")
    (tmp_path / "beside_parts" / "__init__.py").write_text("")
    (tmp_path / "beside_parts" / "three.py").write_text("")
    (tmp_path / "beside_unused.py").write_text("")
    model = written(tmp_path / "whole.py", before="from beside_one import One\n", layer="One()")

    archive = pack(model_file=model, example=example)

    assert {entry.name for entry in open_archive(archive).entries if entry.name.endswith(".py")} == {
        *("whole.py", "beside_one.py"),
        *("beside_parts/__init__.py", "beside_parts/two.py", "beside_parts/three.py"),
    }
    assert serve(archive, [{"body": [1.0, 2.0]}]) == [[8.0, 16.0]]


def test_a_compiled_model_takes_no_code_along(pack: Pack, tmp_path: Path, example: Path) -> None:
    written(tmp_path / "beside_compiled.py", name="One")
    model = written(tmp_path / "compiled.py", before="from beside_compiled import One\n", layer="One()")

    archive = pack(model_file=model, example=example, model_format="torchscript")

    assert not [entry.name for entry in open_archive(archive).entries if entry.name.endswith(".py")]


def test_of_two_models_in_a_file_the_refusal_says_what_works(
    pack: Pack, tmp_path: Path, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(tmp_path / "folder" / "two_models.py", before=block())
    monkeypatch.chdir(tmp_path / "folder")

    with pytest.raises(
        ModelRefused, match=r"Modules: Block, Net; .* in the file's folder: --factory two_models:Net"
    ):
        pack(model_file=model, example=example)

    pack(factory="two_models:Net", example=example, model_format="export")
    assert str(tmp_path / "folder") not in sys.path


@pytest.mark.parametrize("name", ["with_parts", "with-parts"])
def test_of_several_classes_the_one_that_no_other_names_is_the_model(
    pack: Pack, serve: Serve, tmp_path: Path, example: Path, name: str
) -> None:
    beside = f"beside_{name.replace('-', '')}"
    written(tmp_path / f"{beside}.py", name="One", result="x")
    (tmp_path / f"served_{name}.py").write_text("")
    model = written(tmp_path / f"{name}.py", before=f"from {beside} import One\n{block()}", layer="Block()")
    source = read_source(None, model, None, False)
    assert source.notes == (f"the model is Net of Block, Net: no other class of {model} names it",)

    archive = opened = open_archive(pack(model_file=model, example=example))

    assert opened.manifest.model_file == f"_served_{name}.py"
    assert {f"{name}.py", f"{beside}.py"} <= {entry.name for entry in archive.entries}
    assert serve(archive.path, [{"body": [1.0, 2.0]}]) == [[4.0, 6.0]]


def test_weights_fill_the_class_that_was_chosen(
    pack: Pack, serve: Serve, tmp_path: Path, example: Path
) -> None:
    model = written(tmp_path / "filled.py", before=block(), layer="torch.nn.Sequential(Block(), Scale())")
    scale = "class Scale(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    scale += "        self.by = torch.nn.Parameter(torch.zeros(1))\n\n    def forward(self, x):\n"
    model.write_text(f"import torch\n\n\n{scale}        return x * self.by\n\n\n{model.read_text()}")
    torch.save({"layer.1.by": torch.full((1,), 5.0)}, tmp_path / "filled.pth")
    archive = pack(model_file=model, serialized_file=tmp_path / "filled.pth", example=example)
    assert serve(archive, [{"body": [1.0, 2.0]}]) == [[20.0, 30.0]]


@pytest.mark.parametrize(
    "after",
    [
        "\n\nclass Other(torch.nn.Module):\n    pass\n",  # two that no class names
        "\n\ndef whole():\n    return Other()\n\n\nclass Other(torch.nn.Module):\n    pass\n",
        "\n\nclass Settings:\n    of = Net\n",  # none that no class names
    ],
)
def test_several_classes_that_no_other_names_or_none_are_refused(tmp_path: Path, after: str) -> None:
    model = written(tmp_path / "unclear.py", before=block(), layer="Block()", after=after)
    with pytest.raises(ModelRefused, match=r"Modules: Block, Net.*; expected one, the model, or one that no"):
        read_source(None, model, None, False)


@pytest.mark.parametrize("before", ["", block()], ids=["one class", "two"])
def test_a_model_file_that_no_server_can_import_is_refused_unless_it_is_converted(
    pack: Pack, tmp_path: Path, example: Path, before: str
) -> None:
    model = written(
        tmp_path / "one.v2.py", before=before, layer="Block()" if before else "torch.nn.Identity()"
    )
    with pytest.raises(ModelRefused, match=r"one\.v2\.py: a server imports it by its name, .* to one_v2\.py"):
        pack(model_file=model, example=example)
    pack(model_file=model, example=example, model_format="torchscript")


@pytest.mark.parametrize("name", ["class", "my-model", "2nd"])
def test_a_model_file_whose_name_no_import_statement_takes_is_served(
    pack: Pack, serve: Serve, tmp_path: Path, example: Path, name: str
) -> None:
    archive = pack(model_file=written(tmp_path / f"{name}.py"), example=example)
    assert serve(archive, [{"body": [1.0, 2.0]}]) == [[2.0, 4.0]]


@pytest.mark.parametrize(
    ("before", "layer"),
    [
        ("import sys\n\nsys.exit(0)\n", "torch.nn.Identity()"),
        ("import argparse\n\nargparse.ArgumentParser().parse_args(['--lr'])\n", "torch.nn.Identity()"),
        ("import sys\n", "sys.exit(0)"),
    ],
    ids=["exit", "argparse", "when it is made"],
)
def test_a_model_that_ends_the_process_is_refused(tmp_path: Path, before: str, layer: str) -> None:
    model = written(tmp_path / "ending.py", before=before, layer=layer)
    with pytest.raises(ModelRefused, match=r"failed: it ends the process \(sys\.exit\([02]\)\), .* put that"):
        read_source(None, model, None, False)


def test_a_signal_ends_the_process_also_while_the_model_is_made(tmp_path: Path) -> None:
    model = written(tmp_path / "slow.py", before="import os\n", layer="os.kill(os.getpid(), 15)")
    with pytest.raises(SystemExit) as end, tidy_when_ended():
        read_source(None, model, None, False)
    assert end.value.code == 128 + 15


def test_a_model_that_is_trained_for_int8_learns_nothing_from_runs_of_the_packer(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch.ao.quantization import FakeQuantize\n\n\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fake = FakeQuantize()\n"
        "        self(torch.linspace(-1, 1, 9))\n\n"
        "    def forward(self, x):\n        return self.fake(x)\n"
    )
    module: Any = read_source(None, tmp_path / "net.py", None, False).module
    scale = module.fake.scale.clone()
    module(torch.full((2,), 100.0))
    assert torch.equal(module.fake.scale, scale)


def test_a_file_without_a_model_is_refused_with_what_to_do(pack: Pack, tmp_path: Path, example: Path) -> None:
    (tmp_path / "nothing.py").write_text("import torch\n")

    with pytest.raises(ModelRefused, match=r"Modules: none; .* --factory package"):
        pack(model_file=tmp_path / "nothing.py", example=example)


@pytest.mark.parametrize("result", ["Out(x * 2, x)", "torch.max(x, 1)"])
def test_tuples_of_a_class_are_plain_ones_in_an_exported_program(
    pack: Pack, serve: Serve, tmp_path: Path, example: Path, result: str
) -> None:
    named = "from collections import namedtuple\n\nOut = namedtuple('Out', 'a b')\n"
    model = written(tmp_path / "named.py", before=named, result=result)
    archive = pack(model_file=model, example=example, model_format="export", dynamic_batch="1:8")
    (answer,) = serve(archive, [{"body": [1.0, 3.0]}])
    assert answer == (
        {"output_0": [2.0, 6.0], "output_1": [1.0, 3.0]}
        if "Out" in result
        else {"output_0": 3.0, "output_1": 1}
    )


def test_a_program_is_exported_of_a_forward_that_takes_any_number_of_inputs(
    pack: Pack, serve: Serve, tmp_path: Path
) -> None:
    model = written(tmp_path / "any.py")
    model.write_text(
        model.read_text().replace("self, x", "self, first, *more").replace("(x)", "(first + more[0])")
    )
    torch.save((torch.ones(2, 2), torch.ones(2, 2)), tmp_path / "two.pt")
    archive = pack(model_file=model, example=tmp_path / "two.pt", model_format="export", dynamic_batch="1:8")
    names = [spec.name for spec in parse(open_archive(archive).read_text("signature.json")).inputs]
    (answer,) = serve(archive, [{"body": dict(zip(names, ([1.0, 3.0], [1.0, 1.0]), strict=True))}])
    assert answer == [4.0, 8.0]
