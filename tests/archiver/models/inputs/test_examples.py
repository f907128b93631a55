"""Example inputs in every form, and samples that must be like them."""

from __future__ import annotations

import json
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.examples import (
    Example,
    check_against,
    example_of,
    files_of,
    read_example,
    read_samples,
    signature_at,
)
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.load.source import Source, as_in_archive
from torchere.archiver.models.steps import silent
from torchere.archiver.request import BuildOptions
from torchere.archiver.signature import Limit, Signature, TensorSpec


def test_json_may_be_a_list_an_object_or_a_request(tmp_path: Path) -> None:
    path = tmp_path / "x.data"
    path.write_text("[[1.5, 2], [3, 4]]")
    (only,) = read_example(path).tensors
    assert (only.dtype, only.tolist()) == (torch.float32, [[1.5, 2.0], [3.0, 4.0]])
    path.write_text('{"mask": [[true]], "ids": [[7]]}')
    mask, ids = read_example(path).tensors
    assert (mask.dtype, ids.dtype) == (torch.bool, torch.int64)
    request = {"inputs": [{"name": "ids", "datatype": "INT32", "shape": [1, 2], "data": [5, 6]}]}
    path.write_text(json.dumps(request))
    example = read_example(path)
    assert example.names == ("ids",)
    assert (example.tensors[0].dtype, example.tensors[0].tolist()) == (torch.int32, [[5, 6]])


def test_arrays_and_tensors_keep_their_type_and_doubles_become_floats(tmp_path: Path) -> None:
    path = tmp_path / "x.data"
    with open(path, "wb") as file:
        np.save(file, np.ones((2, 3)))
    assert read_example(path).tensors[0].dtype is torch.float32
    with open(path, "wb") as file:
        np.savez(file, ids=np.ones((1, 4), np.int32), mask=np.ones((1, 4), bool))
    example = read_example(path)
    assert example.names == ("ids", "mask")
    assert [tensor.dtype for tensor in example.tensors] == [torch.int32, torch.bool]
    torch.save({"a": torch.zeros(1, dtype=torch.bfloat16)}, path)
    assert read_example(path).tensors[0].dtype is torch.bfloat16
    torch.save([torch.zeros(1), torch.ones(2)], path)
    assert len(read_example(path).tensors) == 2


def test_doubles_stay_for_models_of_doubles_and_where_they_were_chosen(tmp_path: Path) -> None:
    path = tmp_path / "x.data"
    with open(path, "wb") as file:
        np.save(file, np.asfortranarray(np.arange(6.0).reshape(2, 3)).astype(">f8"))
    (only,) = read_example(path, doubles=True).tensors
    assert (only.dtype, only.tolist()) == (torch.float64, [[0, 1, 2], [3, 4, 5]])
    assert [one.dtype for one in read_samples([path], ["x"], (only,))[0]] == [torch.float64]
    path.write_text("[1.5]")
    assert read_example(path, doubles=True).tensors[0].dtype is torch.float64
    torch.save(only, path)
    assert read_example(path).tensors[0].dtype is torch.float64


def npz(tmp_path: Path, **arrays: Any) -> bytes:
    np.savez_compressed(tmp_path / "made.npz", **arrays)
    return (tmp_path / "made.npz").read_bytes()


def npy_header(shape: str) -> bytes:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(16)


def test_arrays_of_other_sizes_than_they_say_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.data"
    for shape in ("(1000000000000,)", "(1,)", "(-2,)", "(3,"):
        path.write_bytes(npy_header(shape))
        with pytest.raises(ModelRefused, match="no example that can be read"):
            read_example(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr("a.npy", npy_header("(1000000000000,)"))
    with pytest.raises(ModelRefused, match=r"a \.npy file of 8000000000000 bytes by its header, and of 16"):
        read_example(path)
    torch.save(torch.zeros(1).expand(10**12), path)
    with pytest.raises(ModelRefused, match="a tensor of"):
        read_example(path)


def test_a_zip_that_unpacks_to_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.data"
    path.write_bytes(npz(tmp_path, a=np.zeros(10**5)))
    monkeypatch.setattr("torchere.archiver.models.inputs.examples.MAX_EXAMPLE_BYTES", 10**5)
    with pytest.raises(ModelRefused, match="it unpacks to more than 100000 bytes"):
        read_example(path)


@pytest.mark.parametrize("kind", ["npz", "npy", "pt", "png", "bmp", "gif", "webp"])
def test_damaged_examples_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path, chance = tmp_path / "x.data", random.Random(1)
    whole = damaged_forms(tmp_path)[kind]
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 3))):
            data[chance.randrange(4, len(data))] = chance.randrange(256)
        path.write_bytes(bytes(data[: chance.choice((len(data), chance.randrange(1, len(data))))]))
        try:
            read_example(path)  # some are as good as before
        except ModelRefused as error:
            assert "\n" not in str(error)


