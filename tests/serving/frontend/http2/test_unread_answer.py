"""A client that gives no leave for its answers, or reads none, loses the connection; a slow one does not."""

import asyncio
import contextlib
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import pytest
from h2.settings import SettingCodes
from hyperframe.frame import HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.http2 import connection, flow_control
from torchere.serving.frontend.http2.frames import ErrorCode
from torchere.serving.frontend.http2.header_blocks import request_head
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.frontend.http2.messages import MessageFailed, StatusCode
from torchere.serving.io import watchdog as unread

TIMEOUT_S = 0.2
WINDOW = SettingCodes.INITIAL_WINDOW_SIZE


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", TIMEOUT_S)


def test_a_call_whose_window_stays_shut_is_given_up_and_the_others_go_on(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: 100}, eats=False) as peer:
            stalled = peer.answers[peer.begin("/twice", bytes(90))]
            while not stalled.over:
                assert (await peer.call("/echo", b"small")).messages == [b"small"]
            return stalled, await peer.call("/echo", b"again")

    stalled, after = run(main())
    assert stalled.reset == ErrorCode.CANCEL
    assert after.messages == [b"again"]


def test_a_client_that_gives_no_leave_at_all_loses_the_connection(run, http2):
    async def main():
        async with (
            http2.listener() as served,
            http2.peer(served, settings={WINDOW: 2**20}, eats=False) as peer,
        ):
            peer.begin("/flow")
            await peer.until_closed()

    run(main())


def test_a_client_that_reads_nothing_loses_the_connection(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.writer.transport.pause_reading()
            wide = 2**31 - 2**16
            wire.greet(
                SettingsFrame(0, settings={WINDOW: 2**31 - 1}),
                WindowUpdateFrame(0, window_increment=wide),
                wire.calls("/flow", 40, flags=5),
            )
            while not served.calls:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(served.calls[-1].over.wait(), 10)
            await asyncio.wait_for(lost(served), 10)

    run(main())


def test_refusals_wait_while_the_socket_takes_nothing_and_come_in_their_order(run, http2, monkeypatch):
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 30.0)  # the socket takes nothing for as long as this test

    async def main():
        async with http2.greeted() as (served, wire):
            (connection,) = served.listener.connections
            connection.pause_writing()
            wire.send(wire.calls("/refuse", 1001, flags=5), PingFrame(0, bytes(8)))
            refused = await wire.next(RstStreamFrame)
            await wire.next(PingFrame)
            wire.send(RstStreamFrame(3), PingFrame(0, bytes(8)))  # the client gives one up
            behind = type(await wire.frame())
            connection.resume_writing()
            answered = [(await wire.next(HeadersFrame)).stream_id for _ in range(999)]
            wire.send(PingFrame(0, bytes(8)))
            return refused.stream_id, refused.error_code, behind, answered, type(await wire.frame())

    assert run(main()) == (
        *(2001, ErrorCode.REFUSED_STREAM, PingFrame),
        *([1, *range(5, 2001, 2)], PingFrame),
    )


def test_a_client_that_reads_no_refusals_holds_little_memory(run, http2):
    async def main():
        held, first = [], 1
        async with http2.greeted() as (served, wire):
            await wire.next(SettingsFrame)
            wire.writer.transport.pause_reading()
            (connection,) = served.listener.connections
            connection._transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 10_000)
            with contextlib.suppress(ConnectionError):
                while served.listener.connections:
                    wire.send(wire.calls("/refuse", 1000, first=first, flags=5))
                    first += 2000
                    await asyncio.wait_for(wire.writer.drain(), 10)
                    held.append(connection._transport.get_write_buffer_size())
            return max(held)

    assert run(main()) < 300_000


async def lost(served):
    while served.listener.connections:
        await asyncio.sleep(0.01)


def test_a_client_that_gives_leave_bit_by_bit_gets_all(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: 0}, eats=False) as peer:
            stream_id = peer.begin("/twice", bytes(90))
            for _ in range(20):
                await asyncio.sleep(TIMEOUT_S / 4)
                peer.h2.increment_flow_control_window(10, stream_id)
                peer.flush()
            return await peer.answered(stream_id)

    assert run(main()).messages == [bytes(90)] * 2


def test_a_client_that_leaves_leaves_no_timer(run, http2):
    async def main():
        async with http2.listener(age_s=60.0) as served:
            async with http2.peer(served, settings={WINDOW: 0}) as peer:
                peer.begin("/echo", b"message")
                peer.begin("/echo", end=False)
                await peer.round_trip()
                (connection,) = served.listener.connections
            await lost(served)
            timers = [connection._unread._timer, connection._incomplete._timer, *connection._timers]
            return [timer.cancelled() for timer in timers]

    assert run(main()) == [True] * 4


