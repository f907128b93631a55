"""Bytes of bodies over REST: refused where too many are held, and counted until their request is over."""

import asyncio
import gzip
import json
import socket
import threading
from dataclasses import replace
from functools import partial

import pytest

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.frontend.budgets import CONNECTION, Budgets
from torchere.serving.frontend.open_inference.json_request import parse_request
from torchere.serving.frontend.rest import tensors
from torchere.serving.types import InferResponse

LARGE = 300_000
PREDICT = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n%b\r\n"
INFER = (
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
)

LOAD = b"POST /v2/repository/models/x/load HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def sized(size: int) -> bytes:
    return PREDICT % (b"Content-Length: %d\r\n" % size)


def connected(planes, budgets, **settings):
    return planes.connected(max_request_bytes=2 * LARGE, budgets=budgets, **settings)


def refused_for_budget(planes) -> list[str]:
    lines = planes.metrics.exposition(["torchere_requests_rejected_total"]).splitlines()
    return [line for line in lines if 'reason="budget"' in line and line.endswith(" 1.0")]


async def until(is_so) -> None:
    while not is_so():
        await asyncio.sleep(0)


UPLOADS = {
    "with its head": (sized(10_000), bytes(10_000)),
    "large": (sized(LARGE), bytes(LARGE)),
    "in chunks": (
        PREDICT % b"Transfer-Encoding: chunked\r\n",
        b"%x\r\n%b\r\n0\r\n\r\n" % (LARGE, bytes(LARGE)),
    ),
    "compressed": (INFER % len(gzip.compress(bytes(LARGE))), gzip.compress(bytes(LARGE))),
}


@pytest.mark.parametrize("upload", UPLOADS.values(), ids=UPLOADS)
def test_a_body_beyond_the_budget_is_answered_with_503(planes, upload):
    budgets = Budgets(20_000)

    async def main():
        async with connected(planes, budgets) as (_, reader, writer):
            writer.write(b"".join(upload))
            return await asyncio.wait_for(reader.readuntil(b"}"), 20)

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"more than 5000 bytes" in body
    assert +budgets.refused == {CONNECTION: 1}
    assert budgets.held_bytes == 0
    assert not planes.data.asked


def test_a_body_of_the_app_beyond_the_budget_is_answered_with_503(planes):
    budgets, size = Budgets(100_000), 6_000_000

    def upload(address) -> bytes:
        with socket.create_connection((address.host, address.port), 20) as client:
            client.sendall(LOAD % size + bytes(size))
            return b"".join(iter(partial(client.recv, 65_536), b""))

    async def main():
        async with planes.serving(surface="management", budgets=budgets) as server:
            return await asyncio.to_thread(upload, server.address)

    assert asyncio.run(main()).startswith(b"HTTP/1.1 503 ")
    assert (budgets.held_bytes, budgets.refused[CONNECTION]) == (0, 1)
    assert refused_for_budget(planes)


@pytest.mark.parametrize(
    "upload",
    [
        LOAD % 10_000 + bytes(10_000),
        LOAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
        + b"%x\r\n%b\r\n0\r\n\r\n" % (10_000, bytes(10_000)),
    ],
    ids=["sized", "in chunks"],
)
def test_the_app_is_told_that_the_last_bytes_of_a_body_were_refused(planes, upload):
    async def main():
        async with connected(planes, Budgets(20_000), surface="management") as (server, reader, writer):
            writer.write(upload)
            answer = await asyncio.wait_for(reader.read(), 20)
            await asyncio.wait_for(until(lambda: not server.listener.tasks), 20)
            return answer

    assert asyncio.run(main()).startswith(b"HTTP/1.1 503 ")
    answered = planes.metrics.exposition(["Requests5XX"]).splitlines()
    assert [line.split()[-1] for line in answered if not line.startswith("#")] == ["1.0"]


def test_a_body_counts_until_it_is_answered(planes, held):
    budgets = Budgets()
    planes.data.behave = held

    async def main():
        async with connected(planes, budgets) as (_, reader, writer):
            found = []
            for size in (100, LARGE):
                held.go_on.clear()
                held.arrived.clear()
                writer.write(sized(size) + bytes(size))
                await held.arrived.wait()
                found.append(budgets.held_bytes)
                held.go_on.set()
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                await reader.readexactly(size)
                found.append(budgets.held_bytes)
            return found

    assert asyncio.run(main()) == [100, 0, LARGE, 0]


