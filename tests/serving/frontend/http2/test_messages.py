"""Messages put together again from any pieces."""

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.frontend.alignment import TENSOR_ALIGNMENT
from torchere.serving.frontend.http2.messages import (
    SPLIT_AT_ONCE,
    Compressed,
    MessageFailed,
    MessageReader,
)

LIMIT = 20_000
PACKED: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
sizes = st.one_of(st.integers(0, 30), st.sampled_from([4095, 4096, 4097, LIMIT]))


def framed(message, flag=0):
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def read(reader, *pieces):
    messages = []
    for piece in pieces:
        messages += reader.feed(piece)
        while reader.unsplit:
            messages += reader.more()
    return [message.inflated() if isinstance(message, Compressed) else message for message in messages]


@given(st.lists(sizes, max_size=5), st.data())
def test_any_cut_of_the_same_bytes_is_the_same_messages(lengths, data):
    messages = [bytes([n % 256]) * size for n, size in enumerate(lengths)]
    sent = b"".join(framed(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=10)))
    reader = MessageReader(LIMIT, "identity")
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert read(reader, *pieces) == messages
    assert reader.at_message_end


@pytest.mark.parametrize(
    ("message", "cut"),
    [(b"\0\0\0\xfc" + bytes(range(252)), 4), (b"before" + framed(b"inner"), 11)],
    ids=["its length", "what is in it"],
)
def test_what_looks_like_a_message_within_another_one_is_none(message, cut):
    sent = framed(message)
    last = sent[cut:]
    assert len(last) == 5 + int.from_bytes(last[1:5], "big")
    assert read(MessageReader(LIMIT, "identity"), sent[:cut], last) == [message]


def test_short_messages_are_split_a_few_at_a_time():
    messages = [b"%d" % number for number in range(100)]
    sent = b"".join(map(framed, messages)) + framed(b"last")[:7]
    reader = MessageReader(LIMIT, "identity")
    assert reader.feed(sent) == messages[:SPLIT_AT_ONCE]
    assert not reader.at_message_end
    assert reader.more() == messages[SPLIT_AT_ONCE : 2 * SPLIT_AT_ONCE]
    assert read(reader, b"") == messages[2 * SPLIT_AT_ONCE :]
    assert read(reader, framed(b"last")[7:]) == [b"last"]
    assert reader.at_message_end


@pytest.mark.parametrize("kept", [1, 4, 5, 6])
def test_it_knows_that_a_message_is_not_whole(kept):
    reader = MessageReader(LIMIT, "identity")
    assert read(reader, framed(b"abc")[:kept]) == []
    assert not reader.at_message_end


@given(st.sampled_from(list(PACKED)), st.binary(max_size=200), st.integers(1, 50))
def test_compressed_messages_are_inflated_one_by_one(encoding, message, step):
    sent = framed(PACKED[encoding](message), 1) + framed(message) + framed(PACKED[encoding](b"end"), 1)
    pieces = [sent[n : n + step] for n in range(0, len(sent), step)]
    assert read(MessageReader(LIMIT, encoding), *pieces) == [message, message, b"end"]


@pytest.mark.parametrize("length", [1, 15, 16, 1001])
def test_a_message_in_pieces_ends_where_a_tensor_may_end(length):
    sent = framed(bytes(length))
    (message,) = read(MessageReader(LIMIT, "identity"), sent[:3], sent[3:])
    assert message == bytes(length)
    assert (np.frombuffer(message, np.uint8).ctypes.data + length) % TENSOR_ALIGNMENT == 0


def failure(encoding, sent):
    with pytest.raises(MessageFailed) as failed:
        read(MessageReader(LIMIT, encoding), sent)
    return failed.value.code, str(failed.value)


def test_a_message_over_the_limit_is_refused_by_its_prefix():
    code, text = failure("identity", framed(bytes(LIMIT + 1))[:5])
    assert (code, text) == (8, f"SERVER: Received message larger than max ({LIMIT + 1} vs. {LIMIT})")
    assert failure("identity", framed(bytes(LIMIT + 1)))[0] == 8
    assert failure("identity", b"\0\1\0\0\5hello")[0] == 8


@pytest.mark.parametrize("encoding", list(PACKED))
def test_a_bomb_is_refused_before_it_is_inflated_whole(encoding):
    bomb = framed(PACKED[encoding](bytes(15 * 2**20)), 1)
    assert len(bomb) < LIMIT
    tracemalloc.start()
    try:
        assert failure(encoding, bomb)[0] == 8
        assert tracemalloc.get_traced_memory()[1] < 50 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", list(PACKED))
