"""ONNX: its signature read from its bytes, and served through onnxruntime."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.onnx import check_external_files, read_onnx
from torchere.archiver.models.probe.derive import tried_signature
from torchere.archiver.scan.weights import ONNX, classify_file
from torchere.archiver.signature import Signature, Values, parse

NEEDS_RUNTIME = "has no release for Python 3.10"


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
    signature = read_onnx(onnx_file).signature_by_names()
    (one,), (other,) = signature.inputs, signature.outputs
    assert (one.name, one.datatype, one.shape) == ("x", "FP32", (-1, 8))
    assert (other.name, other.datatype, other.shape) == ("y", "FP32", (-1, 8))
    assert signature.batched


def test_packed_as_it_is_it_answers_through_onnxruntime(
    onnx_file: Path, pack: Callable[..., Path], serve: Callable[..., list[Any]]
) -> None:
    pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    archive = pack(serialized_file=onnx_file)
    opened = open_archive(archive)
    assert opened.manifest.serialized_file == "relu.onnx"
    assert parse(opened.read_text("signature.json")) == read_onnx(onnx_file).signature_by_names()
    rows = torch.randn(2, 8)
    answers = serve(archive, [{"body": row.tolist()} for row in rows])
    torch.testing.assert_close(torch.tensor(answers), rows.relu())


def test_an_initializer_that_is_also_listed_as_an_input_is_no_input(tmp_path: Path) -> None:
    path = tmp_path / "old.onnx"
    weight = part(5, number(1, 1) + number(2, 1) + part(8, "w"))
    path.write_bytes(relu(weight, part(11, tensor_info("w", 1, 1))))
    assert [spec.name for spec in read_onnx(path).signature_by_names().inputs] == ["x"]


@pytest.mark.parametrize("place", ["../secret.bin", "/etc/passwd", "sub/w.bin", "gone.bin"])
def test_weights_that_lie_elsewhere_are_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "m.onnx"
    entry = part(1, "location") + part(2, place)
    path.write_bytes(relu(part(5, part(8, "w") + part(13, entry))))
    with pytest.raises(ModelRefused, match=r"its weights (are said to|should) lie"):
        read_onnx(path)
    path.write_bytes(relu(constant(place)))
    with pytest.raises(ModelRefused, match=r"its weights (are said to|should) lie"):
        read_onnx(path)


def external(place: str) -> bytes:
    """A TensorProto of one byte that lies in another file."""
    return number(1, 1) + number(2, 2) + part(8, "w") + part(13, part(1, "location") + part(2, place))


def constant(place: str) -> bytes:
    """A GraphProto with a node whose attribute is such a tensor."""
    return part(1, part(4, "Constant") + part(5, part(5, external(place))))


def tensors_at(place: str) -> dict[str, bytes]:
    """A model for each place where a tensor may stand."""
    graph = constant(place)
    return {
        "initializer": relu(part(5, external(place))),
        "node": relu(graph),
        "list of tensors": relu(part(1, part(5, part(10, external(place))))),
        "sparse initializer": relu(part(15, part(1, external(place)))),
        "sparse attribute": relu(part(1, part(5, part(22, part(2, external(place)))))),
        "branch": relu(part(1, part(4, "If") + part(5, part(6, graph)))),
        "list of graphs": relu(part(1, part(5, part(11, graph)))),
        "function": relu() + part(25, part(7, part(5, part(5, external(place))))),
        "default of a function": relu() + part(25, part(11, part(5, external(place)))),
        "training": relu() + part(20, part(2, graph)),
        "second graph": relu() + part(7, graph),
        "field of a number that overflows": relu() + varint(2**32 | 7 << 3 | 2) + part(7, graph)[1:],
    }


@pytest.mark.parametrize("where", tensors_at(""))
def test_a_tensor_outside_of_the_archive_is_refused_wherever_it_stands(tmp_path: Path, where: str) -> None:
    path = tmp_path / "m.onnx"
    for place in ("../key_file.json", "/etc/passwd", "a/../../b", "*/_ORT_MEM_ADDR_/*"):
        path.write_bytes(tensors_at(place)[where])
        with pytest.raises(ModelRefused):
            check_external_files(path)
    if where in ("initializer", "node", "function"):
        for place in ("w.data", "./w.data", "folder/w.data"):
            path.write_bytes(tensors_at(place)[where])
            check_external_files(path)


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
        model(part(11, b"\x0a\x09x")),
    ],
    ids=["cut off", "no graph", "endless length", "unknown type", "no tensor", "input cut off"],
)
def test_damaged_ones_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelRefused, match=r"ONNX|no tensor"):
        read_onnx(path)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (b"", r"inputs is \[\]; expected a list of at least one tensor"),
        (part(11, tensor_info("a\tb", 1, 8)), r"inputs\[0\].name is 'a\\tb'; expected a text of printable"),
    ],
    ids=["no inputs", "a tab in the name"],
)
def test_inputs_that_no_signature_can_have_are_refused(
    tmp_path: Path, pack: Callable[..., Path], inputs: bytes, said: str
) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(model(part(2, "net") + inputs + part(12, tensor_info("y", 1, 8))))
    with pytest.raises(ModelRefused, match=said):
        pack(serialized_file=path)


def test_it_can_not_become_another_format(onnx_file: Path, pack: Callable[..., Path]) -> None:
    with pytest.raises(ModelRefused, match="ONNX is packed as it is and can't become torchscript; leave it"):
        pack(serialized_file=onnx_file, model_format="torchscript")


@pytest.mark.parametrize("more", [{}, {"model_format": "export"}])
def test_it_can_not_be_quantised_and_the_refusal_says_what_works(
    onnx_file: Path, pack: Callable[..., Path], more: dict[str, str]
) -> None:
    with pytest.raises(
        ModelRefused, match=r"be quantised by --quantize int8-dynamic; .* quantise it with onnxruntime"
    ):
        pack(serialized_file=onnx_file, quantize="int8-dynamic", **more)


def softmax(first: str, other: str, *, axis: int) -> bytes:
    """Softmax along an axis of [first, 3] to [other, 3]."""
    attribute = part(5, part(1, "axis") + number(3, axis) + number(20, 2))
    node = part(1, "x") + part(2, "y") + part(4, "Softmax") + attribute
    infos = part(11, tensor_info("x", 1, first, 3)) + part(12, tensor_info("y", 1, other, 3))
    return model(part(1, node) + part(2, "softmax") + infos)


def tried(path: Path, example: torch.Tensor | None = None) -> tuple[Signature, list[str]]:
    said: list[str] = []
    examples = None if example is None else (example,)
    return tried_signature(path, read_onnx(path), examples, said.append), said


@pytest.mark.parametrize(("other", "size"), [("n", -1), ("m", 1), ("", 1)], ids=["shared", "two", "none"])
def test_by_its_names_a_first_dimension_is_the_batch_if_all_share_one(
    tmp_path: Path, other: str, size: int
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(softmax("n" if other else "", other, axis=1))
    signature = read_onnx(path).signature_by_names()
    assert (signature.inputs[0].shape, signature.batched) == ((size, 3), size == -1)


def test_a_model_that_mixes_rows_is_not_batched_whatever_its_names(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    path = tmp_path / "m.onnx"
    path.write_bytes(softmax("time", "time", axis=0))
    signature, said = tried(path)
    assert (signature.inputs[0].shape, signature.batched) == ((1, 3), False)
    assert len(said) == 1 and "depends on the other rows of the batch" in said[0]
    signature, _ = tried(path, torch.rand(5, 3))
    assert (signature.inputs[0].shape, signature.batched) == ((5, 3), False)


def test_a_model_whose_rows_are_apart_is_batched_whatever_its_names(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    path = tmp_path / "m.onnx"
    path.write_bytes(softmax("unk__1", "unk__2", axis=1))
    signature, said = tried(path)
    assert (signature.inputs[0].shape, signature.batched, said) == ((-1, 3), True, [])


@pytest.mark.parametrize(("other", "size"), [("n", -1), ("m", 1)], ids=["shared", "two"])
def test_without_onnxruntime_names_decide_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, size: int
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    path = tmp_path / "m.onnx"
    path.write_bytes(softmax("n", other, axis=0))
    signature, said = tried(path)
    assert signature.inputs[0].shape == (size, 3)
    assert len(said) == 1 and "onnxruntime is not installed" in said[0]


def test_whole_numbers_are_not_made_up(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    path = tmp_path / "m.onnx"
    node = part(1, "x") + part(2, "y") + part(4, "Neg")
    infos = part(11, tensor_info("x", 7, "a", 3)) + part(12, tensor_info("y", 7, "b", 3))
    path.write_bytes(model(part(1, node) + part(2, "neg") + infos))
    assert not tried(path)[0].batched
    assert tried(path, torch.tensor([[1, 2, 3]]))[0].batched


def test_an_example_of_other_sizes_is_refused(onnx_file: Path) -> None:
    with pytest.raises(ModelRefused, match=r"the example of 'x' is \(2, 7\); the model takes \(-1, 8\)"):
        tried(onnx_file, torch.rand(2, 7))


def test_packing_tries_the_rows(pack: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    path = tmp_path / "m.onnx"
    path.write_bytes(softmax("time", "time", axis=0))
    assert not parse(open_archive(pack(serialized_file=path)).read_text("signature.json")).batched


def test_texts_need_a_handler(pack: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    node = part(1, "x") + part(2, "y") + part(4, "StringNormalizer")
    infos = part(11, tensor_info("x", 8, 1)) + part(12, tensor_info("y", 8, 1))
    path.write_bytes(model(part(1, node) + part(2, "texts") + infos))
    with pytest.raises(ModelRefused, match=r"the input 'x' takes texts.*name a --handler of your own"):
        pack(serialized_file=path)
    (tmp_path / "own.py").write_text("def handle(data, context): return data")
    assert pack(str(tmp_path / "own.py"), serialized_file=path).is_file()


@pytest.mark.parametrize(("kind", "reason"), [(8, "gives texts"), (16, "gives BF16")], ids=["texts", "BF16"])
def test_outputs_that_no_answer_can_hold_need_a_handler(
    pack: Callable[..., Path], tmp_path: Path, kind: int, reason: str
) -> None:
    path = tmp_path / "m.onnx"
    node = part(1, "x") + part(2, "y") + part(4, "Cast") + part(5, part(1, "to") + number(3, kind))
    infos = part(11, tensor_info("x", 1, "n", 3)) + part(12, tensor_info("y", kind, "n", 3))
    path.write_bytes(model(part(1, node) + part(2, "cast") + infos))
    with pytest.raises(ModelRefused, match=rf"the output 'y' {reason}.*name a --handler of your own"):
        pack(serialized_file=path)


def test_a_size_of_minus_one_is_a_free_one(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    node = part(1, "x") + part(2, "y") + part(4, "Relu")
    infos = part(11, tensor_info("x", 1, 2**64 - 1, 3)) + part(12, tensor_info("y", 1, 2**64 - 1, 3))
    path.write_bytes(model(part(1, node) + part(2, "relu") + infos))
    assert read_onnx(path).signature.inputs[0].shape == (-1, 3)


def unshaped_relu(path: Path, *inputs: int | str) -> Path:
    """Relu that does not say how many dimensions it gives, nor, without `inputs`, how many it takes."""
    node = part(1, "x") + part(2, "y") + part(4, "Relu")
    unshaped = part(2, part(1, number(1, 1)))
    taken = tensor_info("x", 1, *inputs) if inputs else part(1, "x") + unshaped
    infos = part(11, taken) + part(12, part(1, "y") + unshaped)
    path.write_bytes(model(part(1, node) + part(2, "relu") + infos))
    return path


def node(kind: str, inputs: str, output: str, *more: bytes) -> bytes:
    names = b"".join(part(1, name) for name in inputs.split())
    return part(1, names + part(2, output) + part(4, kind) + b"".join(more))


def axis(value: int) -> bytes:
    return part(5, part(1, "axis") + number(3, value % 2**64) + number(20, 2))


def table(name: str, rows: int, columns: int, *, packed: bool = False) -> bytes:
    sizes = part(1, varint(rows) + varint(columns)) if packed else number(1, rows) + number(1, columns)
    return part(5, sizes + number(2, 1) + part(8, name) + part(9, bytes(4 * rows * columns)))


def lookup(path: Path, *parts: bytes) -> Path:
    """Tables `t` of [7, 4] and `u` of [5, 4], looked up by INT64 `x` of [n, 3] in nodes that make `y`."""
    tables = table("t", 7, 4) + table("u", 5, 4, packed=True)
    infos = part(11, tensor_info("x", 7, "n", 3)) + part(12, tensor_info("y", 1, "n", 3, "k"))
    path.write_bytes(model(part(2, "lookup") + b"".join(parts) + tables + infos))
    return path


@pytest.mark.parametrize(
    ("parts", "values"),
    [
        ([node("Gather", "t x", "y")], Values(-7, 6)),
        ([node("Gather", "t x", "y", part(7, "ai.onnx"))], Values(-7, 6)),
        ([node("Gather", "t x", "a"), node("Relu", "a", "y")], Values(-7, 6)),
        ([node("Gather", "t x", "a"), node("Gather", "u x", "b"), node("Add", "a b", "y")], Values(-5, 4)),
        ([node("Gather", "t x", "a", axis(-1)), node("Identity", "a", "y")], Values(-4, 3)),
        ([node("Abs", "x", "a"), node("Gather", "t a", "y")], None),
        ([node("Identity", "t", "a"), node("Gather", "a x", "y")], None),
    ],
    ids=["alone", "domain", "with others", "two tables", "last axis", "computed", "no initializer"],
)
def test_an_input_that_is_looked_up_has_the_numbers_that_onnxruntime_takes(
    tmp_path: Path, parts: list[bytes], values: Values | None
) -> None:
    path = lookup(tmp_path / "m.onnx", *parts)
    assert read_onnx(path).signature.inputs[0].values == values
    runtime = pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    bounds = (values.least, values.most) if values else (-4, 6)
    for taken in bounds:
        session.run(None, {"x": np.full((1, 3), taken)})
    for outside in (bounds[0] - 1, bounds[1] + 1) if values else ():
        with pytest.raises(
            runtime.capi.onnxruntime_pybind11_state.InvalidArgument, match="out of data bound"
        ):
            session.run(None, {"x": np.array([[0, 0, outside]])})


def test_a_gather_of_another_domain_is_another_operator(tmp_path: Path) -> None:
    path = lookup(tmp_path / "m.onnx", node("Gather", "t x", "y", part(7, "own")))
    assert read_onnx(path).signature.inputs[0].values is None


@pytest.mark.parametrize(
    "parts",
    [
        [node("Gather", "t x", "a"), node("Shape", "a", "y")],
        [node("Gather", "t x", "unused"), node("Relu", "unused", "too"), node("Identity", "t", "y")],
    ],
    ids=["its shape", "nothing"],
)
def test_a_table_that_gives_no_output_its_values_limits_nothing(tmp_path: Path, parts: list[bytes]) -> None:
    path = lookup(tmp_path / "m.onnx", *parts)
    assert read_onnx(path).signature.inputs[0].values is None


def test_what_has_no_shape_has_the_dimensions_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    signature, _ = tried(unshaped_relu(tmp_path / "m.onnx", "n", 3))
    assert (signature.outputs[0].shape, signature.batched) == ((-1, -1), True)
    path = unshaped_relu(tmp_path / "m.onnx")
    signature, _ = tried(path, torch.rand(2, 3))
    assert (signature.inputs[0].shape, signature.outputs[0].shape) == ((-1, -1), (-1, -1))
    with pytest.raises(ModelRefused, match="does not say which dimensions 'x' has; give --example"):
        tried(path)


def test_packing_parses_the_file_once(
    tmp_path: Path, pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(softmax("n", "n", axis=1))
    mapped = []
    real_mmap = mmap.mmap

    def spy(*args: Any, **options: Any) -> mmap.mmap:
        mapped.append(args)
        return real_mmap(*args, **options)

    monkeypatch.setattr(mmap, "mmap", spy)
    pack(serialized_file=path)
    assert len(mapped) == 1


def test_onnxruntime_loads_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("onnxruntime", reason=NEEDS_RUNTIME)
    loads = tmp_path / "loads"  # a file, because a child process loads the model
    real_session = runtime.InferenceSession

    def spy(path: str, **options: Any) -> Any:
        with loads.open("a") as file:
            file.write(f"{path}\n")
        return real_session(path, **options)

    monkeypatch.setattr(runtime, "InferenceSession", spy)
    path = unshaped_relu(tmp_path / "m.onnx", "n", 3)
    assert tried(path)[0].batched
    assert loads.read_text() == f"{path}\n"


def test_what_has_no_shape_is_refused_where_it_can_not_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unshaped_relu(tmp_path / "m.onnx", "n", 3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelRefused, match=r"which dimensions 'y' has.*onnxruntime is not installed"):
        tried(path)
