"""Waiting for the last connection."""

import asyncio

from torchere.serving.frontend.http2.connection import Listener


def listener(*connections):
    return Listener(lambda stream: None, 1, 1, connections=set(connections))


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