def test_a_compressed_message_may_be_as_long_as_the_limit_and_no_longer(encoding):
    longest = framed(PACKED[encoding](bytes(LIMIT)), 1)
    assert read(MessageReader(LIMIT, encoding), longest) == [bytes(LIMIT)]
    code, text = failure(encoding, framed(PACKED[encoding](bytes(LIMIT + 1)), 1))
    assert (code, text) == (8, f"SERVER: Received message larger than max ({LIMIT + 1} vs. {LIMIT})")


def test_a_compressed_message_takes_no_more_than_was_sent_until_somebody_wants_it():
    size = 8 * 2**20
    sent = framed(gzip.compress(bytes(size)), 1)
    tracemalloc.start()
    try:
        (packed,) = MessageReader(size, "gzip").feed(sent)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(sent)
    finally:
        tracemalloc.stop()
    assert isinstance(packed, Compressed)
    assert len(packed) == len(sent) - 5
    assert packed.inflated() == bytes(size)


@pytest.mark.parametrize("encoding", list(PACKED))
@pytest.mark.parametrize("spoilt", [lambda packed: b"no" + packed, lambda packed: packed[:-1], lambda _: b""])
def test_what_is_not_compressed_as_it_says_is_refused(encoding, spoilt):
    code, text = failure(encoding, framed(spoilt(PACKED[encoding](b"message")), 1))
    assert code == 13
    assert encoding in text


@pytest.mark.parametrize("size", [10, 10_000])
def test_a_gzip_message_may_have_several_members(size):
    first, second = random.Random(0).randbytes(size), bytes(size // 2)
    packed = gzip.compress(first) + gzip.compress(b"") + gzip.compress(second)
    assert read(MessageReader(LIMIT, "gzip"), framed(packed, 1)) == [first + second]
    with pytest.raises(MessageFailed, match="larger than max"):
        Compressed(packed, "gzip", len(first + second) - 1).inflated()


@pytest.mark.parametrize("size", [10, 10_000])
@pytest.mark.parametrize("encoding", list(PACKED))
@pytest.mark.parametrize("junk", [b"\0", b"junk", b"\x1f", zlib.compress(b"more"), PACKED["gzip"](b"m")[:-1]])
def test_a_message_that_goes_on_behind_its_end_is_refused(encoding, size, junk):
    code, text = failure(encoding, framed(PACKED[encoding](random.Random(0).randbytes(size)) + junk, 1))
    assert code == 13
    assert encoding in text


@pytest.mark.parametrize(("encoding", "code"), [("identity", 13), ("snappy", 12), ("x" * 500, 12)])
def test_a_compressed_message_in_an_unknown_encoding_is_refused(encoding, code):
    found, text = failure(encoding, framed(b"?", 1))
    assert found == code
    assert len(text) < 250


def test_a_message_in_tiny_pieces_costs_about_its_size():
    size = 40_000
    sent = framed(b"ab" * (size // 2))
    reader = MessageReader(size, "identity")
    tracemalloc.start()
    try:
        for start in range(0, size, 2):
            assert reader.feed(sent[start : start + 2]) == []
        assert tracemalloc.get_traced_memory()[0] < 2 * size
    finally:
        tracemalloc.stop()
    assert reader.feed(sent[size:]) == [sent[5:]]


@pytest.mark.parametrize(
    ("message", "limit_bytes", "is_short"),
    [
        (b"m" * 1000, 10**6, True),
        (bytes(4000), 10**6, True),
        (bytes(5000), 10**6, False),
        (bytes(900_000), 10**6, False),  # less than a kilobyte, but the loop would wait for it
        (bytes(range(256)) * 3 + bytes(random.Random(0).randbytes(2000)), 10**6, False),
    ],
)
def test_what_is_short_in_both_forms_is_inflated_at_once(message, limit_bytes, is_short):
    packed = Compressed(gzip.compress(message), "gzip", limit_bytes)
    assert packed.inflated_if_short() == (message if is_short else None)
    assert is_short or packed.inflated() == message


def test_a_call_with_a_low_limit_needs_no_thread():
    assert Compressed(gzip.compress(b"m"), "gzip", 1024).inflated_if_short() == b"m"
    with pytest.raises(MessageFailed):
        Compressed(gzip.compress(bytes(900_000)), "gzip", 1024).inflated_if_short()


@pytest.mark.parametrize("spoilt", [b"none", gzip.compress(b"m", mtime=0)[:-3]])
def test_the_error_of_a_spoilt_message_is_left_to_the_thread(spoilt):
    packed = Compressed(spoilt, "gzip", 10**6)
    assert packed.inflated_if_short() is None
    with pytest.raises(MessageFailed):
        packed.inflated()