def test_an_idle_connection_stays(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: 0}) as peer:
            stream_id = peer.begin("/echo", b"message")
            peer.h2.update_settings({WINDOW: 100})
            peer.flush()
            await peer.answered(stream_id)
            await asyncio.sleep(3 * TIMEOUT_S)
            return await peer.call("/echo", b"again")

    assert run(main()).messages == [b"again"]


def test_all_calls_whose_windows_stay_shut_are_given_up_together(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: 0}, eats=False) as peer:
            loop = asyncio.get_running_loop()
            stalled = [peer.begin("/echo", bytes(90)) for _ in range(60)]
            began_s = loop.time()
            resets = [(await peer.answered(stream_id)).reset for stream_id in stalled]
            return resets, loop.time() - began_s

    resets, took_s = run(main())
    assert resets == [ErrorCode.CANCEL] * 60
    assert took_s < 10 * TIMEOUT_S


def test_leave_for_one_call_does_not_keep_the_others(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: 0}, eats=False) as peer:
            read, stalled = peer.begin("/echo", bytes(90)), peer.begin("/echo", bytes(90))
            while not peer.answers[stalled].over:
                await asyncio.sleep(TIMEOUT_S / 4)
                peer.h2.increment_flow_control_window(1, read)
                await peer.round_trip()
            so_far = bytes(peer.answers[read].data)
            peer.h2.increment_flow_control_window(100, read)
            peer.flush()
            return peer.answers[stalled].reset, len(so_far), await peer.answered(read)

    reset, so_far, answer = run(main())
    assert reset == ErrorCode.CANCEL
    assert 0 < so_far < 90
    assert answer.messages == [bytes(90)]


@pytest.mark.parametrize("way_out", ["takes them", "gives them up"])
def test_who_takes_none_of_many_answers_gets_no_more_until_that_ends(run, http2, monkeypatch, way_out):
    monkeypatch.setattr(connection, "MAX_HELD_BYTES", 150)
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 60)

    async def main():
        async with (
            http2.listener(limit_bytes=90 // 4) as served,
            http2.peer(served, settings={WINDOW: 0}, eats=False) as peer,
        ):
            ids = [peer.begin("/echo", bytes(20)) for _ in range(9)]  # 25 bytes each
            await peer.round_trip()
            for stream_id in ids:
                if way_out == "takes them":
                    peer.h2.increment_flow_control_window(100, stream_id)
                else:
                    peer.h2.reset_stream(stream_id)
            peer.begin("/echo", bytes(20))
            await peer.round_trip()
            return [call.stream.head.flaw_code == StatusCode.RESOURCE_EXHAUSTED for call in served.calls]

    assert run(main()) == [*[False] * 7, True, True, False]


def test_answers_that_wait_have_a_limit_over_all_connections(run, http2, monkeypatch):
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 60)

    async def main():
        async with (
            http2.listener(limit_bytes=90 // 4) as served,
            http2.peer(served, settings={WINDOW: 0}, eats=False) as first,
            http2.peer(served, settings={WINDOW: 0}, eats=False) as second,
        ):
            budgets = served.listener.budgets
            budgets.limit_bytes = 150
            for peer in (first, first, first, second, second, second, second, first):  # 25 bytes each
                peer.begin("/echo", bytes(20))
                await peer.round_trip()
            refused = [call.stream.head.flaw_code == StatusCode.RESOURCE_EXHAUSTED for call in served.calls]
            held = budgets.unsent_bytes
            for each in list(served.listener.connections):
                each.abort()
            while served.listener.connections:
                await asyncio.sleep(0)
            return refused, held, budgets.unsent_bytes

    refused, held, left = run(main())
    assert refused == [*[False] * 7, True]
    assert held == 8 * 25  # the service of this test answers calls with a flaw, too
    assert left == 0


def test_an_answer_beyond_what_all_connections_may_hold_fails_its_call():
    unused: Any = None
    budgets = Budgets(2**20)
    flow = flow_control.OutboundFlow(2**17, unused, unused, unused, unused, budgets=budgets)
    budgets.unsent_bytes = 2**20 + 1  # of other connections
    flow.check(2**17)  # the first one of this connection
    flow.queue(flow_control.StreamFlow(1, 0), [bytes(10)], 10)
    flow.check(1000)
    with pytest.raises(MessageFailed, match="have not taken") as failed:
        flow.check(2**17)
    assert failed.value.code is StatusCode.RESOURCE_EXHAUSTED
    budgets.unsent_bytes = 2**20
    flow.check(2**17)


def test_where_answers_may_be_long_four_of_them_may_wait(run, http2):
    async def main():
        unused: Any = None
        made = connection.Connection(Listener(unused, 1, 2**28))
        request, found = request_head(http2.head_of("/echo")), []
        for size in (2**30, 2**30 + 1):
            made.outbound.held_bytes = size
            found.append(made._unaffordable(request)[0].flaw != "")
        return found

    assert run(main()) == [False, True]
