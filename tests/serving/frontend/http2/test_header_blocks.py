"""Headers against the `hpack` library's own encoder and decoder."""

import base64
import tracemalloc
from typing import Any
from urllib.parse import unquote

import pytest
from hpack import Decoder, Encoder, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.frontend.http2 import header_blocks
from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode
from torchere.serving.frontend.http2.header_blocks import (
    HeaderReader,
    refusal_block,
    request_head,
    status_block,
)
from torchere.serving.frontend.http2.messages import StatusCode

NAMES = [
    ":path",
    ":method",
    "content-type",
    "te",
    "x-one",
    "x-two",
    "authorization",
    "user-agent",
    "tail-bin",
    "grpc-timeout",
    "grpc-timeout",
]
VALUES = ["1S", "20m", "POST", "/a/B", "/a/C", "application/grpc", "1", "two", "dGVu", "v" * 60, "w" * 700]
header = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES), st.booleans())
table_size = st.one_of(st.none(), st.sampled_from([0, 40, 100, 300, 1000, 4096]))
calls = st.lists(st.tuples(st.lists(header, max_size=5), table_size, st.booleans()), max_size=12)


@given(calls)
def test_a_remembered_block_never_gives_stale_headers(made):
    encoder, reader = Encoder(), HeaderReader()
    for headers, size, huffman in made:
        if size is not None:
            encoder.header_table_size = size
        listed = [
            NeverIndexedHeaderTuple(name, value) if secret else (name, value)
            for name, value, secret in headers
        ]
        expected = request_head([(name, value) for name, value, _ in headers])
        assert reader.read(encoder.encode(listed, huffman=huffman)) == expected


@given(st.binary(max_size=200), st.lists(header, max_size=4))
def test_bytes_that_are_no_headers_break_the_connection_and_nothing_else(junk, headers):
    reader = HeaderReader()
    reader.read(Encoder().encode([(name, value) for name, value, _ in headers]))
    try:
        reader.read(junk)
    except ConnectionBroken as broken:
        assert broken.code in {ErrorCode.COMPRESSION_ERROR, ErrorCode.ENHANCE_YOUR_CALM}


def test_an_index_too_long_to_be_written_breaks_the_connection_by_its_code():
    with pytest.raises(ConnectionBroken) as broken:
        HeaderReader().read(b"\xff" * 3000 + b"\1")
    assert broken.value.code is ErrorCode.COMPRESSION_ERROR


def test_a_call_like_the_one_before_it_is_not_read_again():
    encoder, reader = Encoder(), HeaderReader()
    headers = [(":method", "POST"), (":path", "/a/B"), ("x-one", "1")]
    reader.read(encoder.encode(headers))
    block = encoder.encode(headers)
    assert reader.read(block) is reader.read(encoder.encode(headers))


def test_blocks_that_change_the_table_are_read_each_time_and_those_that_rest_on_it_again():
    one, two = [Encoder().encode([(name, "1")]) for name in ("x-one", "x-two")]
    reader, newest = HeaderReader(), b"\xbe"  # the newest entry of the table, 62; older ones follow
    reader.read(one)
    assert reader.read(newest)[0].metadata == (("x-one", "1"),)
    reader.read(two)
    assert reader.read(newest)[0].metadata == (("x-two", "1"),)
    reader.read(two)
    reader.read(one)
    assert [reader.read(bytes((newest[0] + age,)))[0].metadata[0][0] for age in range(4)] == [
        *("x-one", "x-two", "x-two", "x-one")
    ]


HEADERS = [(":method", "POST"), (":path", "/a/B"), ("content-type", "application/grpc"), ("x-one", "1")]


def incremental(encoder, timeout):
    """As grpcio writes it: the time-out is a literal that enters the table, before other fields."""
    return encoder.encode([*HEADERS[:2], ("grpc-timeout", timeout), *HEADERS[2:]], huffman=False)


def by_name(encoder, timeout):
    """As Go and Java write it: the name is an index, the value may be Huffman-coded."""
    return encoder.encode([*HEADERS, ("grpc-timeout", timeout)])


def unindexed(encoder, timeout):
    return encoder.encode([*HEADERS, NeverIndexedHeaderTuple("grpc-timeout", timeout)], huffman=False)


