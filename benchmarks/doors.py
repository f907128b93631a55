"""What the REST door and the gRPC door cost a request, without a socket and without a model.

    python benchmarks/doors.py [--rounds 7] [--profile CASE]

Bytes go into one connection, and a data plane answers at once; what is measured is the processor time of the
thread, so the kernel's share and the model's are left out. The best of the rounds counts, as neighbours only
add. Steps are bytecodes of a request over REST, which do not depend on the machine. A call over gRPC is a
ModelInfer of 64 float32 by `harness/grpc_calls.py`, each with another deadline; four come in one read.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import uvloop
from harness.grpc_calls import first_block, frame, next_block, timeout_of
from harness.models import FEATURES, raw_row

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.tensors.answer import FRAME
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest
from torchere.serving.frontend.grpc.server import inference_server
from torchere.serving.frontend.http2.connection import Connection as Http2Connection
from torchere.serving.frontend.http2.frames import PREFACE
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.rest.app import listener_of
from torchere.serving.frontend.rest.connection import Connection
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
        ModelKey("echo", "1.0"), ("1.0",), "echo.py", {}, signature, 1, True, VersionNumbers("echo", "1.0")
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
    """Drops what is written."""

    def write(self, data: Any) -> None:
        """Drop it."""

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


MODEL_INFER = "ModelInfer over gRPC"


def fed(connection: Any, data: bytes) -> None:
    """Give a connection bytes as the event loop does."""
    view = memoryview(data)
    while view:
        room = connection.get_buffer(-1)
        size = min(len(room), len(view))
        room[:size] = view[:size]
        connection.buffer_updated(size)
        view = view[size:]


def steps_of(connection: Connection, data: bytes) -> int:
    """How many bytecodes a request takes."""
    steps = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    sys.settrace(trace)
    fed(connection, data)
    sys.settrace(None)
    return steps


class Calls:
    """Writes the calls of one gRPC connection, `AT_ONCE` to a read."""

    METHOD = "/inference.GRPCInferenceService/ModelInfer"
    AT_ONCE = 4

    def __init__(self) -> None:
        request = ModelInferRequest(model_name="echo", raw_input_contents=[raw_row(FEATURES)])
        request.inputs.add(name="x", datatype="FP32", shape=[1, FEATURES])
        message = request.SerializeToString()
        self._body = b"\0" + struct.pack(">I", len(message)) + message
        self._number = 0

    def read(self) -> bytes:
        """The next calls."""
        return b"".join(map(self._next, range(self.AT_ONCE)))

    def _next(self, _: int) -> bytes:
        timeout, stream = timeout_of(self._number), 2 * self._number + 1
        block = next_block(timeout) if self._number else first_block(self.METHOD, "127.0.0.1:7070", timeout)
        self._number += 1
        return frame(1, 0x4, stream, block) + frame(0, 0x1, stream, self._body)


def grpc_connection() -> Http2Connection:
    """A connection whose client has said hello, and accepts any number of bytes."""
    services = Services(ServerSettings(), Metrics("host"))
    plane: Any = FramedPlane()
    server = inference_server(plane, plane, services, Address("127.0.0.1", 0))
    connection = Http2Connection(server._listener)
    connection.connection_made(Transport({"peername": ("127.0.0.1", 1234)}))
    fed(connection, PREFACE + frame(4, 0, 0) + frame(8, 0, 0, struct.pack(">I", 2**30)))
    return connection


def rest_connection() -> Connection:
    """A connection of the REST door."""
    services = Services(ServerSettings(), Metrics("host"))
    listener = listener_of(frozenset({"inference"}), Plane(), None, services)  # type: ignore[arg-type]
    connection = Connection(listener)
    connection.connection_made(Transport({"peername": ("127.0.0.1", 1234)}))
    return connection


def timed(connection: Any, reads: Sequence[bytes]) -> float:
    """Processor time of one read, in microseconds."""
    gc.collect()
    began_s = time.thread_time()
    for data in reads:
        fed(connection, data)
    return (time.thread_time() - began_s) / len(reads) * 1e6


async def main(rounds: int, profile: str) -> None:
    """Measure and print."""
    connection, grpc, calls = rest_connection(), grpc_connection(), Calls()

    def reads_of(name: str) -> Sequence[bytes]:
        if name == MODEL_INFER:
            return [calls.read() for _ in range(750)]
        messages, count = CASES[name], REQUESTS_A_ROUND.get(name, 3000)
        return [messages[number % len(messages)] for number in range(count)]

    best = dict.fromkeys((*CASES, MODEL_INFER), float("inf"))
    for _ in range(rounds):
        for name in best:
            of_grpc = name == MODEL_INFER
            us = timed(grpc if of_grpc else connection, reads_of(name)) / (Calls.AT_ONCE if of_grpc else 1)
            best[name] = min(best[name], us)
    for name, us in best.items():
        steps = ""
        if name in CASES:
            fed(connection, CASES[name][0])  # so that its head is known
            steps = f"{steps_of(connection, CASES[name][0]):6} steps"
        print(f"{name:26} {us:8.2f} us {steps}".rstrip())
    if profile:
        reads = [data for _ in range(5) for data in reads_of(profile)]
        with cProfile.Profile() as profiler:
            timed(grpc if profile == MODEL_INFER else connection, reads)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", choices=[*CASES, MODEL_INFER], default="", metavar="CASE")
    options = parser.parse_args()
    uvloop.run(main(options.rounds, options.profile))
