"""Processor time of the door for one unary call, by how its deadline is written: no sockets, no worker.

A connection is fed the bytes of real calls, four in each read, and a data plane answers behind each read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from hpack import Encoder

from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.errors import INFERENCE
from torchere.serving.frontend.grpc.inference import InferenceService
from torchere.serving.frontend.grpc.protos import inference_pb2
from torchere.serving.frontend.grpc.service import dispatcher, service
from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.connection import Connection
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import InferResponse

CALLS, PER_READ, WARM_UP = 8000, 4, 400
LIMIT_BYTES = 2**20
_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceAPIsService"]
DEADLINES = {
    "no deadline": lambda number: "",
    "equal deadlines": lambda number: "5S",
    "a different deadline in each call": lambda number: f"{1000 + number}m",
}


class _Transport:
    """Drops what is written."""

    def __init__(self) -> None:
        self.written_bytes = 0

    def write(self, data: bytes) -> None:
        self.written_bytes += len(data)

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False


class _Plane:
    """Takes requests, and answers all of them when told to."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Any]] = []

    def admit(self, model: str, version: str | None, request: Any, reply: Any, **options: Any) -> Any:
        self._waiting.append((request, reply))
        return SimpleNamespace(withdraw=lambda: None)

    def answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request, reply in waiting:
            reply(InferResponse(request.parameters[0].value))


def _calls(deadline: Any) -> Iterator[bytes]:
    """The bytes of calls, one after the other."""
    encoder = Encoder()
    message = inference_pb2.PredictionsRequest(model_name="m", input={"data": bytes(200)}).SerializeToString()
    body = b"\0" + len(message).to_bytes(4, "big") + message
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{_SERVICE.full_name}/Predictions"),
        (":authority", "here:7070"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-c++/1.80"),
    ]
    for number in range(CALLS + WARM_UP):
        timeout = deadline(number)
        block = encoder.encode([*headers, ("grpc-timeout", timeout)] if timeout else headers)
        stream_id = 2 * number + 1
        yield f.frame(f.HEADERS, f.END_HEADERS, stream_id, block) + f.frame(
            f.DATA, f.END_STREAM, stream_id, body
        )


async def _measured_us(deadline: Any) -> float:
    plane, metrics = _Plane(), Metrics()
    methods = InferenceService(cast("DataPlane", plane), metrics).methods()
    openers = service(_SERVICE, methods, INFERENCE)(set())
    listener = Listener(dispatcher(openers, None, "inference", metrics), LIMIT_BYTES, LIMIT_BYTES)
    connection, transport = Connection(listener), _Transport()
    connection.connection_made(cast("asyncio.Transport", transport))
    calls = list(_calls(deadline))
    reads = [b"".join(calls[at : at + PER_READ]) for at in range(0, len(calls), PER_READ)]
    reads[0] = f.PREFACE + f.settings_frame({}) + f.window_update(0, 2**30) + reads[0]
    used_ns = 0
    for number, read in enumerate(reads):
        connection.get_buffer(-1)[: len(read)] = read
        began_ns = time.process_time_ns()
        connection.buffer_updated(len(read))
        plane.answer()
        await asyncio.sleep(0)
        if number * PER_READ >= WARM_UP:
            used_ns += time.process_time_ns() - began_ns
    connection.connection_lost(None)
    assert transport.written_bytes > 200 * CALLS
    return used_ns / 1000 / CALLS


def cost_us(rounds: int) -> dict[str, float]:
    """Return microseconds of the processor for one call of `Predictions`, the least of some rounds."""
    return {
        name: min(asyncio.run(_measured_us(kind)) for _ in range(rounds)) for name, kind in DEADLINES.items()
    }