def damaged_forms(tmp_path: Path) -> dict[str, bytes]:
    made = {"npz": npz(tmp_path, a=np.ones((3, 4)))}
    np.save(tmp_path / "made.npy", np.ones((3, 4)))
    torch.save(torch.zeros(3, 4), tmp_path / "made.pt")
    for suffix in ("png", "bmp", "gif", "webp"):
        Image.new("RGB", (16, 16)).save(tmp_path / f"made.{suffix}")
    return made | {path.suffix[1:]: path.read_bytes() for path in tmp_path.glob("made.*")}


def test_a_picture_is_a_batch_of_one_from_0_to_1(tmp_path: Path) -> None:
    Image.new("L", (5, 4), 255).save(tmp_path / "x.png")
    (tmp_path / "x.png").rename(tmp_path / "x.data")
    (only,) = read_example(tmp_path / "x.data").tensors
    assert (tuple(only.shape), float(only.max())) == ((1, 3, 4, 5), 1.0)


def test_of_a_grey_picture_of_16_bits_the_upper_8_are_kept(tmp_path: Path) -> None:
    pixels = np.array([[0, 0x7FFF], [0x80FF, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    (only,) = read_example(tmp_path / "x.png").tensors
    assert (only * 255).round().int().tolist() == [[[[0, 0x7F], [0x80, 0xFF]]] * 3]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"what",
        b"[[1, 2], [3]]",
        b'["a"]',
        b"[null]",
        b"{}",
        b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1]}]}',
        b"\x93NUMPY nonsense",
        b"\x89PNG nonsense",
        b"PK\3\4 nonsense",
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 60,
    ],
)
def test_what_is_no_example_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.data"
    path.write_bytes(data)
    with pytest.raises(ModelRefused, match=r"x\.data: ") as caught:
        read_example(path)
    assert "\n" not in str(caught.value)


def test_an_example_without_rows_is_refused(tmp_path: Path) -> None:
    """A model that is packed for no rows answers no request."""
    np.save(tmp_path / "none.npy", np.zeros((0, 8), "f4"))
    torch.save({"nodes": torch.zeros(3, 2), "edges": torch.zeros(0, 2)}, tmp_path / "some.pt")
    with pytest.raises(ModelRefused, match=r"none\.npy: it has no rows \(\[0, 8\]\).*expected one or more"):
        read_example(tmp_path / "none.npy")
    assert len(read_example(tmp_path / "some.pt").tensors) == 2


def test_arrays_of_objects_are_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ModelRefused, match="no example that can be read"):
        read_example(path)
    torch.save([Path("a")], path)
    with pytest.raises(ModelRefused, match="no example that can be read"):
        read_example(path)
    assert pickle.loads(pickle.dumps(1)) == 1  # the pickles above are well-formed; it is their content


def test_named_inputs_go_where_the_model_wants_them(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"b": [1], "a": [2]}')
    assert [int(tensor) for tensor in read_example(path).ordered(["a", "b", "c"])] == [2, 1]
    with pytest.raises(ModelRefused, match="has the input 'b'; the model has a: use these names"):
        read_example(path).ordered(["a"])
    with pytest.raises(ModelRefused, match="and not the inputs before"):
        read_example(path).ordered(["z", "a", "b"])


def test_samples_must_be_like_the_example(tmp_path: Path) -> None:
    for name in ("b", "a"):
        np.save(tmp_path / f"{name}.npy", np.full((1, 2), ord(name), np.float32))
    like = (torch.zeros(4, 2),)
    assert [int(sample[0][0, 0]) for sample in read_samples(files_of(tmp_path), ["x"], like)] == [97, 98]
    with pytest.raises(ModelRefused, match="the sample has float32 in 2; expected the example's int64 in 1"):
        read_samples(files_of(tmp_path), ["x"], (torch.zeros(3, dtype=torch.int64),))
    (tmp_path / "none").mkdir()
    with pytest.raises(ModelRefused, match="none holds no files; expected inputs"):
        files_of(tmp_path / "none")


def test_an_example_is_made_up_from_a_signature(tmp_path: Path) -> None:
    specs = (TensorSpec("x", "FP16", (-1, 3)), TensorSpec("ids", "INT64", (1, -1)))
    signature = Signature(specs, specs)
    path = tmp_path / "signature.json"
    path.write_text(signature.to_json())
    example = example_of(signature)
    assert signature_at(path) == signature
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in example.ordered(["x", "ids"])] == [
        (torch.float16, (2, 3)),
        (torch.int64, (1, 2)),
    ]
    check_against(example.tensors, signature)
    with pytest.raises(ModelRefused, match=r"the example of 'x' is \(2, 2\); the model takes \(-1, 3\)"):
        check_against((torch.zeros(2, 2), torch.zeros(1, 1)), signature)
    path.write_text("{}")
    with pytest.raises(ModelRefused, match="version is None"):
        signature_at(path)


