"""Compressed bodies: what is inflated, how far, and what is packed for whom."""

import gzip
import time
import zlib

import pytest

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.budgets import MAX_MEMBERS
from torchere.serving.frontend.rest.errors import InflatesTooFar, UnknownCoding
from torchere.serving.frontend.rest.wire import (
    answer_coding,
    deflate,
    inflate,
    inflate_if_short,
    request_coding,
)

TEXT = b"one body " * 500
_PACKER = zlib.compressobj(wbits=-15)
BARE = _PACKER.compress(TEXT) + _PACKER.flush()


@pytest.mark.parametrize(
    ("value", "coding"),
    [
        (b"gzip", "gzip"),
        (b" X-GZip ", "gzip"),
        (b"deflate", "deflate"),
        (b"identity", None),
        (b"", None),
    ],
)
def test_a_known_coding_is_found_whatever_its_spelling(value, coding):
    assert request_coding(value) == coding


@pytest.mark.parametrize("value", [b"br", b"gzip, deflate", b"\xff" * 200])
def test_an_unknown_coding_is_refused(value):
    with pytest.raises(UnknownCoding, match="expected one of gzip, deflate, identity"):
        request_coding(value)


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        (b"gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"gzip;q=0.5", "gzip"),
        (b"gzip, deflate;q=0.000", "gzip"),
        (b"gzip,", "gzip"),
        (b"gzip;q=0", None),
        (b"gzip, deflate", None),
        (b"identity, gzip", None),
        (b"br", None),
        (b"*", None),
        (b"", None),
        (b", ,", None),
    ],
)
def test_an_answer_is_packed_for_clients_that_name_one_coding(accepted, coding):
    assert answer_coding(accepted) == coding


@pytest.mark.parametrize(
    ("body", "coding"),
    [(gzip.compress(TEXT, mtime=0), "gzip"), (zlib.compress(TEXT), "deflate"), (BARE, "deflate")],
)
def test_a_body_is_inflated_up_to_the_limit(body, coding):
    assert inflate(body, coding, len(TEXT)) == TEXT
    assert inflate(memoryview(body), coding, len(TEXT)) == TEXT
    with pytest.raises(InflatesTooFar, match="max_request_size=4499 bytes"):
        inflate(body, coding, len(TEXT) - 1)


def test_a_bomb_stops_at_the_limit():
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(64)) + packer.flush()
    with pytest.raises(InflatesTooFar):
        inflate(bomb, "gzip", 10_000)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda body: body[:-5], "ends too early"),
        (lambda body: body + b"xx", "2 bytes stand behind its end"),
        (lambda body: b"nonsense", "Error -3"),
        (lambda body: b"", "ends too early, after 0 bytes"),
    ],
)
def test_a_broken_body_is_refused(coding, spoil, text):
    with pytest.raises(InvalidRequest, match=f"no {coding} .*{text}"):
        inflate(spoil(deflate(TEXT, coding)), coding, 10_000)


def test_a_gzip_body_may_have_several_members_and_one_limit_holds_for_all():
    body = gzip.compress(TEXT) + gzip.compress(b"") + gzip.compress(b"end")
    assert inflate(body, "gzip", len(TEXT) + 3) == TEXT + b"end"
    with pytest.raises(InflatesTooFar):
        inflate(body, "gzip", len(TEXT) + 2)
    with pytest.raises(InvalidRequest, match="1 bytes stand behind its end"):
        inflate(body + b"\0", "gzip", 10_000)
    with pytest.raises(InvalidRequest, match="stand behind its end"):
        inflate(zlib.compress(TEXT) * 2, "deflate", 10_000)


def test_a_body_of_a_great_many_members_is_refused_soon():
    member = gzip.compress(b"")
    assert inflate(member * MAX_MEMBERS, "gzip", 10) == b""
    begun_s = time.monotonic()
    with pytest.raises(InvalidRequest, match="it has more than 4096 members: compress it as one"):
        inflate(member * 300_000, "gzip", 10)
    assert time.monotonic() - begun_s < 10  # not the minutes that it takes to read them all


def test_deflate_without_its_frame_is_no_gzip():
    with pytest.raises(InvalidRequest):
        inflate(BARE, "gzip", len(TEXT))


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_is_packed_is_what_python_unpacks(size, coding):
    packed = deflate(bytes(size), coding)
    assert (gzip.decompress if coding == "gzip" else zlib.decompress)(packed) == bytes(size)
    assert inflate(packed, coding, size) == bytes(size)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_is_short_in_both_forms_is_inflated_at_once(coding):
    assert inflate_if_short(deflate(bytes(4000), coding), coding) == bytes(4000)
    assert inflate_if_short(deflate(bytes(900_000), coding)[:1024], coding) is None
    assert inflate_if_short(deflate(bytes(90_000), coding), coding) is None
    for spoilt in (b"none", deflate(b"m", coding)[:-1], deflate(b"m", coding) + b"n", BARE):
        assert inflate_if_short(spoilt, "gzip") is None
