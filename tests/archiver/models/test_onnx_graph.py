"""ONNX: its signature read from its bytes, and served through onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.onnx_graph import external_files_of_onnx, signature_of_onnx
from torchere.archiver.signature import parse
from torchere.archiver.weights import ONNX, classify_file


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def part(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def tensor_info(name: str, kind: int, *shape: int | str) -> bytes:
    sizes = b"".join(part(1, number(1, size) if isinstance(size, int) else part(2, size)) for size in shape)
    return part(1, name) + part(2, part(1, number(1, kind) + part(2, sizes)))


def model(graph: bytes) -> bytes:
    """A ModelProto of IR 8 and opset 17 around a GraphProto."""
    return number(1, 8) + part(2, "by hand") + part(7, graph) + part(8, part(1, "") + number(2, 17))


def relu(*extra: bytes) -> bytes:
    node = part(1, "x") + part(2, "y") + part(4, "Relu")
    infos = part(11, tensor_info("x", 1, "batch", 8)) + part(12, tensor_info("y", 1, "batch", 8))
    return model(part(1, node) + part(2, "relu") + b"".join(extra) + infos)


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    path = tmp_path / "relu.bin"
    path.write_bytes(relu())
    return path


def test_it_is_known_by_its_bytes(onnx_file: Path) -> None:
    assert classify_file(onnx_file).kind == ONNX


def test_names_types_and_shapes_are_read(onnx_file: Path) -> None:
    signature = signature_of_onnx(onnx_file)
    (one,), (other,) = signature.inputs, signature.outputs
    assert (one.name, one.datatype, one.shape) == ("x", "FP32", (-1, 8))
    assert (other.name, other.datatype, other.shape) == ("y", "FP32", (-1, 8))
    assert signature.batched


def test_packed_as_it_is_it_answers_through_onnxruntime(
    onnx_file: Path, pack: Callable[..., Path], serve: Callable[..., list[Any]]
) -> None:
    pytest.importorskip("onnxruntime", reason="has no release for Python 3.10")
    archive = pack(serialized_file=onnx_file)
    opened = open_archive(archive)
    assert opened.manifest.serialized_file == "relu.onnx"
    assert parse(opened.read_text("signature.json")) == signature_of_onnx(onnx_file)
    rows = torch.randn(2, 8)
    answers = serve(archive, [{"body": row.tolist()} for row in rows])
    torch.testing.assert_close(torch.tensor(answers), rows.relu())


def test_an_initializer_that_is_also_listed_as_an_input_is_no_input(tmp_path: Path) -> None:
    path = tmp_path / "old.onnx"
    weight = part(5, number(1, 1) + number(2, 1) + part(8, "w"))
    path.write_bytes(relu(weight, part(11, tensor_info("w", 1, 1))))
    assert [spec.name for spec in signature_of_onnx(path).inputs] == ["x"]


@pytest.mark.parametrize("place", ["../secret.bin", "/etc/passwd", "sub/w.bin", "gone.bin"])
def test_weights_that_lie_elsewhere_are_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "m.onnx"
    entry = part(1, "location") + part(2, place)
    path.write_bytes(relu(part(5, part(8, "w") + part(13, entry))))
    with pytest.raises(ModelRefused, match=r"its weights (are said to|should) lie"):
        external_files_of_onnx(path)


def test_weights_beside_the_model_go_along(tmp_path: Path, pack: Callable[..., Path]) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(relu(part(5, part(8, "w") + part(13, part(1, "location") + part(2, "w.data")))))
    (tmp_path / "w.data").write_bytes(bytes(4))
    names = {entry.name for entry in open_archive(pack(serialized_file=path)).entries}
    assert {"m.onnx", "w.data", "signature.json"} <= names


@pytest.mark.parametrize(
    "data",
    [
        relu()[:40],
        number(1, 8) + part(2, "no graph"),
        number(1, 8) + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        model(part(11, tensor_info("x", 99, 1))),
        model(part(11, part(1, "x"))),
    ],
    ids=["cut off", "no graph", "endless length", "unknown type", "no tensor"],
)
def test_damaged_ones_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelRefused, match=r"ONNX|no tensor"):
        signature_of_onnx(path)


def test_it_can_not_become_another_format(onnx_file: Path, pack: Callable[..., Path]) -> None:
    with pytest.raises(ModelRefused, match="ONNX is packed as it is and can't become torchscript"):
        pack(serialized_file=onnx_file, model_format="torchscript")
