"""Waiting for the last connection, and room for a new one."""

import asyncio

import pytest
from hyperframe.frame import GoAwayFrame, PingFrame, RstStreamFrame

from torchere.serving.frontend.budgets import CONNECTIONS, Budgets
from torchere.serving.frontend.connection_limit import ConnectionLimit
from torchere.serving.frontend.http2.listener import Listener


def no_call(stream):
    raise AssertionError("no call is opened")


def listener(*connections):
    return Listener(no_call, 1, 1, connections=set(connections))


def test_without_connections_there_is_nothing_to_wait_for():
    async def main():
        await listener().all_closed(10)
        return "done"

    assert asyncio.run(main()) == "done"


def test_the_last_connection_ends_the_waiting():
    async def main():
        shared = listener("a", "b")
        waiting = asyncio.ensure_future(shared.all_closed(10))
        await asyncio.sleep(0)
        shared.lost("a")
        after_one = shared._all_closed.done()
        shared.lost("b")
        await waiting
        return after_one

    assert asyncio.run(main()) is False


def test_it_waits_no_longer_than_it_is_told():
    async def main():
        shared = listener("a")
        await shared.all_closed(0.01)
        return shared.connections

    assert asyncio.run(main()) == {"a"}


@pytest.mark.parametrize("calls", [1, 129, 1000])
def test_a_new_connection_closes_the_longest_idle_one_even_if_it_watches_health(run, http2, calls):
    async def main():
        limit = ConnectionLimit(2, Budgets())
        async with (
            http2.listener(connection_limit=limit) as served,
            http2.wire(served) as watching,
            http2.wire(served) as busy,
        ):
            for wire, count in ((watching, calls), (busy, 1)):
                wire.greet(wire.calls("/hang", count, flags=5), PingFrame(0, bytes(8)))
                await wire.next(PingFrame)
            for call in served.calls[:calls]:
                call.stream.restrict(10)
            async with http2.wire(served) as third:
                third.greet(PingFrame(0, bytes(8)))
                goaway = await watching.next(GoAwayFrame)
                await third.next(PingFrame)
                return goaway.error_code, limit._budgets.refused[CONNECTIONS]

    assert run(main()) == (0, 1)


def test_calls_of_health_that_have_ended_hide_no_others(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            (connection,) = served.listener.connections
            found = [connection.idle_since_s() is None]
            wire.send(wire.calls("/hang", 3, flags=5), PingFrame(0, bytes(8)))
            await wire.next(PingFrame)
            health, reset, _ = (call.stream for call in served.calls)
            for stream in (health, reset):
                stream.restrict(10)
            health.end()
            wire.send(RstStreamFrame(reset.id), PingFrame(0, bytes(8)))
            await wire.next(PingFrame)
            found.append(connection.idle_since_s() is None)
            served.calls[2].stream.end()
            return [*found, connection.idle_since_s() is None]

    assert run(main()) == [False, True, False]


def test_refusals_that_wait_for_a_client_that_does_not_read_keep_no_place(run, http2):
    async def main():
        async with http2.greeted() as (served, wire):
            wire.send(wire.calls("/hang", 2, flags=5), PingFrame(0, bytes(8)))
            await wire.next(PingFrame)
            (connection,) = served.listener.connections
            connection.pause_writing()
            for call in served.calls:
                call.stream.refuse(7, "no")
            waiting = len(connection._streams), connection.idle_since_s() is None
            connection.resume_writing()
            return waiting, len(connection._streams), connection.inbound.key_free_streams

    assert run(main()) == ((2, False), 0, 0)
