"""Nothing goes out without leave, and all goes out with it."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest
from h2.settings import SettingCodes
from hpack import Decoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from torchere.serving.frontend.http2.frames import ConnectionBroken
from torchere.serving.frontend.http2.outflow import Outflow

WINDOW = SettingCodes.INITIAL_WINDOW_SIZE
FRAME = SettingCodes.MAX_FRAME_SIZE


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_a_tiny_window_lets_an_answer_through_bit_by_bit(run, http2, window):
    message = bytes(range(256)) * 4

    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: window}) as peer:
            return await peer.call("/echo", message)

    answer = run(main())
    assert (answer.messages, answer.status) == ([message], "0")


def test_a_window_of_nothing_holds_an_answer_until_it_grows(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: 0}) as peer:
            stream_id = peer.begin("/echo", b"message")
            await served_call(served)
            await peer.round_trip()
            held = bytes(peer.answers[stream_id].data), peer.answers[stream_id].headers[":status"]
            peer.h2.update_settings({WINDOW: 100})
            peer.flush()
            return held, await peer.answered(stream_id)

    held, answer = run(main())
    assert held == (b"", "200")
    assert (answer.messages, answer.status) == ([b"message"], "0")


async def served_call(served):
    while not served.calls:
        await asyncio.sleep(0)
    await served.calls[-1].over.wait()


def test_a_window_lowered_below_zero_while_a_stream_sends_is_minded(run, http2):
    message = bytes(50_000)

    async def main():
        async with (
            http2.listener() as served,
            http2.peer(served, settings={WINDOW: 20_000}, eats=False) as peer,
        ):
            stream_id = peer.begin("/echo", message)
            answer = peer.answers[stream_id]
            await peer.until(lambda: len(answer.data) == 20_000)
            await peer.settle({WINDOW: 5})  # so the stream's window is 19,995 below zero
            peer.h2.increment_flow_control_window(19_995, stream_id)
            await peer.round_trip()
            at_zero = len(answer.data)
            peer.h2.increment_flow_control_window(1, stream_id)
            await peer.round_trip()
            at_one = len(answer.data)
            peer.h2.increment_flow_control_window(100_000, stream_id)
            peer.flush()
            return at_zero, at_one, await peer.answered(stream_id)

    at_zero, at_one, answer = run(main())
    assert (at_zero, at_one) == (20_000, 20_001)
    assert answer.messages == [message]


def test_streams_that_wait_for_the_connections_window_take_turns(run, http2):
    message = bytes(60_000)

    async def main():
        async with (
            http2.listener() as served,
            http2.peer(served, settings={WINDOW: 2**20}, eats=False) as peer,
        ):
            ids = [peer.begin("/echo", message) for _ in range(3)]
            await peer.until(lambda: sum(len(answer.data) for answer in peer.answers.values()) == 65_535)
            held = [len(peer.answers[stream_id].data) for stream_id in ids]
            peer.h2.increment_flow_control_window(60_005)
            await peer.round_trip()
            peer.h2.increment_flow_control_window(2**20)
            peer.flush()
            return held, [await peer.answered(stream_id) for stream_id in ids]

    held, answers = run(main())
    assert held == [60_005, 5_530, 0]
    assert [answer.messages for answer in answers] == [[message]] * 3


def test_frames_are_no_longer_than_the_client_takes(run, http2):
    async def main(size):
        async with http2.listener() as served, http2.peer(served) as peer:
            if size:
                await peer.settle({FRAME: size, WINDOW: 2**24})
                peer.h2.increment_flow_control_window(2**24)
            return await peer.call("/echo", bytes(150_000))

    # The client checks each frame's length.
    assert run(main(None)).messages == [bytes(150_000)]
    assert run(main(20_000)).messages == [bytes(150_000)]


@pytest.mark.parametrize("size", [65_535, 65_536, 100_000, 2**20 - 5, 2**20])
def test_a_message_that_fits_in_one_long_frame_goes_out_whole(run, http2, size):
    async def main():
        async with (
            http2.listener() as served,
            http2.peer(served, settings={FRAME: 2**20, WINDOW: 2**16}) as peer,
        ):
            return await peer.call("/echo", bytes(size))

    answer = run(main())
    assert (len(answer.messages[0]), answer.status) == (size, "0")


def test_an_increment_that_overflows_ends_the_stream_or_the_connection(run, http2):
    async def main(stream_id):
        async with http2.listener() as served, http2.wire(served) as wire:
            head = HeadersFrame(1, wire.block("/hang"), flags=["END_HEADERS"])
            wire.greet(head, WindowUpdateFrame(stream_id, 2**31 - 1))
            frame = await wire.next(SettingsFrame)
            while type(frame) not in {type(None)} and getattr(frame, "error_code", None) is None:
                frame = await wire.frame()
            return type(frame).__name__, frame.error_code, frame.stream_id

    assert run(main(1)) == ("RstStreamFrame", 3, 1)
    assert run(main(0)) == ("GoAwayFrame", 3, 0)


def test_an_increment_of_nothing_ends_the_stream_or_the_connection(run, http2):
    nothing = b"\0\0\4\x08\0\0\0\0"

    async def main(stream_id):
        async with http2.listener() as served, http2.wire(served) as wire:
            head = HeadersFrame(1, wire.block("/hang"), flags=["END_HEADERS"])
            wire.greet(head, nothing + bytes((stream_id,)) + bytes(4))
            frame = await wire.frame()
            while getattr(frame, "error_code", None) is None:
                frame = await wire.frame()
            return type(frame).__name__, frame.error_code

    assert run(main(1)) == ("RstStreamFrame", 1)
    assert run(main(0)) == ("GoAwayFrame", 1)


def test_an_initial_window_that_overflows_a_stream_ends_the_connection(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            head = HeadersFrame(1, wire.block("/hang"), flags=["END_HEADERS"])
            wire.greet(head, WindowUpdateFrame(1, 2**30), SettingsFrame(0, {4: 2**31 - 1}))
            return (await wire.all())[-1].error_code

    assert run(main()) == 3


def test_a_client_that_shrinks_its_header_table_is_told_that_none_is_used(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            call = [HeadersFrame(1, wire.block("/twice"), flags=["END_HEADERS"])]
            call.append(DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]))
            wire.greet(SettingsFrame(0, {1: 0}), *call)
            decoder = Decoder()
            decoder.max_allowed_table_size = 0  # as a client sets it once its settings are acknowledged
            blocks = [(await wire.next(HeadersFrame)).data for _ in range(2)]
            return [dict(decoder.decode(block)) for block in blocks], blocks

    (head, trailers), blocks = run(main())
    assert (head[":status"], trailers["grpc-status"]) == ("200", "5")
    assert [block[:1] for block in blocks] == [b"\x20", b"\0"]


class FakeStream:
    def __init__(self, stream_id, *, window):
        self.id, self.window, self.trailers = stream_id, window, None
        self.outbox = deque([bytes(10)])
        self.looks = self.sent_bytes = 0

    def sent(self, size):
        self.looks += 1
        self.sent_bytes += size


def outflow():
    written = []
    made = Outflow(lambda buffers: written.append(b"".join(buffers)), lambda stream: None, lambda: None)
    return SimpleNamespace(outflow=made, written=written)


def test_leave_for_a_byte_has_few_streams_looked_at():
    made = outflow()
    made.outflow.widen(10)
    made.outflow._window = 0  # used up by others
    waiting = [FakeStream(number, window=100) for number in range(1, 2001, 2)]
    for stream in waiting:
        made.outflow.pump(stream)
    pumped = []
    pump = Outflow.pump
    made.outflow.__class__ = type("Counted", (Outflow,), {"__slots__": (), "pump": counted(pump, pumped)})
    for _ in range(100):
        made.outflow.widen(1)
    assert len(pumped) == 100
    assert len(set(pumped)) == 100  # each in its turn


def counted(pump, pumped):
    def count(self, stream):
        pumped.append(stream.id)
        pump(self, stream)

    return count


def test_a_stream_without_leave_of_its_own_does_not_wait_for_the_connections():
    made = outflow()
    stream = FakeStream(1, window=0)
    made.outflow.pump(stream)
    made.outflow.widen(100)
    assert made.written == []
    made.outflow.widen_stream(stream, 100)
    assert len(made.written) == 1
    assert not stream.outbox


def test_a_client_that_takes_all_it_can_on_one_connection_has_no_stream_given_up():
    outflow_ = outflow().outflow
    outflow_._window = 0
    streams = {number: FakeStream(number, window=100) for number in range(1, 200, 2)}
    for stream in streams.values():
        outflow_.pump(stream)
    before = outflow_.waiting(streams, None)
    outflow_.widen(5)  # the first of them
    now = outflow_.waiting(streams, None)
    assert before.keys() == now.keys() == {0}
    assert before != now


def test_who_gives_leave_for_the_connection_and_none_for_a_stream_has_that_stream_given_up():
    outflow_ = outflow().outflow
    shut = FakeStream(1, window=0)
    outflow_.pump(shut)
    before = outflow_.waiting({1: shut}, None)
    outflow_.widen(5)
    assert before == outflow_.waiting({1: shut}, None) == {1: (0, 0)}


def test_an_initial_window_told_many_times_in_one_frame_counts_once():
    class Counting:
        window, outbox, changes = 0, (), 0

        def __setattr__(self, name, value):
            Counting.changes += 1

    made = outflow()
    values = b"".join(b"\0\4" + (n % 100).to_bytes(4, "big") for n in range(5000))
    made.outflow.configure(values, [Counting()])
    assert Counting.changes == 1
    assert made.outflow.initial_window == 99


def test_settings_that_can_not_be_change_nothing():
    made = outflow()
    with pytest.raises(ConnectionBroken):
        made.outflow.configure(b"\0\4\0\0\0\1\0\5\0\0\0\1", [])
    assert made.outflow.initial_window == 65_535


def test_no_more_than_a_bounded_part_is_written_before_the_socket_may_say_stop():
    made = outflow()
    stream = FakeStream(1, window=2**30)
    stream.outbox = deque([bytes(8 * 2**20)])
    made.outflow.widen(2**30)
    write = made.outflow._write

    def full(buffers):
        write(buffers)
        made.outflow.stopped = True

    made.outflow._write = full
    made.outflow.pump(stream)
    assert 2**20 <= len(made.written[0]) < 2**20 + 100_000
    assert len(made.written) == 1
    made.outflow._write = write
    made.outflow.resume()
    assert sum(map(len, made.written)) >= 8 * 2**20
