"""Rows of gRPC throughput: TorchServe's Predictions, and ModelInfer with deadlines."""

from __future__ import annotations

import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from harness import servers
from harness.cpu_time import tree_cpu_s
from harness.figures import Goal
from harness.grpc_probe import MODEL_INFER, row_message, until_called
from harness.load import deadline_load, grpc_load
from harness.models import FEATURES, plain_body, raw_row
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


def _with_deadlines(server: AbstractContextManager[Endpoint], model: str, conditions: Conditions) -> Figures:
    message = row_message(model, FEATURES)
    with server as endpoint:
        until_called(endpoint, MODEL_INFER, message, b"FP32")
        spent_s = 0.0
        for seconds in (_WARM_UP_S, conditions.seconds):
            before_s = tree_cpu_s(endpoint.process.pid)
            load = deadline_load(
                endpoint.grpc,
                MODEL_INFER,
                message,
                connections=_CONNECTIONS,
                streams=_STREAMS,
                seconds=seconds,
                answer_bytes=len(raw_row(FEATURES)),
            )
            spent_s = tree_cpu_s(endpoint.process.pid) - before_s
    return {
        "rps": load.per_second,
        "p50_ms": load.latency_ms["50"],
        "p99_ms": load.latency_ms["99"],
        "cpu_us": spent_s / load.requests * 1e6,
        "client_cpu_us": load.client_cpu_us,
    }


def _torchere_with_deadlines(conditions: Conditions) -> Figures:
    return _with_deadlines(servers.torchere(conditions.shop, "tiny_tensor", 2), "tiny_tensor", conditions)


def _deadlines() -> Row:
    return Row(
        "grpc_deadlines",
        "gRPC ModelInfer, a deadline in each call",
        f"The tiny MLP by the Open Inference Protocol, {FEATURES} float32 as raw bytes in and out, batches "
        f"of up to 32; {_CONNECTIONS} connections of {_STREAMS} calls, each call with another grpc-timeout. "
        "The client is harness/grpc_calls.py; its processor time a call is in the table, for it takes its "
        "share of the cores. torchere has the built-in handler tensor, Triton its Python backend.",
        {
            "torchere": _torchere_with_deadlines,
            "triton": lambda on: _with_deadlines(servers.triton(on.shop, FEATURES, 4), "mlp", on),
        },
        {"rps": "calls/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "client_cpu_us": "client us"},
        (Goal("calls a second, to Triton's Python backend", "rps", 2, against=("triton",)),),
    )


def rows() -> list[Row]:
    """The rows of this module."""
    return [
        _deadlines(),
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
        ),
    ]
