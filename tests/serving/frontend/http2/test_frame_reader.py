"""Bytes into frames, however they are cut."""

import sys
from typing import Any

import pytest
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame, PingFrame, WindowUpdateFrame
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.frontend.http2 import frames as frame_reader
from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode, FrameCallbacks, FrameReader

GREETED = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
SETTINGS_SEEN = ("control", 4, 0, 0, b"")


class Recorder:
    """Keeps what it is told; DATA that follows on one stream is one event, however it was cut."""

    def __init__(self):
        self.events = []

    def data_size(self, stream_id, size, empty):
        self.events = joined([*self.events, ("data", stream_id, size, b"", False)])

    def data(self, stream_id, pieces, is_last):
        kind, counted_id, size, before, ended = self.events.pop()
        assert (kind, counted_id, ended) == ("data", stream_id, False)
        self.events.append((kind, stream_id, size, before + b"".join(pieces), is_last))

    def headers(self, flags, stream_id, block):
        self.events.append(("head", bool(flags & 1), stream_id, block))

    def control(self, kind, flags, stream_id, payload):
        self.events.append(("control", kind, flags, stream_id, payload))

    def reader(self):
        return FrameReader(FrameCallbacks(self.data_size, self.data, self.headers, self.control))


def joined(events):
    """The same events, DATA that follows on one stream as one."""
    found: list[Any] = []
    for event in events:
        if found and event[0] == found[-1][0] == "data" and event[1] == found[-1][1] and not found[-1][4]:
            _, stream_id, size, content, _ = found.pop()
            found.append(("data", stream_id, size + event[2], content + event[3], event[4]))
        else:
            found.append(event)
    return found


def events_of(*pieces, most=sys.maxsize):
    recorder = Recorder()
    reader = recorder.reader()
    for piece in pieces:
        rest = reader.feed(piece, most)
        while rest:
            rest = reader.feed(rest, most)
    return recorder.events


ids = st.integers(0, 50).map(lambda number: 2 * number + 1)
ends = st.sampled_from([[], ["END_STREAM"]])
paddings = st.one_of(st.none(), st.integers(0, 255))


@st.composite
def data_frames(draw):
    stream_id, content, flags = draw(ids), draw(st.binary(max_size=300)), draw(ends)
    padding = draw(paddings)
    flags = flags if padding is None else [*flags, "PADDED"]
    frame = DataFrame(stream_id, content, pad_length=padding or 0, flags=flags).serialize()
    return frame, ("data", stream_id, len(frame) - 9, content, "END_STREAM" in flags)


@st.composite
def header_frames(draw):
    stream_id, parts = draw(ids), draw(st.lists(st.binary(max_size=100), min_size=1, max_size=4))
    flags, padding = draw(ends), draw(paddings)
    if padding is not None:
        flags = [*flags, "PADDED"]
    if draw(st.booleans()):
        flags = [*flags, "PRIORITY"]
    event = ("head", "END_STREAM" in flags, stream_id, b"".join(parts))
    if len(parts) == 1:
        flags = [*flags, "END_HEADERS"]
    frames = HeadersFrame(stream_id, parts[0], pad_length=padding or 0, flags=flags).serialize()
    for number, part in enumerate(parts[1:], 2):
        last = ["END_HEADERS"] if number == len(parts) else []
        frames += ContinuationFrame(stream_id, part, flags=last).serialize()
    return frames, event


pings = st.binary(min_size=8, max_size=8).map(
    lambda body: (PingFrame(0, body).serialize(), ("control", 6, 0, 0, body))
)
updates = st.integers(1, 2**31 - 1).map(
    lambda size: (
        WindowUpdateFrame(0, size).serialize(),
        ("control", 8, 0, 0, size.to_bytes(4, "big")),
    )
)
unknown = st.binary(max_size=20).map(
    lambda body: (
        len(body).to_bytes(3, "big") + b"\xee\7\0\0\0\1" + body,
        ("control", 0xEE, 7, 1, body),
    )
)
frames = st.lists(st.one_of(data_frames(), header_frames(), pings, updates, unknown), max_size=8)


@given(frames, st.data())
def test_any_cut_of_the_same_bytes_is_the_same_frames(made, data):
    sent = GREETED + b"".join(frame for frame, _ in made)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    expected = joined([SETTINGS_SEEN, *(event for _, event in made)])
    assert events_of(sent) == expected
    assert events_of(*pieces, most=data.draw(st.sampled_from([1, 2, sys.maxsize]))) == expected


@given(frames)
def test_byte_by_byte_is_the_same_frames(made):
    sent = GREETED + b"".join(frame for frame, _ in made)
    assert events_of(*(sent[n : n + 1] for n in range(len(sent)))) == events_of(sent)


