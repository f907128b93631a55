"""One connection: its greeting, its calls in any state, and its ends."""

import asyncio
import gc
import tracemalloc

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from torchere.serving.frontend.http2 import connection as module
from torchere.serving.frontend.http2.connection import MAX_STREAMS

LAST = ["END_HEADERS", "END_STREAM"]


def test_the_greeting_tells_the_limits_before_anything_is_asked(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            settings, update = await wire.frame(), await wire.frame()
            return settings.settings, type(update), update.window_increment

    settings, kind, increment = run(main())
    assert settings == {3: 1000, 4: 4 * 2**20, 5: 2**20, 6: 16_384}
    assert (kind, increment) == (WindowUpdateFrame, 16 * 2**20 - 65_535)


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x16\3\1\2\0", bytes(24), b"PRI * HTTP/2.0\r\n\r\nXX"]
)
def test_what_is_no_http2_is_told_so_and_closed(run, http2, sent):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.send(sent)
            last = (await wire.all())[-1]
            return type(last), last.error_code, last.additional_data

    assert run(main()) == (GoAwayFrame, 1, b"expected HTTP/2, by prior knowledge or by ALPN")


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_a_client_that_does_not_greet_is_closed(run, http2, monkeypatch, said):
    monkeypatch.setattr(module, "PREFACE_TIMEOUT_S", 0.05)

    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.send(said)
            return {type(frame) for frame in await wire.all()}

    assert run(main()) <= {SettingsFrame, WindowUpdateFrame}