MASKED = (Limit(0, least=3, most=96, multiple=4), Limit(1, least=5, most=40, name="length"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ["ids,mask.0=1:80:8", "ids,mask.1=5:32"]),
        ({"dynamic_batch": "1:8"}, ["ids,mask.1=5:32"]),
        ({"dynamic_sizes": ("mask.0=1:200",)}, ["ids,mask.1=5:32"]),
        ({"dynamic_sizes": ("ids,mask.1=2:512",)}, ["ids,mask.0=1:80:8"]),
        ({"dynamic_sizes": ("ids,mask.1=20:512",)}, ["ids,mask.0=1:80:8"]),
        ({"dynamic_sizes": ("mask.1=20:512",), "dynamic_batch": "32:64"}, []),
        ({"example": Path("ids.json")}, []),
    ],
)
def test_sizes_that_an_archive_leaves_free_vary_in_its_limits_unless_an_option_names_them(
    tmp_path: Path, given: dict[str, Any], wanted: list[str]
) -> None:
    ids = (Limit(0, most=80, multiple=8), Limit(1, most=32, name="length"))
    inputs = (TensorSpec("ids", "INT64", (-1, -1), ids), TensorSpec("mask", "BOOL", (-1, -1), MASKED))
    found = sizes_in_archive(tmp_path, inputs, **{"model_format": "torchscript"} | given)
    assert [f"{free.option(['ids', 'mask'])}={free.text}" for free in found] == wanted


@pytest.mark.parametrize(
    ("model_format", "spec", "one_by_one", "wanted"),
    [
        ("export", {"shape": (-1, 3)}, False, ["1:64"]),
        ("torchscript", {"shape": (-1, 3)}, False, []),  # tried without being told
        ("torchscript", {"shape": (-1, 3), "limits": (Limit(0, multiple=4),)}, False, ["4*k"]),
        ("export", {"shape": (-1, 3), "limits": (Limit(0, multiple=5),)}, False, ["1:65:5"]),
        ("export", {"shape": (-1, 3)}, True, ["1:"]),
        ("export", {"shape": (-1, -1)}, False, ["1:64", "1:"]),
    ],
)
def test_a_batch_has_a_largest_size_in_a_program(
    tmp_path: Path, model_format: str, spec: dict[str, Any], one_by_one: bool, wanted: list[str]
) -> None:
    inputs = (TensorSpec("x:0", "FP32", **spec),)
    found = sizes_in_archive(tmp_path, inputs, one_by_one=one_by_one, model_format=model_format)
    assert [free.text for free in found] == wanted
    assert all(free.name.isidentifier() for free in found)


def sizes_in_archive(
    folder: Path, inputs: tuple[TensorSpec, ...], one_by_one: bool = False, **given: Any
) -> tuple[FreeSize, ...]:
    path = folder / "signature.json"
    path.write_text(Signature(inputs, (TensorSpec("y", "FP32", (-1, 3)),), one_by_one).to_json())
    options = BuildOptions(example_signature=path, **given)
    return as_in_archive(Source("TorchScript", folder), options, silent).sizes


def test_an_example_from_a_signature_has_sizes_in_its_limits() -> None:
    specs = (
        TensorSpec("ids", "INT64", (-1, -1), (Limit(1, least=3, name="length"),)),
        TensorSpec("mask", "BOOL", (-1, -1), (Limit(0, most=1), *MASKED[1:])),
        TensorSpec("image", "FP32", (-1, 3, -1), (Limit(2, least=33, most=640, multiple=32),)),
    )
    signature, sides = Signature(specs, specs), FreeSize("image_2", ((2, 2),), 96, 512, 32)
    assert shapes_of(example_of(signature)) == [(1, 5), (1, 5), (1, 3, 64)]
    lengths = [FreeSize("mask_1", ((1, 1),), low, 9) for low in (2, 7)]
    assert shapes_of(example_of(signature, [lengths[0], sides])) == [(1, 5), (1, 5), (1, 3, 96)]
    assert shapes_of(example_of(signature, [lengths[1]])) == [(1, 7), (1, 7), (1, 3, 64)]


def shapes_of(example: Example) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in example.tensors]


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("x", "FP32", (8796093022208, 4)),
        TensorSpec("x", "FP32", (1, -1), (Limit(1, least=8796093022208),)),
        TensorSpec("x", "INT64", (2**14, 2**13 + 1)),
        TensorSpec("x", "FP32", (0, 2**62, 2**62)),
    ],
    ids=["by its shape", "by its limits", "by the size of a number", "by its strides"],
)
def test_an_example_from_a_signature_that_takes_too_much_memory_is_refused(spec: TensorSpec) -> None:
    with pytest.raises(ModelRefused, match=r"would take \d+ bytes, at most 1073741824; give --example"):
        example_of(Signature((spec,), (spec,)))


def test_a_number_without_dimensions_stays_one(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.float32(3))
    assert read_example(tmp_path / "x.npy").tensors[0].shape == ()
