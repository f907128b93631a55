"""Inputs that are damaged, lie, or would run code: refused in one line, and nothing in them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.checkpoint import read_weights
from torchere.archiver.models.load.safetensors import read_safetensors
from torchere.archiver.models.load.source import read_source

Rewrite = Callable[[str, bytes], bytes]


class Trap:
    """Unpickled, it would make a file."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sign),)


@pytest.fixture
def sign(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


def refused(path: Path, match: str, **options: Any) -> None:
    with pytest.raises(ModelRefused, match=match) as caught:
        read_source(path, None, options.get("factory"), False)
    assert "\n" not in str(caught.value)


def rewritten(source: Path, target: Path, change: Rewrite) -> Path:
    """A copy of a zip whose entries went through `change`."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return target


def with_program(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of an exported program whose JSON was changed."""

    def edit(name: str, data: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return data
        program = json.loads(data)
        change(program)
        return json.dumps(program).encode()

    return rewritten(source, target, edit)


@pytest.mark.parametrize("name", ["script.model", "program.model", "state.weights"])
def test_a_file_that_is_cut_off_is_refused(forms: Any, tmp_path: Path, name: str) -> None:
    whole = forms.file(name).read_bytes()
    path = tmp_path / "cut.pt"
    path.write_bytes(whole[: len(whole) // 2])
    refused(path, "damaged zip; .* cut off", factory=None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a model of a kind known here"),
        (b"#!/bin/sh\nrm -rf /\n", "not a model of a kind known here"),
        (b"\x7fELF" + bytes(60), "shared library; expected"),
        (bytes(4096), "not a model of a kind known here"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    refused(path, said)


def test_python_code_in_place_of_a_model_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "handler.py"
    path.write_text("def handle(data, context): ...")
    refused(path, r"handler\.py: Python code, .*--model-file .*--handler .*handler\.py")


def test_a_pickle_that_calls_is_not_unpickled(tmp_path: Path, sign: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(1), "trap": Trap(sign)}, path)
    with pytest.raises(ModelRefused, match=r"it imports (posix|nt)\.mkdir.*--allow-pickle"):
        read_weights(path)
    path.write_bytes(pickle.dumps(Trap(sign)))
    with pytest.raises(ModelRefused, match=r"more than tensors|damaged"):
        read_weights(path)
    assert not sign.exists()


def test_the_example_of_an_exported_program_is_not_unpickled(forms: Any, tmp_path: Path, sign: Path) -> None:
    buffer = io.BytesIO()
    torch.save((Trap(sign),), buffer)
    path = rewritten(
        forms.file("program.model"),
        tmp_path / "m.pt2",
        lambda name, data: buffer.getvalue() if "sample_inputs" in name else data,
    )
    refused(path, r"could run code: its pickle imports (posix|nt)\.mkdir")
    assert not sign.exists()


def test_weights_of_an_exported_program_are_not_unpickled(forms: Any, tmp_path: Path, sign: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Trap(sign), buffer)

    def change(name: str, data: bytes) -> bytes:
        if name.endswith("model_weights_config.json"):
            config = json.loads(data)
            for payload in config["config"].values():
                payload["use_pickle"] = True
            return json.dumps(config).encode()
        return buffer.getvalue() if "/weights/weight_" in name else data

    refused(rewritten(forms.file("program.model"), tmp_path / "m.pt2", change), "its pickle imports")
    assert not sign.exists()


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("expr_str", "__import__('os').mkdir({sign!r})"),
        ("expr_str", "(lambda: 1)()"),
        ("expr_str", "s0.__class__"),
        ("expr_str", "Symbol('__import__')"),
        ("guard", "__import__('os').mkdir({sign!r})"),
        ("guard", "1 == 1)\n  import os"),
        ("guard", "[x for x in (1,)]"),
        ("target", "torch.serialization.os.mkdir"),
        ("target", "torch.ops.load_library"),
        ("target", "torch.ops.import_module"),
        ("target", "torch.ops.aten.add.__class__.mro"),
        ("target", "torch.ops.aten.from_file.default"),
        ("target", "_operator.attrgetter"),
        ("target", "#ns:op"),
        ("name", "x=__import__('os').mkdir({sign!r})"),
        ("name", "x, y"),
        ("arguments", "x=print()"),
        ("tree", "defaultdict"),
        ("tree", "k=print()"),
    ],
)
def test_a_program_that_would_run_code_when_loaded_is_refused(
    forms: Any, tmp_path: Path, sign: Path, where: str, text: str
) -> None:
    text = text.format(sign=str(sign))

    def change(program: dict[str, Any]) -> None:
        module = program["graph_module"]
        if where == "expr_str":
            module["graph"]["tensor_values"]["features"]["sizes"][0]["as_expr"]["expr_str"] = text
        elif where == "guard":
            program["guards_code"] = [text]
        elif where == "target":
            module["graph"]["nodes"][0]["target"] = text
        elif where == "name":
            module["graph"]["inputs"][-1]["as_tensor"]["name"] = text
        elif where == "arguments":
            module["module_call_graph"][0]["signature"]["forward_arg_names"] = [text]
        else:
            signature = module["module_call_graph"][0]["signature"]
            signature["in_spec"] = signature["in_spec"].replace("builtins.tuple", text)

    refused(with_program(forms.file("program.model"), tmp_path / "m.pt2", change), "could run code")
    assert not sign.exists()


def test_a_second_entry_of_the_same_name_hides_nothing(forms: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(forms.file("program.model").read_bytes())
    with zipfile.ZipFile(path, "a") as package:
        name = next(name for name in package.namelist() if name.endswith("models/model.json"))
        data = package.read(name)
        with pytest.warns(UserWarning, match="Duplicate name"):
            package.writestr(name, data)
    refused(path, "damaged: .*twice")


def test_the_index_of_a_distributed_checkpoint_is_not_unpickled_freely(tmp_path: Path, sign: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(sign)))
    refused(folder, r"its index imports (posix|nt)\.mkdir")
    (folder / ".metadata").write_bytes(b"\x80\x04nonsense")
    refused(folder, "damaged index")
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refused(folder, "it holds a dict; expected the index")
    assert not sign.exists()


def test_a_distributed_checkpoint_without_a_shard_is_refused(forms: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / ".metadata").write_bytes(forms.file("sharded/.metadata").read_bytes())
    refused(folder, r"its index speaks of \d+ bytes")
    for shard in forms.file("sharded").glob("*.distcp"):
        (folder / shard.name).write_bytes(bytes(shard.stat().st_size))
    refused(folder, "damaged distributed checkpoint")


def safetensors(header: Any, numbers: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + numbers


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (safetensors({"w": W}, bytes(4)), "file not fully covered"),
        (safetensors({"w": {**W, "shape": [2**40]}}, bytes(8)), "invalid shape, data type, or offset"),
        (safetensors({"w": {**W, "shape": [-2]}}, bytes(8)), "integer `-2`"),
        (safetensors({"w": {**W, "data_offsets": [8, 0]}}, bytes(8)), "invalid offset for tensor `w`"),
        (safetensors({"w": {**W, "dtype": "PICKLE"}}, bytes(8)), "unknown variant `PICKLE`"),
        (safetensors({"w": 1}), "integer `1`, expected struct TensorInfo"),
        (safetensors({"w": {**W, "dtype": ["F32"]}}, bytes(8)), "invalid type: sequence"),
        (safetensors({"v": W, "w": W}, bytes(8)), "invalid offset for tensor `[vw]`"),
        (safetensors({"w": {**W, "data_offsets": [4, 12]}}, bytes(12)), "invalid offset for tensor `w`"),
        (safetensors({"w": W}, bytes(9)), "file not fully covered"),
        (safetensors(b"[]"), "invalid type: sequence"),
        (safetensors(b"{nonsense"), "invalid JSON"),
        (safetensors({}, length=2**60), "header too large"),
        (b"\1", "header too small"),
        (safetensors({"w": W}, bytes(8))[:30], "invalid header length"),
        (safetensors(b'{"w":' * 100_000), "recursion limit"),
        (safetensors({"w": {**W, "shape": [2**33, 2**33]}}, bytes(8)), "overflow"),
        (
            safetensors({"w": {**W, "dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, bytes(3)),
            "F6_E2M3",
        ),
    ],
)
def test_safetensors_that_lie_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelRefused, match=said):
        read_safetensors(path)


def test_weights_of_another_shape_are_refused(forms: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(
        {key: value.reshape(1, *value.shape) for key, value in forms.module.state_dict().items()}, path
    )
    refused(path, "loading the weights into Net failed", factory="net_module:net")


def test_a_model_file_must_define_one_module(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text("import torch\nclass A(torch.nn.Module): ...\nclass B(torch.nn.Module): ...\n")
    with pytest.raises(ModelRefused, match=r"defines these torch\.nn\.Modules: A, B; expected one"):
        read_source(None, path, None, False)
    path.write_text("raise KeyError('no')\n")
    with pytest.raises(ModelRefused, match="importing the model file failed: KeyError"):
        read_source(None, path, None, False)
