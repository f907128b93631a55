"""What a weights file is, told from its bytes."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile

import pytest

from torchere.archiver.scan.pickles import MAX_PICKLE_BYTES
from torchere.archiver.scan.weights import HEAD_BYTES, bytes_to_see, classify


def zip_with(*names: str) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(f"model/{name}", b"x")
    return buffer


@pytest.mark.parametrize(
    ("names", "kind", "pickled"),
    [
        (("data.pkl", "code/__torch__.py", "constants.pkl"), "TorchScript", True),
        (("data.pkl", "data/0"), "torch.save", True),
        # torch decides by constants.pkl alone: a folder named code does not make a pickle harmless.
        (("data.pkl", "code/decoy.py"), "torch.save", True),
        (("archive_format", "models/model.json", "data/weights/weight_0"), "ExportedProgram", False),
        (("archive_format", "data/sample_inputs/model.pt"), "ExportedProgram", True),
        (("archive_format", "data/aotinductor/model/x.so"), "AOTInductor", False),
        (("serialized_exported_program.json", "serialized_state_dict.pt"), "ExportedProgram", True),
        (("readme.txt",), "zip", False),
    ],
)
def test_zips_are_known_by_their_records(names: tuple[str, ...], kind: str, pickled: bool) -> None:
    found = classify("model.pt", zip_with(*names))
    assert (found.kind, found.pickled) == (kind, pickled)
    assert ("any Python code" in found.risk) == (kind == "torch.save")


def test_an_exported_program_without_example_inputs_has_no_pickle() -> None:
    buffer = zip_with("archive_format", "models/model.json")
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("model/data/sample_inputs/model.pt", b"")
    found = classify("model.pt2", buffer)
    assert (found.kind, found.pickled) == ("ExportedProgram", False)


def test_an_exported_program_of_torch_2_7_has_no_folder() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("version", "8.2")
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", b"weights")
    found = classify("model.pt2", buffer)
    assert (found.kind, found.pickled) == ("ExportedProgram", True)


def test_an_empty_record_does_not_hide_a_pickle_of_the_same_name() -> None:
    buffer = zip_with("archive_format", "data/sample_inputs/model.pt")
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("decoy/data/sample_inputs/model.pt", b"")
    assert classify("model.pt2", buffer).pickled


def test_native_code_in_a_package_is_said() -> None:
    assert "native code" in classify("m.pt2", zip_with("archive_format", "data/aotinductor/m/x.so")).risk


@pytest.mark.parametrize(
    ("name", "head", "kind", "pickled"),
    [
        ("a.pth", pickle.dumps({"a": 1}, protocol=2)[:16], "pickle", True),
        ("a.bin", pickle.dumps([1], protocol=5)[:16], "pickle", True),
        ("a.so", b"\x7fELF" + bytes(12), "shared library", False),
        ("a.safetensors", (8).to_bytes(8, "little") + b'{"a":1}', "safetensors", False),
        ("a.onnx", b"\x08\x07\x12", "ONNX", False),
        ("a.pt", b"", "unknown", False),
        ("a.safetensors", b"\x7fELF" + bytes(12), "shared library", False),
    ],
)
def test_other_files_are_known_by_their_first_bytes(name: str, head: bytes, kind: str, pickled: bool) -> None:
    found = classify(name, io.BytesIO(head))
    assert (found.kind, found.pickled) == (kind, pickled)


@pytest.mark.parametrize("header_bytes", [128, 5 * 256 + 128, 39 * 65_536 + 256 + 128])
def test_safetensors_whose_length_begins_as_a_pickle_does_are_none(header_bytes: int) -> None:
    head = header_bytes.to_bytes(8, "little")
    assert head[0] == 0x80
    assert head[1] <= 5
    found = classify("a.safetensors", io.BytesIO(head + b"{}".ljust(header_bytes)))
    assert (found.kind, found.pickled) == ("safetensors", False)


def test_a_pickle_that_looks_like_safetensors_is_still_one() -> None:
    data = b"\x80\x02X\x02\x00\x00\x00\x00{0cos\nsystem\n."
    assert data[8:9] == b"{"
    assert int.from_bytes(data[:8], "little") < 100_000_000
    assert pickle.loads(data) is os.system
    assert classify("a.safetensors", io.BytesIO(data)).foreign == ("os.system",)


@pytest.mark.parametrize(
    "head",
    [b"\x7fELF" + bytes(12), (8).to_bytes(8, "little") + b'{"a":1}', b"\x08\x07\x12" + bytes(13)],
)
def test_what_the_first_bytes_tell_is_told_from_them_alone(head: bytes) -> None:
    seen = int(bytes_to_see(head))
    assert seen == HEAD_BYTES
    assert classify("a", io.BytesIO(head[:seen])) == classify("a", io.BytesIO(head + bytes(1000)))


def test_zips_are_seen_to_their_end_and_what_may_be_a_pickle_as_far_as_one_is_read() -> None:
    assert bytes_to_see(b"PK\3\4") == math.inf
    assert [bytes_to_see(head) for head in (b"", b"P", b"\x80\x02}", b"(dp0")] == [MAX_PICKLE_BYTES] * 4


@pytest.mark.parametrize("protocol", [0, 1])
def test_a_pickle_without_a_first_byte_of_its_own_is_one(protocol: int) -> None:
    data = pickle.dumps({"weights": os.system}, protocol)
    found = classify("a.pkl", io.BytesIO(data))
    assert (found.kind, found.pickled, found.foreign) == ("pickle", True, (f"{os.system.__module__}.system",))


@pytest.mark.parametrize(
    "data", [b"", b"no pickle at all", b"(((", b"\x00" * 64, b"N" * 20, b".x", b"X\xff\xff\xff\xffa."]
)
def test_what_is_no_whole_pickle_stays_unknown(data: bytes) -> None:
    assert classify("a.pkl", io.BytesIO(data)).kind == "unknown"


def test_a_damaged_zip_is_said_to_be_one() -> None:
    assert classify("a.pt", io.BytesIO(b"PK\3\4 and nothing")).kind == "damaged zip"
