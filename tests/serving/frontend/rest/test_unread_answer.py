"""A client that stops reading its answer loses the connection; one that reads slowly gets it whole."""

import asyncio
import contextlib
import socket
import time

import pytest

from torchere.serving.frontend import budgets as budget_module
from torchere.serving.io import watchdog as unread
from torchere.serving.types import InferResponse

TIMEOUT_S = 0.3
ANSWER = bytes(8 * 2**20)
REQUESTS = {
    "a length": b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    "a version of HTTP/1.0": b"GET /predictions/echo HTTP/1.0\r\nHost: x\r\n\r\n",
}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", TIMEOUT_S)


@contextlib.asynccontextmanager
async def asked(planes, request, **settings):
    """A connection with little room, on which the request for a long answer is out."""

    async def long_answer(_):
        return InferResponse(ANSWER)

    planes.data.behave = long_answer
    loop = asyncio.get_running_loop()
    async with planes.serving(**settings) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
            client.setblocking(False)
            await loop.sock_connect(client, (server.address.host, server.address.port))
            await loop.sock_sendall(client, request)
            yield client


async def read_all(client, *, every_s=0.0):
    """What comes until the answer is whole or the connection ends."""
    loop, taken = asyncio.get_running_loop(), 0
    while taken < len(ANSWER):
        data = await asyncio.wait_for(loop.sock_recv(client, 2**20), 20)
        if not data:
            break
        taken += len(data)
        await asyncio.sleep(every_s)
    return taken


@pytest.mark.parametrize("others_bytes", [0, 2 * len(ANSWER)])
def test_answers_that_clients_leave_have_a_limit_over_all_connections(planes, monkeypatch, others_bytes):
    monkeypatch.setattr(budget_module, "MIN_MESSAGES", 0)
    budgets = budget_module.Budgets(2 * len(ANSWER))

    async def main():
        budgets.unsent_bytes = others_bytes
        async with asked(planes, REQUESTS["a length"], budgets=budgets) as client:
            while budgets.unsent_bytes == others_bytes and not budgets.refused["unsent"]:
                await asyncio.sleep(0.001)
            with contextlib.suppress(ConnectionResetError):
                return await read_all(client)

    taken = asyncio.run(main())
    assert (taken is None or taken < len(ANSWER)) == bool(others_bytes)
    assert (budgets.unsent_bytes, budgets.refused["unsent"]) == (others_bytes, bool(others_bytes))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("request_text", REQUESTS.values(), ids=REQUESTS)
def test_a_client_that_takes_nothing_loses_the_connection(planes, request_text):
    async def main():
        async with asked(planes, request_text) as client:
            await asyncio.sleep(4 * TIMEOUT_S)
            assert await read_all(client) < len(ANSWER)  # what the kernel had taken

    asyncio.run(main())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("request_text", REQUESTS.values(), ids=REQUESTS)
def test_a_client_that_reads_slowly_gets_all(planes, request_text):
    async def main():
        async with asked(planes, request_text) as client:
            began_s = time.monotonic()
            assert await read_all(client, every_s=TIMEOUT_S / 30) >= len(ANSWER)
            return time.monotonic() - began_s

    assert asyncio.run(main()) > 3 * TIMEOUT_S
