"""The row of gRPC throughput."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import grpc

from harness import servers
from harness.errors import Failed
from harness.figures import Goal
from harness.load import grpc_load
from harness.models import plain_body
from harness.paths import SCRIPTS
from harness.processes import START_S, Endpoint, free_ports, last_words, serving
from harness.rows import Conditions, Figures, Row
from torchere.serving.frontend.grpc.protos import inference_pb2

_METHOD = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_CONNECTIONS, _STREAMS = 8, 4
_WARM_UP_S = 2.0


def _torchere(conditions: Conditions) -> Figures:
    with servers.torchere(conditions.shop, "rows", 2) as endpoint:
        return _measure(endpoint, b'"y"', conditions)


def _torchserve(conditions: Conditions) -> Figures:
    with servers.torchserve(conditions.shop, "rows", 2) as endpoint:
        return _measure(endpoint, b'"y"', conditions)


def _echo(conditions: Conditions) -> Figures:
    (port,) = free_ports(1)
    command = [sys.executable, str(SCRIPTS / "grpc_echo.py"), str(port)]
    with (
        tempfile.TemporaryDirectory(dir=conditions.shop.folder) as place,
        serving(command, Path(place), port, grpc_port=port) as endpoint,
    ):
        return _measure(endpoint, b'"x"', conditions)


def _measure(endpoint: Endpoint, wanted: bytes, conditions: Conditions) -> Figures:
    request = inference_pb2.PredictionsRequest(model_name="rows", input={"data": plain_body()})
    message = request.SerializeToString()
    _until_answered(endpoint, message, wanted)
    loads = [
        grpc_load(
            endpoint.grpc, _METHOD, message, connections=_CONNECTIONS, streams=_STREAMS, seconds=seconds
        )
        for seconds in (_WARM_UP_S, conditions.seconds)
    ]
    return {"rps": loads[-1].per_second, "mean_ms": loads[-1].latency_ms["mean"]}


def _until_answered(endpoint: Endpoint, message: bytes, wanted: bytes) -> None:
    """Ask with gRPC's own client until the answer is right: h2load does not look into answers."""
    found = ""
    give_up_s = endpoint.started_s + START_S
    with grpc.insecure_channel(endpoint.grpc) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)  # bytes in, bytes out
        while time.monotonic() < give_up_s and endpoint.process.poll() is None:
            try:
                answer = call(message, timeout=START_S, wait_for_ready=True)
            except grpc.RpcError as err:
                found = str(err)
                time.sleep(0.1)
                continue
            if wanted in answer:
                return
            found = repr(answer[:200])
    raise Failed(f"the answer was {found}, expected one with {wanted!r}; {last_words(endpoint)}")


def rows() -> list[Row]:
    """The rows of this module."""
    return [
        Row(
            "grpc",
            "gRPC Predictions",
            "The tiny MLP behind a handler that parses the same JSON, in 2 threads (TorchServe: 2 workers), "
            f"batches of up to 32; h2load with {_CONNECTIONS} connections of {_STREAMS} streams. The echo "
            "is a bare grpc.aio server that gives back the bytes it got: the floor for any in Python.",
            {"torchere": _torchere, "grpc.aio echo": _echo, "torchserve": _torchserve},
            {"rps": "calls/s", "mean_ms": "mean ms"},
            (
                Goal("calls a second, to a bare grpc.aio echo", "rps", 0.7, against=("grpc.aio echo",)),
                Goal("calls a second, to TorchServe", "rps", 3, against=("torchserve",)),
            ),
        )
    ]