def test_nothing_is_held_after_a_storm_of_answers_refusals_and_clients_that_leave(planes):
    budgets = Budgets(4 * LARGE)

    async def echo(request):
        await asyncio.sleep(0)
        return InferResponse(b"ok")

    planes.data.behave = echo

    async def client(server, number):
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        head, body = list(UPLOADS.values())[number % 4]
        writer.write(head + (body if number % 3 else body[: len(body) // 2]))
        if number % 3:
            await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
        writer.transport.abort()

    async def main():
        async with planes.serving(max_request_bytes=2 * LARGE, budgets=budgets) as server:
            await asyncio.gather(*(client(server, number) for number in range(60)))
            await until(lambda: not server.listener.connections)
            await asyncio.wait_for(until(lambda: not budgets.held_bytes), 20)

    asyncio.run(main())
    assert (budgets.held_bytes, budgets.key_free_bytes) == (0, 0)


@pytest.mark.parametrize("upload", UPLOADS.values(), ids=UPLOADS)
def test_the_refusal_is_counted_once_by_its_reason(planes, upload):
    async def main():
        async with connected(planes, Budgets(20_000)) as (_, reader, writer):
            writer.write(b"".join(upload))
            answer = await asyncio.wait_for(reader.readuntil(b"}"), 20)
            return json.loads(answer.partition(b"\r\n\r\n")[2])

    assert asyncio.run(main())["type"] == "ServiceUnavailableException"
    assert refused_for_budget(planes)


ONES = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP64", "shape": [40_000], "data": [1] * 40_000}]}
).encode()


def takes_tensors(planes) -> None:
    x, y = (TensorSpec(name, "FP64", (-1,)) for name in "xy")
    planes.data.known = replace(planes.data.known, signature=Signature((x,), (y,)))


def test_bodies_of_json_are_parsed_one_at_a_time_and_counted_while_they_wait(planes, monkeypatch):
    takes_tensors(planes)
    began, go_on = [], threading.Event()
    budgets = Budgets()
    body = gzip.compress(ONES)

    def waiting(*args):
        began.append(args)
        assert go_on.wait(20)
        return parse_request(*args)

    monkeypatch.setattr(tensors, "parse_request", waiting)

    async def main():
        async with planes.serving(max_request_bytes=2 * LARGE, budgets=budgets) as server:
            address = server.address
            clients = [await asyncio.open_connection(address.host, address.port) for _ in range(8)]
            for _, writer in clients:
                writer.write(INFER % len(body) + body)
            await asyncio.wait_for(until(lambda: budgets.held_bytes == 8 * (len(ONES) + len(body))), 20)
            await asyncio.wait_for(until(lambda: began), 20)
            at_once = len(began)
            go_on.set()
            for reader, writer in clients:
                assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")
                writer.transport.abort()
            return at_once

    assert asyncio.run(main()) == 1
    assert len(began) == 8


def test_tensors_that_are_longer_than_their_json_are_counted(planes, held):
    takes_tensors(planes)
    budgets = Budgets()
    planes.data.behave = held

    async def main():
        async with connected(planes, budgets) as (_, reader, writer):
            writer.write(INFER.replace(b"gzip", b"identity") % len(ONES) + ONES)
            await asyncio.wait_for(held.arrived.wait(), 20)
            found = budgets.held_bytes
            held.go_on.set()
            await reader.readuntil(b"\r\n\r\n")
            return found

    assert asyncio.run(main()) == 8 * 40_000
    assert budgets.held_bytes == 0


def test_a_compressed_body_for_an_unknown_model_is_not_inflated(planes, monkeypatch):
    inflated = []
    monkeypatch.setattr(tensors, "inflate", lambda *args: inflated.append(args))

    async def main():
        async with connected(planes, Budgets()) as (_, reader, writer):
            writer.write((INFER % 2000).replace(b"/echo/", b"/none/") + bytes(2000))
            return await asyncio.wait_for(reader.read(), 20)

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert json.loads(body) == {"error": "Model not found: none", "type": "ModelNotFoundException"}
    assert not inflated
