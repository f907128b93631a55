"""Processor time of the doors, REST and gRPC, for one request: without a socket, without a model.

    python benchmarks/doors.py [--rounds 7] [--profile CASE]

Bytes go into one connection, and a data plane answers at once; what is measured is the processor time of the
thread, so the kernel's share and the model's are left out. The best of the rounds counts, as neighbours only
add. Calls over gRPC come four in a read.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import uvloop
from harness.grpc_probe import MODEL_INFER, row_message
from harness.models import FEATURES, raw_row
from hpack import Encoder

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.tensors.answer import FRAME
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.grpc.server import inference_server
from torchere.serving.frontend.http2.connection import Connection as Http2Connection
from torchere.serving.frontend.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from torchere.serving.frontend.http2.header_blocks import OK_BLOCK
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.frontend.services import Services
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import InferResponse, ModelKey

FLOATS = json.dumps([0.123456789] * 64).encode()
ANSWER = InferResponse(FLOATS, (("content-type", "application/json"),))
HEAD = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: python-requests/2.32\r\n"
    b"Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n%b"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
READS = 3000  # in a round
REQUESTS_A_ROUND = {"tensor of 600 KB": 100}


def framed() -> InferResponse:
    """A worker's answer of 64 float32."""
    output = {"name": "y", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": 256}}
    head = json.dumps({"model_name": "echo", "model_version": "1.0", "outputs": [output]}).encode()
    return InferResponse(FRAME.pack(len(head)) + head + raw_row(64))


FRAMED = framed()


class Plane:
    """A data plane with one model, whose numbers it leaves out."""

    signature = Signature((TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),))
    known = ModelFacts(
        ModelKey("echo", "1.0"), ("1.0",), "echo.py", {}, signature, 1, VersionNumbers("echo", "1.0")
    )

    def admit(self, request: Request, model: str, version: str | None) -> None:
        """Answer the request at once, so that no batcher is needed to withdraw it."""
        request.finish(ANSWER)

    def facts(self, model: str, version: str | None) -> ModelFacts:
        """The one model."""
        return self.known

    def tensors(self, model: str, version: str | None) -> Signature:
        """Its inputs and outputs."""
        return self.signature


class FramedPlane(Plane):
    """The same with a model of two dimensions that answers tensors, as workers frame them."""

    signature = Signature((TensorSpec("x", "FP32", (-1, FEATURES)),), (TensorSpec("y", "FP32", (-1, 64)),))
    known = replace(Plane.known, signature=signature)
    readiness_listeners: ClassVar[set[Callable[[], None]]] = set()

    def admit(self, request: Request, model: str, version: str | None) -> None:
        """Answer the request at once."""
        request.finish(FRAMED)


