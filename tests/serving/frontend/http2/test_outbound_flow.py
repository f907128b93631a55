"""Nothing goes out without leave, and all goes out with it."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hpack import Decoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame

from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.http2 import connection
from torchere.serving.frontend.http2.flow_control import OutboundFlow
from torchere.serving.frontend.http2.frames import ConnectionBroken
from torchere.serving.frontend.http2.listener import Listener

SMALL_TABLE = SettingsFrame(0, {1: 0}).serialize()
SMALL_TABLE_THAT_GROWS = b"\0\0\x0c\4\0\0\0\0\0" + b"\0\1\0\0\0\0" + b"\0\1\0\0\x10\0"


@pytest.mark.parametrize("settings", [SMALL_TABLE, SMALL_TABLE_THAT_GROWS], ids=["smaller", "and larger"])
@pytest.mark.parametrize(("path", "status"), [("/twice", "5"), ("/echo", "0")])
def test_a_client_that_shrinks_its_header_table_is_told_that_none_is_used(run, http2, path, status, settings):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            call: list[Frame] = [HeadersFrame(1, wire.block(path), flags=["END_HEADERS"])]
            call.append(DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]))
            wire.greet(settings, *call)
            decoder = Decoder()
            decoder.max_allowed_table_size = 0  # as a client sets it once its settings are acknowledged
            blocks = [(await wire.next(HeadersFrame)).data for _ in range(2)]
            return [dict(decoder.decode(block)) for block in blocks], blocks

    (head, trailers), blocks = run(main())
    assert (head[":status"], trailers["grpc-status"]) == ("200", status)
    assert [block[:1] for block in blocks] == [b"\x20", b"\0"]


@pytest.mark.parametrize("settings", [b"\0\2\0\0\0\0", b"\0\1\0\0\x10\0"], ids=["another", "as it was"])
def test_a_client_that_keeps_its_header_table_is_told_nothing_of_it(settings):
    made = outbound().flow
    made.configure(settings, {})
    assert made.with_note(b"block") == b"block"


class FakeStream:
    def __init__(self, stream_id, *, window):
        self.id, self.window, self.trailers = stream_id, window, None
        self.outbox = deque([bytes(10)])
        self.looks = self.sent_bytes = 0

    def count_unsent(self, size):
        self.looks += 1


def outbound():
    written: list[bytes] = []
    made = OutboundFlow(
        2**20,
        written.append,
        lambda parts: written.append(b"".join(parts)),
        lambda stream: None,
        lambda: None,
        budgets=Budgets(),
    )
    return SimpleNamespace(flow=made, written=written)


@pytest.mark.parametrize(("window", "looks"), [(100, 100), (0, 0)], ids=["waiting", "shut"])
def test_leave_for_a_byte_has_few_streams_looked_at(window, looks):
    made = outbound()
    made.flow.widen(10)
    made.flow._window = 0  # used up by others
    waiting = [FakeStream(number, window=window) for number in range(1, 2001, 2)]
    for stream in waiting:
        made.flow.pump(stream)
    pumped: list[Any] = []
    pump = OutboundFlow.pump
    made.flow.__class__ = type("Counted", (OutboundFlow,), {"__slots__": (), "pump": counted(pump, pumped)})
    for _ in range(100):
        made.flow.widen(1)
    assert len(pumped) == looks
    assert len(set(pumped)) == looks  # each in its turn


def counted(pump, pumped):
    def count(self, stream):
        pumped.append(stream.id)
        pump(self, stream)

    return count


def test_a_stream_without_leave_of_its_own_does_not_wait_for_the_connections():
    made = outbound()
    stream = FakeStream(1, window=0)
    made.flow.pump(stream)
    made.flow.widen(100)
    assert (made.written, made.flow.sends) == ([], 0)
    made.flow.widen_stream(stream, 100)
    assert len(made.written) == 1
    assert not stream.outbox


def test_leave_for_one_byte_of_a_stream_is_leave():
    made = outbound()
    made.flow._window = 0
    stream = FakeStream(1, window=1)
    made.flow.pump(stream)
    assert made.flow.stalled_on([stream]).keys() == {0}
    made.flow.widen(5)
    assert stream.sent_bytes == 1


def test_a_client_that_takes_all_it_can_on_one_connection_has_no_stream_given_up():
    flow = outbound().flow
    flow._window = 0
    streams = {number: FakeStream(number, window=100) for number in range(1, 200, 2)}
    for stream in streams.values():
        flow.pump(stream)
    before = flow.stalled_on(streams.values())
    flow.widen(5)  # the first of them
    now = flow.stalled_on(streams.values())
    assert before.keys() == now.keys() == {0}
    assert before != now


def test_who_gives_leave_for_the_connection_and_none_for_a_stream_has_that_stream_given_up():
    flow = outbound().flow
    shut = FakeStream(1, window=0)
    flow._window = 1
    flow.pump(shut)
    before = flow.stalled_on([shut])
    flow.widen(5)
    assert before == flow.stalled_on([shut]) == {1: (0, 0)}


def test_over_tls_the_state_of_a_full_socket_is_unknown():
    async def main():
        unused: Any = None
        made: Any = connection.Connection(Listener(unused, 1, 1))
        made._transport = SimpleNamespace(get_extra_info=lambda name: "there")
        made._streams[1] = FakeStream(1, window=5)
        made.outbound.stopped = True
        return made._unread_progress()

    assert asyncio.run(main()) == {}


def test_an_initial_window_told_many_times_in_one_frame_counts_once():
    class Counting:
        window, outbox, changes = 0, (), 0

        def __setattr__(self, name, value):
            Counting.changes += 1

    made = outbound()
    values = b"".join(b"\0\4" + (n % 100).to_bytes(4, "big") for n in range(5000))
    made.flow.configure(values, {1: Counting()})
    assert Counting.changes == 1
    assert made.flow.initial_window == 99


def test_settings_that_can_not_be_change_nothing():
    made = outbound()
    with pytest.raises(ConnectionBroken):
        made.flow.configure(b"\0\4\0\0\0\1\0\5\0\0\0\1", {})
    assert made.flow.initial_window == 65_535


def test_no_more_than_a_bounded_part_is_written_before_the_socket_may_say_stop():
    made = outbound()
    stream = FakeStream(1, window=2**30)
    stream.outbox = deque([bytes(8 * 2**20)])
    made.flow.widen(2**30)
    write = made.flow._write_all

    def full(buffers):
        write(buffers)
        made.flow.stopped = True

    made.flow._write_all = full
    made.flow.pump(stream)
    assert 2**20 <= len(made.written[0]) < 2**20 + 100_000
    assert len(made.written) == 1
    made.flow._write_all = write
    made.flow.resume()
    assert sum(map(len, made.written)) >= 8 * 2**20


def test_a_client_that_takes_longer_frames_gets_them(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.greet(SettingsFrame(0, {5: 20_000}), wire.headers("/echo"))
            wire.send(DataFrame(1, http2.prefixed(bytes(18_000)), flags=["END_STREAM"]))
            return len((await wire.next(DataFrame)).data)

    assert run(main()) == 5 + 18_000
