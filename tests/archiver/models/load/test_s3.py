"""Objects of S3 by ranges: how requests are made of pieces, what fails, and what the error says."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from buckets import Asked, Buckets, serve_buckets
from safetensors.torch import save
from torch.distributed.checkpoint import metadata

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load import s3
from torchere.archiver.models.load.s3 import Objects, Piece
from torchere.archiver.models.load.s3_safetensors import Box
from torchere.archiver.models.spread.s3 import open_weights

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Buckets]:
    with serve_buckets(monkeypatch, tmp_path) as buckets:
        buckets.objects["b/a folder/x"] = CONTENT
        yield buckets


@pytest.fixture
def objects(buckets: Buckets) -> Iterator[Objects]:
    objects = Objects("s3://b/a%20folder/")
    yield objects
    objects.close()


def read(objects: Objects, *pieces: tuple[int, int]) -> list[bytes]:
    memory = [bytearray(length) for _, length in pieces]
    objects.run(
        objects.jobs(
            Piece("x", start, memoryview(into)) for (start, _), into in zip(pieces, memory, strict=True)
        )
    )
    return [bytes(each) for each in memory]


def test_pieces_come_by_few_ranges_into_their_own_memory(
    buckets: Buckets, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 1000)
    pieces = [(3000, 100), (100, 50), (150, 0), (150, 300), (450, 2000), (9000, 3)]
    assert read(objects, *pieces) == [CONTENT[start : start + length] for start, length in pieces]
    ranges = {(each.first, each.bytes) for each in buckets.ranges()}
    assert ranges == {(100, 350), (450, 1000), (1450, 1000), (3000, 100), (9000, 3)}
    assert [each.method for each in buckets.asked].count("HEAD") == 1
    assert objects.bytes == sum(length for _, length in pieces)


@pytest.mark.usefixtures("buckets")
def test_the_region_may_be_in_the_variable_of_other_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-south-1")
    assert s3.session().get_config_variable("region") == "eu-central-1"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert s3.session().get_config_variable("region") == "eu-south-1"


def test_a_part_that_breaks_off_is_continued(buckets: Buckets, objects: Objects) -> None:
    breaks = iter([1000, 0, 500])

    def before(asked: Asked) -> int | None:
        return next(breaks, None) if asked.method == "GET" else None

    buckets.before = before
    assert read(objects, (10, 5000)) == [CONTENT[10:5010]]
    assert [each.first for each in buckets.ranges()] == [10, 1010, 1010, 1510]


def test_a_part_that_breaks_off_again_and_again_fails(
    buckets: Buckets, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_PAUSE_S", 0.001)
    buckets.before = lambda asked: 0 if asked.method == "GET" else None
    with pytest.raises(
        ModelRefused, match=r"s3://b/a%20folder/x: it can't be read: .*expected that a worker"
    ):
        read(objects, (10, 5000))
    assert len(buckets.ranges()) == 5


def test_an_object_that_changes_is_refused(buckets: Buckets, objects: Objects) -> None:
    assert objects.read("x", 0, 8) == CONTENT[:8]
    buckets.objects["b/a folder/x"] = CONTENT[::-1]
    with pytest.raises(
        ModelRefused, match="x: it has changed while it was read; write new weights under a new key"
    ):
        objects.read("x", 8, 8)


def test_a_store_that_does_not_know_if_match_is_watched(buckets: Buckets, objects: Objects) -> None:
    buckets.unknown_headers = ("If-Match",)
    objects.size("x")
    buckets.objects["b/a folder/x"] = CONTENT[::-1]
    with pytest.raises(ModelRefused, match="x: it has changed while it was read"):
        objects.read("x", 8, 8)


def test_a_range_beyond_the_end_is_not_asked_for(buckets: Buckets, objects: Objects) -> None:
    with pytest.raises(ModelRefused, match="x: it has 10240 bytes, and its header or index speaks of 10250"):
        objects.read("x", 10000, 250)
    assert not buckets.ranges()


def test_a_store_that_does_not_know_ranges_is_refused(buckets: Buckets, objects: Objects) -> None:
    buckets.unknown_headers = ("Range",)
    with pytest.raises(ModelRefused, match="10240 bytes were sent for bytes 0 to 8; expected a store that"):
        objects.read("x", 0, 8)


def test_a_missing_or_denied_object_is_named_with_a_remedy(buckets: Buckets, objects: Objects) -> None:
    with pytest.raises(ModelRefused, match=r"s3://b/a%20folder/y: there is no such object; S3 answered 404"):
        objects.size("y")
    buckets.denied.add("b/a folder/x")
    with pytest.raises(ModelRefused, match=r"x: the credentials .* do not open it; S3 answered 403 .*s3:Get"):
        objects.size("x")


def test_access_that_is_taken_away_while_it_is_read_is_told(buckets: Buckets, objects: Objects) -> None:
    objects.size("x")
    buckets.denied.add("b/a folder/x")
    with pytest.raises(ModelRefused, match=r"S3 answered 403 \(AccessDenied: said the stand-in\)"):
        objects.read("x", 0, 8)


def test_a_long_download_tells_how_far_it_is(
    buckets: Buckets, objects: Objects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3, "_EVERY_S", 0.01)
    monkeypatch.setenv("RANK", "1")
    told = threading.Event()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.set())
    monkeypatch.setattr(s3, "PART_BYTES", 5000)

    def before(asked: Asked) -> None:
        if asked.first == 5000:  # the second half waits for the line about the first one
            assert told.wait(20)

    buckets.before = before
    objects.expected_bytes = 10_000_000
    logger = logging.getLogger(s3.__name__)
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, s3.__name__):
            read(objects, (0, 10_000))
    finally:
        logger.removeHandler(handler)
    pattern = (
        r"rank 1: 0\.0 MB of 10\.0 MB of weights from s3://b/a%20folder in \d+\.\d s, .* MB/s, \d requests"
    )
    assert re.search(pattern, caplog.text)


def test_without_botocore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(ModelRefused, match=r"^s3://b/x: it needs botocore: pip install 'torchere\[s3\]'$"):
        Objects("s3://b/x")


@pytest.mark.usefixtures("buckets")
def test_without_credentials_it_says_which_variables_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ModelRefused, match="Unable to locate credentials; set AWS_DEFAULT_REGION"):
        open_weights("s3://b/x.safetensors")


@pytest.mark.usefixtures("buckets")
def test_an_endpoint_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ModelRefused, match=r"EndpointConnectionError: .*127.0.0.1:1/.*network policy"):
        open_weights("s3://b/x.safetensors")


@pytest.mark.usefixtures("buckets")
def test_a_folder_without_weights_is_refused_with_what_was_expected() -> None:
    with pytest.raises(
        ModelRefused, match=r"\.metadata: there is no such object.*expected .*or the URL of a .safetensors"
    ):
        open_weights("s3://b/empty")


def header_of(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "its header or index speaks of 8"),
        ((10**12).to_bytes(8, "little"), "damaged safetensors: a header of 1000000000000 bytes"),
        (b"\x02\0\0\0\0\0\0\0[}", "damaged safetensors: JSONDecodeError"),
        (header_of({"a": {**GOOD, "dtype": "F3"}}), "the dtype 'F3' is not known"),
        (header_of({"a": {**GOOD, "shape": [2, -2]}}), "a shape or an offset is no number"),
        (header_of({"a": {**GOOD, "data_offsets": [0, 12]}}), "12 bytes for the shape"),
        (header_of({"a": GOOD}) + bytes(15), "and its header speaks of"),
        (header_of({"a": None}), "damaged safetensors: TypeError"),
    ],
)
def test_a_damaged_header_is_refused(buckets: Buckets, content: bytes, text: str) -> None:
    buckets.objects["b/w.safetensors"] = content
    with pytest.raises(ModelRefused, match=r"s3://b/w\.safetensors: .*" + text):
        open_weights("s3://b/w.safetensors")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": {"a": "../w.safetensors"}}'])
def test_a_damaged_index_is_refused(buckets: Buckets, content: bytes) -> None:
    buckets.objects["b/hf/model.safetensors.index.json"] = content
    with pytest.raises(ModelRefused, match=r"model\.safetensors\.index\.json: damaged index"):
        open_weights("s3://b/hf")


class Runs:
    """Would leave a file behind if it was unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_an_index_of_a_checkpoint_that_would_run_code_is_refused(
    buckets: Buckets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    buckets.objects["b/dcp/.metadata"] = pickle.dumps(Runs())
    with pytest.raises(ModelRefused, match=r"s3://b/dcp/\.metadata: its index imports posix\.mkdir"):
        open_weights("s3://b/dcp")
    assert not (tmp_path / "unpickled").exists()


def test_every_dtype_comes_as_it_was_stored(buckets: Buckets) -> None:
    tensors = {
        "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "truth": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "eight": torch.tensor([0.5]).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 3),
    }
    buckets.objects["b/w.safetensors"] = save(tensors)
    source = open_weights("s3://b/w.safetensors")
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in source.shapes.items()}
    source.read((name, Box(tensor, (0,) * tensor.dim())) for name, tensor in found.items() if tensor.numel())
    source.objects.close()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double())


def test_an_index_that_leaves_rows_out_is_refused(buckets: Buckets) -> None:
    size = torch.Size([4, 2])
    chunk = metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 2]))
    properties = metadata.TensorProperties(torch.float32)
    index = metadata.Metadata({"a": metadata.TensorStorageMetadata(properties, size, [chunk])})
    index.storage_data = {}
    buckets.objects["b/dcp/.metadata"] = pickle.dumps(index)
    source = open_weights("s3://b/dcp")
    with pytest.raises(ModelRefused, match="s3://b/dcp: damaged distributed checkpoint: its index does not"):
        source.read([("a", Box(torch.empty(size), (0, 0)))])
    source.objects.close()
