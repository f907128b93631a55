"""The ends of a connection: no call that crosses with the news is lost, and nobody is waited for long."""

import pytest
from h2.settings import SettingCodes
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from torchere.serving.frontend.http2 import graceful_close


def begun_close(served):
    """The graceful close of the only connection, begun."""
    (connection,) = served.listener.connections
    connection.closing.begin()
    return connection.closing


def test_a_drain_takes_calls_that_cross_and_refuses_later_ones(run, http2, monkeypatch):
    monkeypatch.setattr(graceful_close, "STEP_S", 60)

    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/hold"))
            while not served.calls:
                await wire.frame()
            begun_close(served)
            soft, ping = await wire.next(GoAwayFrame), await wire.next(PingFrame)
            wire.send(
                wire.headers("/echo", 3), DataFrame(3, http2.prefixed(b"crossed"), flags=["END_STREAM"])
            )
            wire.send(PingFrame(0, ping.opaque_data, flags=["ACK"]))
            crossed = await wire.next(DataFrame)
            hard = await wire.next(GoAwayFrame)
            wire.send(wire.headers("/echo", 5, last=True))
            refused = await wire.next(RstStreamFrame)
            served.calls[0].stream.end()
            rest = await wire.all()
            return soft.last_stream_id, crossed.data[5:], hard, refused, [frame.stream_id for frame in rest]

    soft, crossed, hard, refused, rest = run(main())
    assert (soft, crossed) == (2**31 - 1, b"crossed")
    assert (hard.last_stream_id, hard.error_code) == (3, 0)
    assert (refused.stream_id, refused.error_code) == (5, 7)
    assert set(rest) == {1}


def test_a_drain_does_not_wait_long_for_a_client_that_answers_no_ping(run, http2, monkeypatch):
    monkeypatch.setattr(graceful_close, "STEP_S", 0.05)

    async def main():
        async with http2.greeted() as (served, wire):
            await wire.next(SettingsFrame)
            begun_close(served).begin()  # once is enough
            return [frame.last_stream_id for frame in await wire.all() if type(frame) is GoAwayFrame]

    assert run(main()) == [2**31 - 1, 0]


def test_a_connection_that_grows_old_is_drained_and_its_last_calls_get_their_grace(run, http2):
    async def main():
        async with http2.greeted(age_s=0.05, age_grace_s=0.05) as (served, wire):
            wire.send(wire.headers("/hang"))
            goaways = [frame.last_stream_id for frame in await wire.all() if type(frame) is GoAwayFrame]
            await served.calls[0].over.wait()
            return goaways, served.calls[0].ended_by

    assert run(main()) == ([2**31 - 1], "gone")


def test_a_connection_made_while_the_listener_leaves_is_drained(run, http2, monkeypatch):
    monkeypatch.setattr(graceful_close, "STEP_S", 60)

    async def main():
        async with http2.listener() as served:
            served.listener.draining = True
            async with http2.wire(served) as wire:
                wire.greet()
                wire.send(PingFrame(0, b"farewell", flags=["ACK"]))
                return [frame.last_stream_id for frame in await wire.all() if type(frame) is GoAwayFrame]

    assert run(main()) == [2**31 - 1, 0]


def test_a_client_that_says_goodbye_gets_its_last_answers(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/echo"), GoAwayFrame(0, 0), PingFrame(0, bytes(8)))
            await wire.next(PingFrame)
            begun_close(served)  # nothing that its client does not know
            wire.send(DataFrame(1, http2.prefixed(b"last"), flags=["END_STREAM"]))
            _, *rest = await wire.all()
            return [type(frame) for frame in rest], rest[0].data

    assert run(main()) == ([DataFrame, HeadersFrame], http2.prefixed(b"last"))


def test_a_broken_connection_ends_even_when_its_client_reads_nothing(run, http2, monkeypatch):
    monkeypatch.setattr(graceful_close, "STEP_S", 0.05)

    async def main():
        settings = {SettingCodes.INITIAL_WINDOW_SIZE: 2**30}
        async with http2.listener(limit_bytes=2**26) as served, http2.peer(served, settings=settings) as peer:
            peer.h2.increment_flow_control_window(2**30)
            peer.begin("/hang", end=False)
            await peer.round_trip()
            served.calls[0].stream.send(bytes(2**25))
            peer.writer.write(b"\0\0\0\3\0\0\0\0\1")  # a RST_STREAM of no bytes
            await served.listener.all_closed(10)
            return served.calls[0].ended_by, len(served.listener.connections)

    assert run(main()) == ("gone", 0)


async def taken_leave(wire, served):
    """Drain the only connection, whose client has heard of it."""
    begun_close(served)
    await wire.next(PingFrame)
    wire.send(PingFrame(0, b"farewell", flags=["ACK"]))
    return await wire.next(GoAwayFrame)


def test_a_drain_ends_as_soon_as_the_client_has_heard_and_no_sooner(run, http2, monkeypatch):
    monkeypatch.setattr(graceful_close, "STEP_S", 60)

    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(PingFrame(0, b"farewell", flags=["ACK"]), PingFrame(0, b"12345678"))  # too early
            await wire.next(PingFrame)
            leave = begun_close(served)
            wire.send(PingFrame(0, b"12345678", flags=["ACK"]), PingFrame(0, b"12345678"))
            await wire.next(PingFrame)  # the server's own
            await wire.next(PingFrame)
            before = leave.last_taken
            wire.send(PingFrame(0, b"farewell", flags=["ACK"]))
            return before, [type(frame) for frame in await wire.all()]

    assert run(main()) == (None, [GoAwayFrame])


def test_the_last_call_is_told_once(run, http2, monkeypatch):
    monkeypatch.setattr(graceful_close, "STEP_S", 60)

    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/hang"))
            await wire.next(SettingsFrame)
            await taken_leave(wire, served)
            (connection,) = served.listener.connections
            connection.closing.take_no_more()  # the timer, which is seconds away
            served.calls[0].stream.end()
            return [frame for frame in await wire.all() if type(frame) is GoAwayFrame]

    assert run(main()) == []


@pytest.mark.parametrize("goodbye", [b"", GoAwayFrame(0, 0)], ids=["", "and says goodbye"])
def test_a_client_that_breaks_the_protocol_in_a_drain_is_closed_and_may_send_again_what_was_refused(
    run, http2, monkeypatch, goodbye
):
    monkeypatch.setattr(graceful_close, "STEP_S", 60)

    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.headers("/hang"))
            await wire.next(SettingsFrame)
            await taken_leave(wire, served)
            wire.send(wire.headers("/echo", 3, last=True), goodbye, b"\0\0\0\3\0\0\0\0\1")
            return [frame.last_stream_id for frame in await wire.all() if type(frame) is GoAwayFrame]

    assert run(main()) == [1]
