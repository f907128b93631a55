"""What a pickle imports, told from its opcodes."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import zipfile
from pathlib import PurePosixPath

import pytest

from torchere.archiver.scan.pickles import UNKNOWN, foreign_names_in, imported_names, is_plain


@pytest.mark.parametrize("protocol", range(6))
def test_names_are_found_in_every_protocol(protocol: int) -> None:
    data = pickle.dumps([collections.Counter("a"), collections.Counter("b")], protocol=protocol)
    assert "collections.Counter" in imported_names(data)


@pytest.mark.parametrize("protocol", range(6))
def test_a_foreign_name_is_told_from_a_plain_one(protocol: int) -> None:
    data = pickle.dumps([collections.OrderedDict(), PurePosixPath("a")], protocol=protocol)
    foreign = foreign_names_in(io.BytesIO(data), len(data))
    assert any(name.endswith("PurePosixPath") for name in foreign)
    assert "collections.OrderedDict" not in foreign


def test_names_that_come_from_elsewhere_than_the_stack_count_as_unknown() -> None:
    # Two texts are pushed and popped behind those that are used: whoever takes the last two is misled.
    hidden = b"\x80\x04" + text("posix") + text("system") + text("collections") + text("OrderedDict") + b"00"
    assert imported_names(hidden + b"\x93.") == [UNKNOWN]
    assert imported_names(b"\x80\x04\x82\x01.") == [UNKNOWN]  # by number, from copyreg's registry


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


@pytest.mark.parametrize("data", [b"\x80\x04\x95", b"nonsense", b"\x80\x04\x8c\xff"])
def test_what_can_not_be_read_is_unknown(data: bytes) -> None:
    assert imported_names(data) == [UNKNOWN]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("torch._utils._rebuild_tensor_v2", True),
        ("torch.FloatStorage", True),
        ("torch.storage.UntypedStorage", True),
        ("torch.float32", True),
        ("torch.bfloat16", True),
        ("collections.OrderedDict", True),
        ("torch.storage._load_from_bytes", False),
        ("torch.storage.os.system", False),
        ("torch._utils._rebuild_tensor_v2.__globals__.get", False),
        ("torch.load", False),
        ("torch.compile", False),
        ("builtins.eval", False),
        ("builtins.getattr", False),
    ],
)
def test_plain_names_are_exact(name: str, plain: bool) -> None:
    assert is_plain(name) is plain


@pytest.mark.parametrize(
    ("pickled", "name"),
    [
        (b"ctorch\nTens\\x6fr\n.", "torch.Tens\\x6fr"),
        (b"(itorch\nTens\\157r\n.", "torch.Tens\\157r"),
        (b"ctorch Tensor\nx\n.", "torch Tensor.x"),
    ],
)
def test_a_name_is_read_as_the_unpickler_reads_it(pickled: bytes, name: str) -> None:
    assert imported_names(pickled) == [name]
    assert foreign_names_in(io.BytesIO(pickled), len(pickled)) == (name,)


def test_pickles_are_found_in_files_within_files() -> None:
    inner, outer = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(PurePosixPath("a"), protocol=2))
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("m/data/sample_inputs/model.pt", inner.getvalue())
        archive.writestr("m/data/weights/weight_0", pickle.dumps(pickletools.OpcodeInfo, protocol=2))
    size = len(outer.getvalue())
    assert [name.rpartition(".")[2] for name in foreign_names_in(outer, size)] == ["PurePosixPath"]
    names = foreign_names_in(outer, size, frozenset({"weight_0"}))
    assert {name.rpartition(".")[2] for name in names} == {"PurePosixPath", "OpcodeInfo"}


def test_a_damaged_zip_is_unknown() -> None:
    data = b"PK\3\4 and nothing"
    assert foreign_names_in(io.BytesIO(data), len(data)) == (UNKNOWN,)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_pickle_that_torch_does_not_unpack_is_unknown(method: int, is_damaged: bool) -> None:
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w", method) as archive:
        archive.writestr("m/data.pkl", pickle.dumps([1], protocol=2))
    data = bytearray(outer.getvalue())
    if is_damaged:
        at = data.index(b"data.pkl") + len(b"data.pkl")
        data[at : at + 12] = b"\xff" * 12
    assert foreign_names_in(io.BytesIO(data), len(data)) == (UNKNOWN,)
