"""Frames in any order, well made or not: no bug shows, nothing is left, and answers keep the protocol."""

import asyncio
import logging

from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from torchere.serving.frontend.http2.connection import Connection
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.frontend.http2.messages import MessageFailed

GREETED = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
MODULE = "torchere.serving.frontend.http2"


class FakeTransport(asyncio.Transport):
    """Keeps what is written; closes at once."""

    def __init__(self):
        super().__init__()
        self.written, self.closed = bytearray(), False
        self.may_read = asyncio.Event()
        self.may_read.set()

    def pause_reading(self):
        self.may_read.clear()

    def resume_reading(self):
        self.may_read.set()

    def write(self, data):
        assert not self.closed
        self.written += data

    def writelines(self, buffers):
        for part in buffers:
            self.write(part)

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True
        self.may_read.set()

    def abort(self):
        self.close()

    def get_extra_info(self, name, default=None):
        return default

    def get_write_buffer_size(self):
        return 0


class Answering:
    """Answers as the first message says, and counts how often it is told the end."""

    takes_one = True

    def __init__(self, stream):
        self.stream, self.ends, self.messages = stream, 0, []

    def on_message(self, message):
        self.messages.append(message)
        if message == b"pause":
            self.stream.pause()
        elif message == b"send":
            self.stream.send(bytes(50))

    def on_half_close(self):
        self.ends += 1
        try:
            if self.messages and self.messages[0] == b"many":
                self.stream.send(bytes(90))
                self.stream.end(3, "much")
            else:
                self.stream.answer(bytes(90))
        except MessageFailed as err:
            self.stream.end(err.code, str(err))

    def on_failure(self, error):
        self.stream.end(error.code, str(error))

    def on_cancel(self):
        self.ends += 1

    def on_drain(self, *, is_stop):
        """Every call ends by itself."""


ids = st.sampled_from([0, 1, 1, 3, 3, 5, 7, 2, 99])
block = st.sampled_from(
    [Encoder().encode([(":method", "POST"), (":path", "/x")]), Encoder().encode([("x", "y")]), b"", b"\xff"]
)
messages = st.sampled_from([b"many", b"send", b"pause", b"", bytes(300)]).map(
    lambda message: b"\0" + len(message).to_bytes(4, "big") + message
)


def raw(kind, flags, stream_id, body):
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + body


u32 = st.sampled_from([0, 1, 10, 100, 70_000, 2**31 - 1]).map(lambda number: number.to_bytes(4, "big"))
setting = st.tuples(st.sampled_from([1, 4, 5, 77]), u32).map(lambda one: one[0].to_bytes(2, "big") + one[1])
well_made = st.one_of(
    st.builds(raw, st.just(1), st.sampled_from([4, 4, 5, 0]), ids, block),
    st.builds(raw, st.just(0), st.sampled_from([0, 1, 8]), ids, messages),
    st.builds(raw, st.just(3), st.just(0), ids, u32),
    st.builds(raw, st.just(4), st.sampled_from([0, 1]), st.just(0), st.lists(setting).map(b"".join)),
    st.builds(raw, st.just(6), st.sampled_from([0, 1]), st.just(0), st.just(b"farewell")),
    st.builds(raw, st.just(8), st.just(0), ids, u32),
    st.builds(raw, st.just(7), st.just(0), st.just(0), st.just(bytes(8))),
)
any_frame = st.builds(raw, st.integers(0, 11), st.integers(0, 255), ids, st.binary(max_size=30))
acts = st.sampled_from(["pause", "resume", "drain", "turn"])
story = st.lists(st.one_of(well_made, well_made, well_made, any_frame, acts), max_size=25)


class Errors(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


async def receive(connection, transport, data):
    await transport.may_read.wait()  # a slow machine uses up the time of a turn
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


async def play(steps):
    receivers, transport = [], FakeTransport()

    def open_call(stream):
        receivers.append(Answering(stream))
        return receivers[-1]

    connection = Connection(Listener(open_call, 200, 80))
    connection.connection_made(transport)
    await receive(connection, transport, GREETED)
    for step in steps:
        if isinstance(step, bytes):
            await receive(connection, transport, step)
        elif step == "pause":
            connection.pause_writing()
        elif step == "resume":
            connection.resume_writing()
        elif step == "drain":
            connection.closing.begin()
        else:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    await transport.may_read.wait()
    connection.connection_lost(None)
    assert connection._streams == {}
    assert connection._timers == [] or all(timer.cancelled() for timer in connection._timers)
    return receivers, bytes(transport.written)


def frames_of(written):
    while written:
        frame, length = Frame.parse_frame_header(memoryview(written[:9]))
        frame.parse_body(memoryview(written[9 : 9 + length]))
        written = written[9 + length :]
        yield frame


def check_answers(written):
    """Each stream: headers, data, trailers, in this order, and nothing behind its end."""
    decoder, begun, over = Decoder(), set(), set()
    for frame in frames_of(written):
        if isinstance(frame, HeadersFrame):
            assert frame.stream_id not in over
            found = dict(decoder.decode(frame.data))
            assert (":status" in found) == (frame.stream_id not in begun)
            begun.add(frame.stream_id)
            if "END_STREAM" in frame.flags:
                assert "grpc-status" in found
                over.add(frame.stream_id)
        elif isinstance(frame, DataFrame):
            assert frame.stream_id in begun - over


@settings(max_examples=300, deadline=None)
@given(story)
def test_whatever_a_client_sends_is_answered_by_the_protocol_and_leaves_nothing(steps):
    errors = Errors()
    logging.getLogger(MODULE).addHandler(errors)
    try:
        receivers, written = asyncio.run(play(steps))
    finally:
        logging.getLogger(MODULE).removeHandler(errors)
    assert errors.found == []
    check_answers(written)
    assert all(receiver.ends <= 2 for receiver in receivers)
