"""How many connections a listener takes, and which are closed for a new one."""

import asyncio
import time

import pytest

from torchere.serving.frontend import connection_limit as module
from torchere.serving.frontend.budgets import CONNECTIONS, Budgets
from torchere.serving.frontend.connection_limit import ConnectionLimit, connection_limit
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.server import listener_of


@pytest.mark.parametrize("files", [module.MIN_FILES, 256, 1024, 4096, 65_536, 2**20])
def test_all_listeners_together_leave_descriptors_to_workers_and_files(files):
    control = connection_limit(files, serves_inference=False)
    connections = 2 * connection_limit(files) + 3 * control
    assert connections + 3 * module.listening_descriptors(files) <= files - max(files // 4, 48)
    assert control >= 16


@pytest.mark.parametrize(("files", "descriptors"), [(16, 1), (150, 4), (1024, 32), (2**20, 32)])
def test_a_listening_socket_takes_few_descriptors_where_there_are_few(files, descriptors):
    assert module.listening_descriptors(files) == descriptors


def test_a_configured_limit_counts_as_far_as_descriptors_allow():
    assert connection_limit(1024, 100) == 100
    assert connection_limit(1024, 10_000) == connection_limit(1024)
    assert connection_limit(2**20, 100_000) == 100_000


class Idle:
    """A connection that is idle since a given time; None: it is busy."""

    def __init__(self, since_s):
        self.since_s = since_s
        self.closed = False

    def idle_since_s(self):
        return self.since_s

    def close_idle(self):
        self.closed = True


def test_the_connection_that_is_idle_for_longest_makes_room():
    budgets = Budgets()
    limit = ConnectionLimit(3, budgets)
    busy, oldest, newer = Idle(None), Idle(1.0), Idle(2.0)
    others = {busy, oldest, newer}
    assert limit.admits(others)
    assert (others, oldest.closed, newer.closed) == ({busy, newer}, True, False)
    assert budgets.refused[CONNECTIONS] == 1
    assert limit.admits(others)
    assert budgets.refused[CONNECTIONS] == 1


def test_a_new_connection_is_refused_while_all_others_are_busy_and_they_are_searched_seldom(monkeypatch):
    looks, now = [], [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budgets = Budgets()
    limit = ConnectionLimit(1, budgets)
    others = {Idle(None)}
    monkeypatch.setattr(Idle, "idle_since_s", lambda self: looks.append(1))
    assert [limit.admits(others) for _ in range(3)] == [False] * 3
    assert len(looks) == 1
    now[0] += module.SEARCH_INTERVAL_S
    assert not limit.admits(others)
    assert (len(looks), budgets.refused[CONNECTIONS]) == (2, 4)


async def closed(reader):
    """Read to the end of a connection that the server closes."""
    return await asyncio.wait_for(reader.read(), 20)


def test_rest_closes_the_longest_idle_connection_for_a_new_one(planes):
    async def main():
        async with planes.serving() as server:
            server.listener.connection_limit.limit = 2
            address = server.address
            opened = [await asyncio.open_connection(address.host, address.port) for _ in range(2)]
            reader, writer = opened[1]
            answers = []
            for _ in range(2):
                writer.write(b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\n\r\n")
                answers.append(await reader.readuntil(b"\r\n\r\n"))
            third = await asyncio.open_connection(address.host, address.port)
            assert await closed(opened[0][0]) == b""
            third[1].write(b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answers.append(await closed(third[0]))
            for _, each in (*opened, third):
                each.close()
            return [answer[:15] for answer in answers]

    assert asyncio.run(main()) == [b"HTTP/1.1 200 OK"] * 3


def test_rest_closes_a_connection_for_a_new_one_however_long_it_may_be_idle(planes):
    ask = b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\n\r\n"

    async def main():
        async with planes.connected(keep_alive_s=86_400) as (server, reader, writer):
            server.listener.connection_limit.limit = 1
            writer.write(ask)
            await reader.readuntil(b"\r\n\r\n")
            later = await asyncio.open_connection(server.address.host, server.address.port)
            await closed(reader)
            later[1].write(ask)
            assert (await later[0].readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
            later[1].close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "text",
    [
        b"nonsense\r\n\r\n",
        b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n",
    ],
    ids=["a malformed head", "a body that is too long", "a body after the answer"],
)
def test_rest_closes_a_connection_whose_bytes_it_drops_for_a_new_one(planes, text):
    async def main():
        async with planes.serving() as server:
            server.listener.connection_limit.limit = 1
            address = server.address
            answered, dropped = await asyncio.open_connection(address.host, address.port)
            dropped.write(text)
            assert (await answered.readline()).startswith(b"HTTP/1.1 ")
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await closed(reader)
            for each in (dropped, writer):
                each.close()
            return answer[:15]

    assert asyncio.run(asyncio.wait_for(main(), 20)) == b"HTTP/1.1 200 OK"


def test_a_connection_with_a_request_or_pipelined_bytes_is_not_idle(planes):
    async def main():
        listener = listener_of(frozenset({"inference"}), planes.data, planes.control, planes.services())
        connection = Connection(listener)
        before = connection.idle_since_s()
        connection._ahead = bytearray(b"x")
        return before, connection.idle_since_s()

    before, ahead = asyncio.run(main())
    assert before <= time.monotonic()
    assert ahead is None