def test_frames_of_one_message_are_handed_on_together():
    handed = []

    class Counting(Recorder):
        def data(self, stream_id, pieces, is_last):
            handed.append((stream_id, len(pieces), is_last))

    frames = [DataFrame(stream_id, bytes(5000)).serialize() for stream_id in (1, 1, 1, 3, 3)]
    last = DataFrame(3, bytes(10), flags=["END_STREAM"]).serialize()
    Counting().reader().feed(GREETED + b"".join(frames) + last + frames[0])
    assert handed == [(1, 3, False), (3, 3, True), (1, 1, False)]


def test_data_is_handed_on_before_its_end():
    frame = DataFrame(1, bytes(1000)).serialize()
    assert events_of(GREETED, frame[:500])[-1] == ("data", 1, 1000, bytes(491), False)


def test_it_is_greeted_once_settings_are_behind_the_preface():
    reader = Recorder().reader()
    reader.feed(GREETED[:-1])
    assert not reader.greeted
    reader.feed(GREETED[-1:])
    assert reader.greeted


def framed(kind, body=b"", *, flags=0, stream_id=1, size=None):
    length = len(body) if size is None else size
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + body


def test_the_bit_before_a_streams_number_means_nothing():
    frames = [framed(kind, bytes(8), flags=4, stream_id=1 | 1 << 31) for kind in (1, 0, 0, 6)]
    plain = [framed(kind, bytes(8), flags=4, stream_id=1) for kind in (1, 0, 0, 6)]
    assert events_of(GREETED + b"".join(frames)) == events_of(GREETED + b"".join(plain))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(framed(1, stream_id=0, flags=4), ErrorCode.PROTOCOL_ERROR, id="headers on 0"),
        pytest.param(framed(1, stream_id=2, flags=4), ErrorCode.PROTOCOL_ERROR, id="headers on 2"),
        pytest.param(framed(5, bytes(4)), ErrorCode.PROTOCOL_ERROR, id="push"),
        pytest.param(framed(9), ErrorCode.PROTOCOL_ERROR, id="continuation of nothing"),
        pytest.param(framed(1) + framed(6, bytes(8)), ErrorCode.PROTOCOL_ERROR, id="between headers"),
        pytest.param(framed(1) + framed(0), ErrorCode.PROTOCOL_ERROR, id="data between headers"),
        pytest.param(framed(1) + framed(9, stream_id=3), ErrorCode.PROTOCOL_ERROR, id="other stream"),
        pytest.param(framed(0, b"\5abc", flags=8), ErrorCode.PROTOCOL_ERROR, id="padding"),
        pytest.param(framed(0, flags=8), ErrorCode.PROTOCOL_ERROR, id="padding without length"),
        pytest.param(framed(4, size=32_769), ErrorCode.FRAME_SIZE_ERROR, id="long settings"),
        pytest.param(framed(0xEE, size=2**24 - 1), ErrorCode.FRAME_SIZE_ERROR, id="long unknown"),
        pytest.param(framed(0, size=2**20 + 1), ErrorCode.FRAME_SIZE_ERROR, id="long data"),
        pytest.param(framed(1) + framed(9) * 17, ErrorCode.ENHANCE_YOUR_CALM, id="empty continuations"),
        pytest.param(
            framed(1, bytes(20_000)) + framed(9, bytes(20_000)), ErrorCode.ENHANCE_YOUR_CALM, id="much"
        ),
    ],
)
def test_what_breaks_the_protocol_is_told_by_its_code(sent, code):
    with pytest.raises(ConnectionBroken) as broken:
        events_of(GREETED, sent)
    assert broken.value.code is code


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n", b"\x16\3\1", GREETED[:24] + framed(6, bytes(8)), b"PRI * HTTP/1"]
)
def test_what_is_no_greeting_is_refused_at_its_first_wrong_byte(sent):
    with pytest.raises(ConnectionBroken) as broken:
        events_of(sent)
    assert broken.value.code is ErrorCode.PROTOCOL_ERROR


def test_the_longest_frames_that_may_be_are_taken():
    data = framed(0, bytes(frame_reader.DATA_FRAME_BYTES))
    other = framed(0xEE, bytes(frame_reader.OTHER_FRAME_BYTES))
    assert [event[0] for event in events_of(GREETED + data + other)] == ["control", "data", "control"]


@pytest.mark.parametrize(("size", "frames"), [(63, 1), (64, 2), (543, 9)])
def test_a_long_block_of_headers_counts_as_several_frames(size, frames):
    recorder = Recorder()
    reader = recorder.reader()
    headers = framed(1, bytes(size), flags=4, stream_id=1)
    pings = framed(6, bytes(8)) * 20
    rest = reader.feed(GREETED + headers + pings, 10)  # SETTINGS are in the greeting
    assert len(rest) == len(pings) - (10 - 1 - frames) * len(framed(6, bytes(8)))