class Transport(asyncio.Transport):
    """Keeps the bytes of the last write alone."""

    def __init__(self, extra: dict[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.last = b""

    def write(self, data: Any) -> None:
        """Keep them."""
        self.last = bytes(data[-1] if isinstance(data, list) else data)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """No limits: all is sent at once."""
        return 0, 0

    def get_write_buffer_size(self) -> int:
        """Nothing is left."""
        return 0

    def is_closing(self) -> bool:
        """Never."""
        return False

    def pause_reading(self) -> None:
        """Nothing is read here."""

    def resume_reading(self) -> None:
        """Nothing is read here."""


def message(body: bytes, path: bytes = b"/predictions/echo", lines: bytes = b"") -> bytes:
    """A request as `requests` writes it."""
    return HEAD % (path, lines, len(body)) + body


def tensors(elements: int) -> bytes:
    """A binary request of the Open Inference Protocol."""
    inputs = [
        {
            **{"name": "x", "shape": [elements], "datatype": "FP32"},
            "parameters": {"binary_data_size": 4 * elements},
        }
    ]
    text = json.dumps({"inputs": inputs}).encode()
    length = b"Inference-Header-Content-Length: %d\r\n" % len(text)
    return message(text + bytes(4 * elements), b"/v2/models/echo/infer", length)


def chunked(body: bytes) -> bytes:
    """A request in one chunk."""
    head = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


CASES = {
    "known head, JSON": [message(FLOATS)],
    "tensor of 256 bytes": [tensors(64)],
    "tensor of 600 KB": [tensors(150_000)],
    "in chunks": [chunked(FLOATS)],
    "new heads": [message(FLOATS, lines=b"X-Number: %d\r\n" % number) for number in range(3000)],
}


def fed(connection: Any, data: bytes) -> None:
    """Give a connection bytes as the event loop does."""
    view = memoryview(data)
    while view:
        room = connection.get_buffer(-1)
        size = min(len(room), len(view))
        room[:size] = view[:size]
        connection.buffer_updated(size)
        view = view[size:]


class Calls:
    """Writes the calls of one gRPC connection as clients do: each field is added to HPACK's table once.

    Args:
        method: the method's path.
        message: the request.
        deadline: the text of `grpc-timeout` for a call by its number; "": none.
    """

    def __init__(self, method: str, message: bytes, deadline: Callable[[int], str]) -> None:
        self._headers = [
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "here:7070")),
            *(("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "grpc-c++/1.80")),
        ]
        self._body = b"\0" + struct.pack(">I", len(message)) + message
        self._deadline = deadline
        self._encoder = Encoder()
        self._number = 0

    def reads(self, count: int) -> list[bytes]:
        """So many reads of `AT_ONCE` calls."""
        return [b"".join([self._next() for _ in range(AT_ONCE)]) for _ in range(count)]

    def _next(self) -> bytes:
        deadline, stream = self._deadline(self._number), 2 * self._number + 1
        self._number += 1
        block = self._encoder.encode(
            [*self._headers, ("grpc-timeout", deadline)] if deadline else self._headers
        )
        return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, self._body)


AT_ONCE = 4  # calls in one read
DEADLINES: dict[str, Callable[[int], str]] = {
    "no deadline": lambda number: "",
    "a new deadline each": lambda number: f"{1000 + number}m",
}


METHODS = {
    "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions": PredictionsRequest(
        model_name="echo", input={"data": bytes(200)}
    ).SerializeToString(),
    MODEL_INFER: row_message("echo", FEATURES),
}


class Door:
    """One connection, and the reads that it is fed."""

    def __init__(self, connection: Any, reads: Callable[[], Sequence[bytes]], requests: int = 1) -> None:
        self._connection = connection
        self.reads = reads
        self._requests = requests  # in one read

    def us(self) -> float:
        """Processor time of one request in microseconds.

        Raises:
            SystemExit: the last answer was an error.
        """
        reads = self.reads()
        gc.collect()
        began_s = time.thread_time()
        for data in reads:
            fed(self._connection.protocol, data)
        spent_s, last = time.thread_time() - began_s, self._connection.transport.last
        if not (last.startswith(b"HTTP/1.1 200") or last.endswith(OK_BLOCK)):
            raise SystemExit(f"found an error, expected an answer: {last[:300]!r}")
        return spent_s / (len(reads) * self._requests) * 1e6


def connected(protocol: Any) -> SimpleNamespace:
    """A connection with its transport."""
    transport = Transport({"peername": ("127.0.0.1", 1234)})
    protocol.connection_made(transport)
    return SimpleNamespace(protocol=protocol, transport=transport)


def services_without_turns() -> Services:
    """Services of which connections put nothing off: a round is one iteration of the event loop."""
    services = Services(ServerSettings(), Metrics("host"))
    services.budgets.turns.turn_s = float("inf")
    return services


def grpc_door(method: str, deadline: Callable[[int], str]) -> Door:
    """A connection whose client has said hello, and accepts any number of bytes."""
    plane: Any = FramedPlane() if method.endswith("ModelInfer") else Plane()
    server = inference_server(plane, plane, services_without_turns(), Address("127.0.0.1", 0))
    connection = connected(Http2Connection(server._listener))
    grown = struct.pack(">I", 2**30)
    fed(connection.protocol, PREFACE + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, grown))
    calls = Calls(method, METHODS[method], deadline)
    return Door(connection, partial(calls.reads, READS // AT_ONCE), AT_ONCE)


def rest_doors() -> dict[str, Door]:
    """The cases over REST, on one connection."""
    services = services_without_turns()
    unasked: Any = SimpleNamespace(workflows=None)  # the plane of routes that are not called
    listener = listener_of(frozenset({"inference"}), Plane(), unasked, services)  # type: ignore[arg-type]
    connection = connected(Connection(listener))

    def reads(name: str) -> Sequence[bytes]:
        messages, count = CASES[name], REQUESTS_A_ROUND.get(name, READS)
        return [messages[number % len(messages)] for number in range(count)]

    return {f"REST, {name}": Door(connection, partial(reads, name)) for name in CASES}


async def main(rounds: int, profile: str) -> None:
    """Measure and print."""
    doors = rest_doors()
    for method in METHODS:
        for name, deadline in DEADLINES.items():
            doors[f"{method.rpartition('/')[2]}, {name}"] = grpc_door(method, deadline)
    if profile and profile not in doors:
        raise SystemExit(f"--profile: found {profile!r}, expected one of {', '.join(doors)}")
    best = dict.fromkeys(doors, float("inf"))
    for _ in range(rounds):
        for name, door in doors.items():
            best[name] = min(best[name], door.us())
    for name, us in best.items():
        print(f"{name:36} {us:8.2f} us")
    if profile:
        with cProfile.Profile() as profiler:
            doors[profile].us()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", default="", metavar="CASE")
    options = parser.parse_args()
    uvloop.run(main(options.rounds, options.profile))