@pytest.mark.parametrize("written", [incremental, by_name, unindexed])
def test_calls_that_differ_in_their_deadline_alone_share_a_head_and_keep_their_deadlines(
    written, monkeypatch
):
    encoder, reader, decoded = Encoder(), HeaderReader(), []
    decode = Decoder.decode

    def counted(*args, **options):
        decoded.append(1)
        return decode(*args, **options)

    monkeypatch.setattr(Decoder, "decode", counted)
    found = [reader.read(written(encoder, f"{number}m")) for number in range(1, 61)]
    assert [timeout_s for _, timeout_s in found] == [pytest.approx(number / 1000) for number in range(1, 61)]
    assert {head for head, _ in found} == {request_head(HEADERS)[0]}
    assert len(decoded) <= 2  # the table is empty at first


def test_a_table_that_time_outs_fill_is_followed_to_the_end():
    encoder, reader = Encoder(), HeaderReader()
    for number in range(1, 500):
        head, timeout_s = reader.read(incremental(encoder, f"{number}m"))
        assert (head.path, timeout_s) == ("/a/B", pytest.approx(number / 1000))
    theirs, ours = encoder.header_table.dynamic_entries, reader._decoder.header_table.dynamic_entries
    assert list(ours) == list(theirs)


def test_a_call_without_a_deadline_behind_one_with_it_has_none():
    encoder, reader = Encoder(), HeaderReader()
    timeouts = [reader.read(block)[1] for block in (by_name(encoder, "1S"), encoder.encode(HEADERS))]
    timeouts += [reader.read(encoder.encode(HEADERS))[1], reader.read(by_name(encoder, "2S"))[1]]
    assert timeouts == [1, None, None, 2]


def test_a_deadline_that_is_none_ends_its_call_alone_behind_others_that_are():
    encoder, reader = Encoder(), HeaderReader()
    flaws = [reader.read(by_name(encoder, text))[0].flaw for text in ("1S", "2S", "soon", "3S")]
    assert [bool(flaw) for flaw in flaws] == [False, False, True, False]


def test_a_field_that_the_time_out_of_its_own_block_evicted_breaks_the_connection():
    encoder, reader = Encoder(), HeaderReader()
    reader.read(encoder.encode([("x-old", "1"), ("x-one", "v" * 1980), ("x-two", "w" * 1980)]))
    reader.read(b"\xc0\xbf")  # the oldest field, and `x-one`
    with pytest.raises(ConnectionBroken) as broken:  # the same, each one further behind the time-out
        reader.read(b"\x40\x0cgrpc-timeout\x021S\xc1\xc0")
    assert broken.value.code is ErrorCode.COMPRESSION_ERROR


def test_fields_of_the_table_are_bytes_and_not_views_of_whole_blocks():
    reader = HeaderReader()
    reader.read(Encoder().encode(HEADERS, huffman=False))
    kept = [part for field in reader._decoder.header_table.dynamic_entries for part in field]
    assert {type(part) for part in kept} == {bytes}


def test_what_is_remembered_is_bounded_and_later_calls_still_are():
    reader, encoder = HeaderReader(), Encoder()
    for number in range(1000):
        reader.read(encoder.encode([NeverIndexedHeaderTuple("x-one", str(number))]))
    reader.read(encoder.encode([NeverIndexedHeaderTuple("x-one", "w" * 5000)]))
    assert max(len(reader._blocks), len(reader._heads)) <= 128
    held = [sum(map(len, field)) for fields in reader._heads for field in fields]
    assert max(held) <= 4096
    block = b"\x83"
    reader.read(block)
    assert reader.read(block) is reader.read(block)


def literals(*fields):
    """A block that adds nothing to the table."""
    return Encoder().encode([NeverIndexedHeaderTuple(*field) for field in fields], huffman=False)


SHORT = [(f"a{number:02}", "b") for number in range(99)]


@pytest.mark.parametrize(
    "blocks",
    [
        [literals(("zz", f"{number:02}"), *SHORT) for number in range(63)],
        [b"\x3f\xe1" + b"\x80" * (31_000 + number) + b"\0\x83" for number in range(63)],
        [literals(("zz", f"{number:02}"), ("a", "v" * 3900)) for number in range(63)],
    ],
    ids=["short fields", "long numbers", "long fields"],
)
def test_heads_that_a_client_chooses_take_little_memory(blocks):
    reader = HeaderReader()
    tracemalloc.start()
    try:
        for block in blocks:
            reader.read(bytes(bytearray(block)))  # of its own, as from a socket
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < 65_536


