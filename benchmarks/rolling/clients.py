"""Clients that send numbered requests, compare what comes back, and never try again by themselves."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from torchere.serving.frontend.grpc.protos import inference_pb2

CONCURRENCY = 8
SLOW_EVERY = 100  # one request of so many is in its handler for a while: some always are when a replica ends
_TIMEOUT_S = 30.0
_KEPT = 10  # failures that are shown
_PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_HEALTH_CHECKED = '{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}'

Ask = Callable[[bytes], Awaitable[bytes]]


@dataclass
class Tally:
    """What one way in came to."""

    name: str
    wanted: int
    answered: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        """Count a request that got no right answer."""
        self.failed += 1
        if len(self.failures) < _KEPT:
            self.failures.append(f"{time.strftime('%X')} {what}")


async def load(tally: Tally, ask: Ask, go_on: Callable[[], bool]) -> None:
    """Ask with `CONCURRENCY` requests at a time, until `tally.wanted` are answered and `go_on` says no."""
    numbers = itertools.count()

    async def one_after_another() -> None:
        while tally.answered + tally.failed < tally.wanted or go_on():
            await _ask_once(tally, ask, next(numbers))

    await asyncio.gather(*(one_after_another() for _ in range(CONCURRENCY)))


async def _ask_once(tally: Tally, ask: Ask, number: int) -> None:
    body = b"%s %s %d" % (b"slow" if number % SLOW_EVERY == 0 else b"fast", tally.name.encode(), number)
    began_s = time.monotonic()
    try:
        answer = await asyncio.wait_for(ask(body), _TIMEOUT_S)
    except (OSError, EOFError, asyncio.TimeoutError, grpc.aio.AioRpcError, ValueError) as err:
        tally.fail(f"{type(err).__name__}: {' '.join(str(err).split())[:300]}")
        return
    if answer == body:
        tally.answered += 1
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began_s)
    else:
        tally.fail(f"another answer: {answer[:300]!r}")


def rest(port: int) -> Ask:
    """A POST on a connection of its own: a proxy that reloads may close one that is kept under the client."""

    async def ask(body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = "POST /predictions/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.read()
        finally:
            writer.close()
        head_bytes, _, content = answer.partition(b"\r\n\r\n")
        if not head_bytes.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"status line {head_bytes[:60]!r}")
        return content

    return ask


def balanced_channel(ports: list[int]) -> grpc.aio.Channel:
    """A channel to all replicas that asks each one's health service, and takes them in turn."""
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    return _channel(target, ("grpc.service_config", _HEALTH_CHECKED))


def plain_channel(port: int) -> grpc.aio.Channel:
    """A channel with one connection."""
    return _channel(f"127.0.0.1:{port}")


def _channel(target: str, *options: tuple[str, str | int]) -> grpc.aio.Channel:
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
    return grpc.aio.insecure_channel(
        target, options=[*own, ("grpc.max_reconnect_backoff_ms", 1000), *options]
    )


def grpc_calls(channel: grpc.aio.Channel) -> Ask:
    """`Predictions` on that channel."""
    call = channel.unary_unary(
        _PREDICTIONS,
        inference_pb2.PredictionsRequest.SerializeToString,
        inference_pb2.PredictionResponse.FromString,
    )

    async def ask(body: bytes) -> bytes:
        answer = await call(inference_pb2.PredictionsRequest(model_name="echo", input={"body": body}))
        return bytes(answer.prediction)

    return ask
