"""Frames as an independent library writes and reads them."""

import pytest
from hyperframe.frame import Frame, HeadersFrame
from hypothesis import example, given
from hypothesis import strategies as st

from torchere.serving.frontend.http2 import frames as f

U31 = st.integers(0, 2**31 - 1)


def parsed(data):
    frame, length = Frame.parse_frame_header(memoryview(data[:9]))
    assert length == len(data) - 9
    frame.parse_body(memoryview(data[9:]))
    return frame


@given(st.integers(0, 2**24 - 1), st.integers(0, 255), st.integers(0, 255), U31)
def test_a_head_is_read_as_it_was_written(length, kind, flags, stream_id):
    high, low, *rest = f.HEAD.unpack(f.head(length, kind, flags, stream_id))
    assert (high << 8 | low, *rest) == (length, kind, flags, stream_id)


@given(st.dictionaries(st.sampled_from(list(f.Setting)), U31))
def test_settings_are_what_others_read(settings):
    assert parsed(f.settings_frame(settings)).settings == settings


@given(st.integers(1, 2**31 - 1), U31)
def test_window_updates_are_what_others_read(increment, stream_id):
    frame = parsed(f.window_update(stream_id, increment))
    assert (frame.stream_id, frame.window_increment) == (stream_id, increment)


@given(U31, st.sampled_from(list(f.ErrorCode)), st.text(max_size=2000))
@example(1, f.ErrorCode.NO_ERROR, "x" * 1001)
def test_goaway_is_what_others_read_and_short(last_id, code, message):
    frame = parsed(f.goaway(last_id, code, message))
    assert (frame.last_stream_id, frame.error_code) == (last_id, code)
    assert frame.additional_data == message.encode()[:1000]


@given(st.integers(1, 2**31 - 1), st.sampled_from(list(f.ErrorCode)))
def test_resets_are_what_others_read(stream_id, code):
    frame = parsed(f.reset_stream(stream_id, code))
    assert (frame.stream_id, frame.error_code) == (stream_id, code)


@given(st.binary(max_size=50), st.integers(0, 255), st.booleans())
def test_padding_and_priority_of_headers_are_taken_off(block, padding, prioritised):
    frame = HeadersFrame(1, block, pad_length=padding, flags=["PADDED", *["PRIORITY"] * prioritised])
    data = frame.serialize()
    assert f.without_padding(data[4], data[9:]) == block


@pytest.mark.parametrize(
    ("flags", "payload"), [(8, b""), (8, b"\1"), (0x28, b"\0abcd"), (8, b"\5abcd"), (0x20, b"1234")]
)
def test_headers_of_padding_alone_break_the_connection(flags, payload):
    with pytest.raises(f.ConnectionBroken, match="padding") as broken:
        f.without_padding(flags, payload)
    assert broken.value.code is f.ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"12345", f.ErrorCode.FRAME_SIZE_ERROR),
        (b"\0\2\0\0\0\2", f.ErrorCode.PROTOCOL_ERROR),
        (b"\0\4\x80\0\0\0", f.ErrorCode.FLOW_CONTROL_ERROR),
        (b"\0\5\0\0\x3f\xff", f.ErrorCode.PROTOCOL_ERROR),
        (b"\0\5\1\0\0\0", f.ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_settings_that_can_not_be_break_the_connection(payload, code):
    with pytest.raises(f.ConnectionBroken) as broken:
        dict(f.read_settings(payload))
    assert broken.value.code is code


def test_unknown_settings_are_handed_on():
    assert dict(f.read_settings(b"\xff\xff\0\0\0\7")) == {0xFFFF: 7}


def test_the_reserved_bit_of_a_number_means_nothing():
    assert f.read_u32(b"\x80\0\0\1") == 1


@pytest.mark.parametrize("payload", [b"", b"123", b"12345"])
def test_a_number_of_another_size_breaks_the_connection(payload):
    with pytest.raises(f.ConnectionBroken, match="expected 4"):
        f.read_u32(payload)
