"""Asking a gRPC server until its answer is right, with gRPC's own client: h2load looks into none."""

from __future__ import annotations

import time

import grpc

from harness.errors import Failed
from harness.processes import START_S, Endpoint, last_words

_SHOWN_BYTES = 200
_UNBOUNDED = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]


def until_called(endpoint: Endpoint, method: str, message: bytes, wanted: bytes) -> bytes:
    """Call `method` with a serialised message until the answer has `wanted` in it, and return the answer.

    Raises:
        Failed: it did not within `START_S` of the server's start, or the server ended.
    """
    found = ""
    with grpc.insecure_channel(endpoint.grpc, _UNBOUNDED) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)  # bytes in, bytes out
        while time.monotonic() < endpoint.started_s + START_S and endpoint.process.poll() is None:
            try:
                answer = call(message, timeout=START_S, wait_for_ready=True)
            except grpc.RpcError as err:
                found = str(err)
                time.sleep(0.1)
                continue
            if wanted in answer:
                return bytes(answer)
            found = f"{len(answer)} bytes, {answer[:_SHOWN_BYTES]!r}"
    shown = wanted[:_SHOWN_BYTES]
    raise Failed(f"the answer was {found}, expected one with {shown!r}; {last_words(endpoint)}")