def test_a_client_that_greeted_may_wait(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            await wire.next(SettingsFrame)
            await wire.next(SettingsFrame)
            (connection,) = served.listener.connections
            connection._check_preface()  # the timer, which is seconds away
            wire.send(wire.headers("/refuse", last=True))
            return (await wire.next(HeadersFrame)).stream_id

    assert run(main()) == 1


@pytest.mark.parametrize("cut", [3, 15, 40, 80])
def test_a_client_that_leaves_in_the_middle_of_a_frame_leaves_nothing(run, http2, cut):
    async def main():
        async with http2.listener() as served:
            async with http2.wire(served) as wire:
                hung = wire.headers("/hang").serialize()
                wire.greet(hung, DataFrame(1, bytes(100)).serialize()[:cut])
                while not served.calls:
                    await wire.frame()
                wire.writer.close()
                await served.calls[0].over.wait()
            await served.listener.all_closed(10)
            return served.calls[0].ended_by

    assert run(main()) == "gone"


def test_the_trailers_of_a_client_end_its_call(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/echo", b"m", end=False)
            peer.h2.send_headers(stream_id, [("x-trailer", "1")], end_stream=True)
            peer.flush()
            return await peer.answered(stream_id)

    assert run(main()).messages == [b"m"]


def test_trailers_that_do_not_end_are_a_fault_of_their_call(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/hang"), wire.headers("/hang"))
            reset = await wire.next(RstStreamFrame)
            return reset.stream_id, reset.error_code, served.calls[0].ended_by

    assert run(main()) == (1, 1, "gone")


@pytest.mark.parametrize(
    ("first_is_last", "block", "code"),
    [
        pytest.param(False, None, 1, id="a second head"),
        pytest.param(True, None, 5, id="a second head behind the end"),
        pytest.param(True, b"\0\1x\1y", 5, id="trailers behind the end"),
    ],
)
def test_headers_that_are_no_trailers_are_a_fault_of_their_call(run, http2, first_is_last, block, code):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(
                wire.headers("/hang", last=first_is_last), wire.headers("/hang", block=block, last=True)
            )
            reset = await wire.next(RstStreamFrame)
            return reset.stream_id, reset.error_code, served.calls[0].ended_by

    assert run(main()) == (1, code, "gone")


def test_trailers_of_a_call_that_is_over_are_passed_over(run, http2):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(wire.headers("/refuse"))
            wire.send(wire.headers("", block=wire.encoder.encode([("x-trailer", "1")]), last=True))
            wire.send(wire.headers("/refuse", 3, last=True))
            await wire.next(HeadersFrame)
            return (await wire.next(HeadersFrame)).stream_id

    assert run(main()) == 3


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        pytest.param(DataFrame(5, b"x"), 1, id="data on an idle stream"),
        pytest.param(DataFrame(2, b"x"), 1, id="data on an even stream"),
        pytest.param(RstStreamFrame(5), 1, id="reset of an idle stream"),
        pytest.param(WindowUpdateFrame(5, 1), 1, id="leave for an idle stream"),
        pytest.param(b"\0\0\0\3\0\0\0\0\1", 6, id="short reset"),
        pytest.param(b"\0\0\4\3\0\0\0\0\0\0\0\0\0", 1, id="reset of the connection"),
        pytest.param(b"\0\0\7\6\0\0\0\0\0" + bytes(7), 6, id="short ping"),
        pytest.param(b"\0\0\x08\6\0\0\0\0\1" + bytes(8), 1, id="ping on a stream"),
        pytest.param(b"\0\0\x08\7\0\0\0\0\1" + bytes(8), 1, id="goodbye on a stream"),
        pytest.param(b"\0\0\7\7\0\0\0\0\0" + bytes(7), 6, id="short goodbye"),
        pytest.param(b"\0\0\5\2\0\0\0\0\0" + bytes(5), 1, id="priority of the connection"),
        pytest.param(b"\0\0\4\2\0\0\0\0\1" + bytes(4), 6, id="short priority"),
        pytest.param(b"\0\0\6\2\0\0\0\0\1" + bytes(6), 6, id="long priority"),
        pytest.param(b"\0\0\0\4\0\0\0\0\1", 1, id="settings on a stream"),
        pytest.param(b"\0\0\6\4\1\0\0\0\0" + bytes(6), 6, id="settings in an acknowledgement"),
        pytest.param(b"\0\0\1\4\0\0\0\0\0\0", 6, id="short settings"),
        pytest.param(ContinuationFrame(1, b""), 1, id="continuation of nothing"),
        pytest.param(HeadersFrame(3, b"\xff\xff\xff", flags=LAST), 9, id="headers that can't be read"),
        pytest.param(HeadersFrame(3, b"\x3f\xff\x7f", flags=LAST), 9, id="a table that is too large"),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection_with_its_code(run, http2, frame, code):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/hang"), frame)
            goaway = await wire.next(GoAwayFrame)
            assert await wire.frame() is None
            await served.calls[0].over.wait()
            return goaway.error_code, goaway.last_stream_id, served.calls[0].ended_by

    assert run(main()) == (code, 1, "gone")


def test_a_stream_that_begins_after_a_later_one_ends_the_connection(run, http2):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(wire.headers("/hang", 5), wire.headers("/hang", 3))
            goaway = await wire.next(GoAwayFrame)
            return goaway.error_code, goaway.last_stream_id

    assert run(main()) == (1, 5)


def test_a_header_list_that_is_far_too_long_is_ended_calmly(run, http2):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(wire.headers("/hang", block=wire.encoder.encode([("x", "\\" * 32_750)], huffman=False)))
            return (await wire.next(GoAwayFrame)).error_code

    assert run(main()) == 11


@pytest.mark.parametrize("payload", [b"", b"x" * 500])
def test_a_flood_of_continuations_is_ended_calmly(run, http2, payload):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(HeadersFrame(1, b""), *[ContinuationFrame(1, payload)] * 100)
            return (await wire.next(GoAwayFrame)).error_code

    assert run(main()) == 11


def test_headers_in_several_frames_are_one_call(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            block = wire.block("/echo")
            wire.send(HeadersFrame(1, block[:9]), ContinuationFrame(1, block[9:20]))
            wire.send(ContinuationFrame(1, block[20:], flags=["END_HEADERS"]))
            wire.send(DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]))
            await wire.next(DataFrame)
            return served.calls[0].does

    assert run(main()) == "/echo"


def test_a_client_that_gives_a_call_up_in_any_state_hurts_no_other(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            reset = [RstStreamFrame(number, 8) for number in range(1, 12, 2)]
            message = http2.prefixed(b"m")
            wire.send(wire.headers("/hang", 1), reset[0])  # begun
            wire.send(wire.headers("/hang", 3), DataFrame(3, message[:-1]), reset[1])  # half a message
            wire.send(wire.headers("/hang", 5), DataFrame(5, message, flags=["END_STREAM"]), reset[2])
            wire.send(wire.headers("/refuse", 7), reset[3])  # answered early
            wire.send(wire.headers("/refuse", 9, last=True), reset[4], reset[4])  # over, and twice
            wire.send(wire.headers("/hang", 11), reset[5], DataFrame(11, message, flags=["END_STREAM"]))
            wire.send(wire.headers("/echo", 13), DataFrame(13, message, flags=["END_STREAM"]))
            answer = await wire.next(DataFrame)
            return answer.stream_id, [call.ended_by for call in served.calls]

    stream_id, ends = run(main())
    assert stream_id == 13
    assert ends == ["gone", "gone", "gone", "", "", "gone", "half_closed"]


@pytest.mark.parametrize("end", [[], [DataFrame(1, flags=["END_STREAM"])]], ids=["its head", "data"])
def test_data_after_the_end_of_a_call_is_a_fault_of_that_call(run, http2, end):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/hang", last=not end), *end, DataFrame(1, b"x"))
            reset = await wire.next(RstStreamFrame)
            return reset.error_code, served.calls[0].ended_by

    assert run(main()) == (5, "gone")


def test_ten_thousand_calls_begun_and_given_up_leave_nothing(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            message = DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]).serialize()
            reset = RstStreamFrame(1, 8).serialize()
            wire.send(wire.calls("/flow", 100, message, reset), PingFrame(0, bytes(8)))
            await wire.next(PingFrame)
            most = 0
            gc.collect()
            tracemalloc.start()
            try:
                for begin in range(201, 20_001, 400):
                    wire.send(wire.calls("/flow", 200, message, reset, first=begin))
                    wire.send(PingFrame(0, bytes(8)))
                    await wire.next(PingFrame)
                    most = max(most, len(asyncio.all_tasks()))
                    served.calls.clear()
                gc.collect()
                kept = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            (connection,) = served.listener.connections
            return most, kept, len(connection._streams), len(connection._headers._blocks)

    most, kept, streams, known = run(main())
    assert most < 500
    assert kept < 500_000
    assert (streams, known) == (0, 1)


def test_more_streams_than_may_be_are_refused_and_may_come_again(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.calls("/hang", MAX_STREAMS + 1))
            refused = await wire.next(RstStreamFrame)
            wire.send(RstStreamFrame(1, 8), wire.headers("/echo", 2 * MAX_STREAMS + 3))
            wire.send(DataFrame(2 * MAX_STREAMS + 3, http2.prefixed(b"m"), flags=["END_STREAM"]))
            await wire.next(DataFrame)
            return refused.stream_id, refused.error_code, len(served.calls)

    assert run(main()) == (2 * MAX_STREAMS + 1, 7, MAX_STREAMS + 1)


def test_many_calls_at_a_time_get_each_their_own_answer(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            await peer.round_trip()
            ids = [peer.begin("/many", b"%d" % n, end=False) for n in range(300)]
            for stream_id in reversed(ids):
                peer.say(stream_id, http2.prefixed(b"end"), end=True)
            return [(await peer.answered(stream_id)).messages for stream_id in ids]

    assert run(main()) == [[b"%d" % n, b"end"] for n in range(300)]


def test_pings_are_answered_with_what_they_say(run, http2):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(PingFrame(0, b"abcdefgh"))
            answer = await wire.next(PingFrame)
            return answer.opaque_data, "ACK" in answer.flags

    assert run(main()) == (b"abcdefgh", True)


def test_a_bug_costs_one_connection_and_is_logged(run, http2, caplog, monkeypatch):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/hang"))
            while not served.calls:
                await wire.frame()
            monkeypatch.setattr(served.calls[0], "on_half_close", lambda: 1 / 0)
            wire.send(DataFrame(1, flags=["END_STREAM"]))
            return (await wire.next(GoAwayFrame)).error_code

    assert run(main()) == 2
    assert "ZeroDivisionError" in caplog.text


def test_a_connection_that_is_closed_keeps_no_heads_until_it_is_collected(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/refuse", last=True))
            while not served.calls:
                await wire.frame()
            (connection,) = served.listener.connections
            before = len(connection._headers._heads)
            wire.writer.transport.abort()
            while served.listener.connections:
                await asyncio.sleep(0.01)
            return before, len(connection._headers._heads)

    assert run(main()) == (1, 0)
