"""Large bodies of the Open Inference Protocol on real connections, which read them into one buffer."""

import asyncio
import contextlib
import json
import weakref
from dataclasses import replace

import pytest
import uvloop

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.frontend.rest.listener import READ_BYTES
from torchere.serving.frontend.rest.predictions import Prediction
from torchere.serving.types import InferResponse

SIZE = 600_000
RAW = bytes(range(250)) * (SIZE // 250)
HEAD = json.dumps(
    {
        "inputs": [
            {"name": "x", "shape": [SIZE], "datatype": "UINT8", "parameters": {"binary_data_size": SIZE}}
        ]
    }
).encode()


def message(extra: bytes = b"", path: bytes = b"/v2/models/echo/infer") -> bytes:
    body = HEAD + RAW
    return (
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nInference-Header-Content-Length: %d\r\n%b\r\n"
        % (path, len(body), len(HEAD), extra)
    ) + body


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine; connections change protocols for large bodies, which each loop does its own way."""
    return request.param


@contextlib.asynccontextmanager
async def served(planes):
    planes.data.known = replace(
        planes.data.known,
        signature=Signature((TensorSpec("x", "UINT8", (-1,)),), (TensorSpec("y", "UINT8", (-1,)),)),
    )

    async def echo(request):
        return InferResponse(bytes(request.parameters[0].value))

    planes.data.behave = echo
    async with planes.connected(max_request_bytes=2 * SIZE) as (server, reader, writer):
        yield reader, writer, server.address


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    return head.partition(b"\r\n")[0], await reader.readexactly(length)


@pytest.mark.parametrize("piece", [SIZE * 2, 70_001])
def test_a_large_tensor_comes_through_in_pieces_of_any_size(run, planes, piece):
    async def main():
        async with served(planes) as (reader, writer, _):
            whole = message() * 2
            for start in range(0, len(whole), piece):
                writer.write(whole[start : start + piece])
                await writer.drain()
            return [await answer(reader), await answer(reader)]

    assert run(main()) == [(b"HTTP/1.1 200 OK", RAW)] * 2


def test_the_kernel_writes_a_body_to_where_it_is_read(run, planes, monkeypatch):
    by_kernel = []

    def noting(prediction, size):
        by_kernel.append(size)
        filled(prediction, size)

    filled = Prediction.filled
    monkeypatch.setattr(Prediction, "filled", noting)

    async def main():
        async with served(planes) as (reader, writer, _):
            writer.write(message())
            return await answer(reader)

    assert run(main()) == (b"HTTP/1.1 200 OK", RAW)
    assert sum(by_kernel) > SIZE - READ_BYTES  # the rest came with the head


def test_a_body_is_freed_with_its_answer_while_the_connection_stays(run, planes):
    async def main():
        async with served(planes) as (reader, writer, _):
            writer.write(message())
            await answer(reader)
            memory = weakref.ref(planes.data.asked.pop()[2].parameters[0].value.obj)
            for _ in range(100):  # the fake's task ends a turn later
                if memory() is None:
                    break
                await asyncio.sleep(0.01)
            return memory()

    assert run(main()) is None


@pytest.mark.parametrize("extra", [b"Expect: 100-continue\r\n", b"Connection: close\r\n"])
def test_what_is_asked_for_beside_changes_nothing_about_the_body(run, planes, extra):
    async def main():
        async with served(planes) as (reader, writer, _):
            writer.write(message(extra))
            if b"100" in extra:
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            return await answer(reader)

    assert run(main()) == (b"HTTP/1.1 200 OK", RAW)


def test_a_client_that_leaves_in_the_middle_of_its_body_disturbs_nobody(run, planes):
    async def main():
        async with served(planes) as (reader, writer, address):
            _, leaving = await asyncio.open_connection(address.host, address.port)
            leaving.write(message()[: SIZE // 2])
            await leaving.drain()
            leaving.close()
            writer.write(message())
            return await answer(reader)

    assert run(main()) == (b"HTTP/1.1 200 OK", RAW)
    assert len(planes.data.asked) == 1