def test_a_head_with_another_deadline_in_each_call_counts_once_it_is_kept():
    encoder, reader = Encoder(), HeaderReader()
    for number in range(1, 200):
        reader.read(unindexed(encoder, f"{number}m"))
    assert len(reader._heads) == 1
    assert len(reader._blocks) < 65_536 / 256


def test_a_header_list_that_is_too_long_costs_its_call():
    reader, encoder = HeaderReader(), Encoder()
    reader.read(encoder.encode([("x-one", "kept")]))
    longest = NeverIndexedHeaderTuple("x-one", "\\" * (16_384 - 32 - 5))
    assert reader.read(encoder.encode([longest], huffman=False))[0].flaw == ""
    head, _ = reader.read(encoder.encode([("x-one", "\\" * 20_000)], huffman=False))
    assert (head.flaw_code, head.flaw) == (
        StatusCode.RESOURCE_EXHAUSTED,
        "SERVER: Received metadata larger than max (20037 vs. 16384)",
    )
    assert reader.read(encoder.encode([("x-one", "kept")])) == request_head([("x-one", "kept")])


@pytest.mark.parametrize("huffman", [False, True])
def test_a_header_list_that_is_far_too_long_breaks_the_connection(huffman):
    with pytest.raises(ConnectionBroken) as broken:
        HeaderReader().read(Encoder().encode([("x-one", "a" * 33_000)], huffman=huffman))
    assert broken.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_bomb_of_references_to_one_long_header_breaks_the_connection():
    reader = HeaderReader()
    reader.read(Encoder().encode([("x-one", "v" * 4000)]))
    with pytest.raises(ConnectionBroken) as broken:
        reader.read(b"\xbe" * 30_000)
    assert broken.value.code is ErrorCode.ENHANCE_YOUR_CALM


METHOD, ROUTE, OWN = (":method", "POST"), (":path", "/a/B"), ("x-one", "1")


@pytest.mark.parametrize(
    ("headers", "flaw"),
    [
        ([METHOD, ROUTE, OWN], ""),
        ([METHOD, ROUTE, METHOD], "a pseudo-header comes late or twice"),
        ([METHOD, OWN, ROUTE], "a pseudo-header comes late or twice"),
    ],
)
def test_pseudo_headers_come_first_and_once(headers, flaw):
    assert request_head(headers)[0].flaw == flaw


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2H", 7200), ("3M", 180), ("10S", 10), ("250m", 0.25), ("5u", 5e-6), ("7n", 7e-9), ("0S", 0)],
)
def test_a_timeout_is_read_in_each_unit(text, seconds):
    head, timeout_s = request_head([("grpc-timeout", text)])
    assert (timeout_s, head.flaw) == (pytest.approx(seconds), "")


@pytest.mark.parametrize("text", ["", "S", "1", "1s", "-1S", "1.5S", "123456789S", "²S", "1 S", "+1S"])
def test_what_is_no_timeout_is_a_flaw_of_the_call(text):
    assert "expected digits and a unit" in request_head([("grpc-timeout", text)])[0].flaw


def test_without_a_timeout_there_is_none():
    assert request_head([])[1] is None


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3), st.booleans())
def test_binary_metadata_comes_back_padded_or_not_and_joined(values, padded):
    texts = [base64.b64encode(value).decode() for value in values]
    joined = ",".join(text if padded else text.rstrip("=") for text in texts)
    head, _ = request_head([("x-bin", joined)])
    assert head.metadata == tuple(("x-bin", value) for value in values)


@pytest.mark.parametrize("text", ["a", "é", "ab c", "abcde", "dGV!u", "\u2603\u2603\u2603\u2603"])
def test_binary_metadata_that_is_none_is_a_flaw_of_the_call(text):
    assert request_head([("x-bin", text)])[0].flaw == "metadata x-bin: not base64"


@pytest.mark.parametrize(
    "headers",
    [[(":path", "/a"), (":path", "/b")], [("x-one", "1"), (":path", "/a")]],
)
def test_pseudo_headers_twice_or_late_are_a_flaw_of_the_call(headers):
    assert "pseudo-header" in request_head(headers)[0].flaw


def test_what_belongs_to_the_transport_is_no_metadata():
    names = ["te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"]
    head, _ = request_head([*((name, "1S") for name in names), ("x-one", "1")])
    assert head.metadata == (("x-one", "1"),)
    assert (head.encoding, head.content_type) == ("1S", "1S")


