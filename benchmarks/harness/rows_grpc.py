"""The row of gRPC throughput."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import servers
from harness.figures import Goal
from harness.grpc_probe import until_called
from harness.load import grpc_load
from harness.models import plain_body
from harness.paths import SCRIPTS
from harness.processes import Endpoint, free_ports, serving
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
    until_called(endpoint, _METHOD, message, wanted)
    loads = [
        grpc_load(
            endpoint.grpc, _METHOD, message, connections=_CONNECTIONS, streams=_STREAMS, seconds=seconds
        )
        for seconds in (_WARM_UP_S, conditions.seconds)
    ]
    return {"rps": loads[-1].per_second, "mean_ms": loads[-1].latency_ms["mean"]}


def rows() -> list[Row]:
    """The rows of this module."""
    return [
        Row(
            "grpc",
            "gRPC Predictions",
            "The tiny MLP behind a handler that parses the same JSON, in 2 threads (TorchServe: 2 workers), "
            f"batches of up to 32; h2load with {_CONNECTIONS} connections of {_STREAMS} streams. The echo "
            "is a bare grpc.aio server that gives back the bytes it got.",
            {"torchere": _torchere, "grpc.aio echo": _echo, "torchserve": _torchserve},
            {"rps": "calls/s", "mean_ms": "mean ms"},
            (
                Goal("calls a second, to a bare grpc.aio echo", "rps", 0.7, against=("grpc.aio echo",)),
                Goal("calls a second, to TorchServe", "rps", 3, against=("torchserve",)),
            ),
        )
    ]
