"""What the REST door costs a request, without a socket and without a model.

    python benchmarks/rest_door.py [--rounds 7] [--profile]

Bytes go into one connection, and a data plane answers at once; what is measured is the processor time of the
thread, so the kernel's share and the model's are left out. The best of the rounds counts, as neighbours only
add. Steps are bytecodes, which do not depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import sys
import time
from typing import Any

import uvloop

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import ServerSettings
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


def fed(connection: Connection, data: bytes) -> None:
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


async def main(rounds: int, profile: bool) -> None:
    """Measure and print."""
    services = Services(ServerSettings(), Metrics("host"))
    listener = listener_of(frozenset({"inference"}), Plane(), None, services)  # type: ignore[arg-type]
    connection = Connection(listener)
    connection.connection_made(Transport({"peername": ("127.0.0.1", 1234)}))
    best = dict.fromkeys(CASES, float("inf"))
    for _ in range(rounds):
        for name, messages in CASES.items():
            count = REQUESTS_A_ROUND.get(name, 3000)
            gc.collect()
            began_s = time.thread_time()
            for number in range(count):
                fed(connection, messages[number % len(messages)])
            best[name] = min(best[name], (time.thread_time() - began_s) / count * 1e6)
    for name, us in best.items():
        fed(connection, CASES[name][0])  # so that its head is known
        print(f"{name:20} {us:8.2f} us {steps_of(connection, CASES[name][0]):6} steps")
    if profile:
        with cProfile.Profile() as profiler:
            for _ in range(20_000):
                fed(connection, CASES["known head, JSON"][0])
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    uvloop.run(main(options.rounds, options.profile))