def read_status(block):
    return dict(Decoder().decode(block))


@given(st.integers(0, 16), st.text(st.characters(), max_size=300))
def test_a_status_text_comes_back_as_it_was(code, message):
    found = read_status(status_block(code, message))
    sent = found.get("grpc-message", "")
    assert all(" " <= letter <= "~" for letter in sent)
    assert found["grpc-status"] == str(code)
    assert unquote(sent) == message.encode(errors="replace").decode()


@given(st.text(max_size=20), st.sampled_from(["a", "é", "%", "\u20ac", "\U0001f600"]), st.text(max_size=20))
def test_a_long_status_text_is_cut_where_a_character_ends(begin, letter, end):
    message = begin + letter * 6500 + end
    sent = read_status(status_block(13, message))["grpc-message"]
    assert len(sent) <= header_blocks.MAX_MESSAGE_BYTES + 3
    assert len(sent) > header_blocks.MAX_MESSAGE_BYTES - 12
    assert message.startswith(unquote(sent, errors="strict")[:-3])


def test_of_a_status_text_no_more_is_encoded_than_is_sent(monkeypatch):
    encoded: list[int] = []
    quote = header_blocks._percent_encoded

    def watched(text: str) -> bytes:
        encoded.append(len(text))
        return quote(text)

    monkeypatch.setattr(header_blocks, "_percent_encoded", watched)
    sent = read_status(status_block(5, "\u20ac" * 1_000_000))["grpc-message"]
    assert len(sent) > header_blocks.MAX_MESSAGE_BYTES - 12
    assert sum(encoded) < 3 * header_blocks.MAX_MESSAGE_BYTES


def test_the_details_of_a_status_are_sent_with_it_unless_both_are_too_long():
    sizes = (10, 5996, 5998)
    sent: list[Any] = [Decoder().decode(status_block(3, "m" * size, b"\x08\x03")) for size in sizes]
    found = [dict(block).get("grpc-status-details-bin") for block in sent]
    assert found == ["CAM", "CAM", None]


@pytest.mark.parametrize("status", [200, 405, 415])
def test_a_refusal_says_its_http_status_and_which_encodings_are_known(status):
    found = read_status(refusal_block(status, 12, "no"))
    assert found == {
        ":status": str(status),
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity,deflate,gzip",
        "grpc-status": "12",
        "grpc-message": "no",
    }


def test_the_blocks_of_an_answer_that_is_well_are_what_others_read():
    assert read_status(header_blocks.HEAD_BLOCK) == {":status": "200", "content-type": "application/grpc"}
    assert read_status(header_blocks.OK_BLOCK) == {"grpc-status": "0"}


def test_a_header_that_is_no_utf_8_is_read_as_far_as_it_is_text():
    head, _ = HeaderReader().read(Encoder().encode([(b"x-one", b"caf\xe9"), (b"x-bin", b"\xe9")]))
    assert head.metadata == (("x-one", "caf\ufffd"),)
    assert head.flaw == "metadata x-bin: not base64"


def test_a_long_block_that_says_little_breaks_the_connection():
    with pytest.raises(ConnectionBroken, match="32769 bytes") as broken:
        HeaderReader().read(b"\x20" * 32_769)
    assert broken.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 256, 6000])
def test_a_status_text_of_any_length_is_what_others_read(size):
    told = {"grpc-message": "m" * size} if size else {}
    assert dict(Decoder().decode(status_block(3, "m" * size))) == {"grpc-status": "3", **told}


def test_a_block_begins_with_two_table_size_updates_at_most():
    head = Encoder().encode([(":path", "/x")])
    for updates in (b"\x20", b"\x20\x3f\xe1\x1f"):
        assert HeaderReader().read(updates + head)[0].path == "/x"
    for updates in (b"\x20" * 3, b"\x20" * 32_000, b"\x20\x3f\xe1\x1f\x20"):
        with pytest.raises(ConnectionBroken, match="too many table size updates") as broken:
            HeaderReader().read(updates + head)
        assert broken.value.code == ErrorCode.COMPRESSION_ERROR


def test_an_unfinished_table_size_update_is_no_hpack():
    with pytest.raises(ConnectionBroken, match="HPACK"):
        HeaderReader().read(b"\x3f" + b"\xff" * 9)
