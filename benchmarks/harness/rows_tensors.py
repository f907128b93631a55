"""The row of large tensors: one of 1 MiB in and out by the Open Inference Protocol, in each of its forms."""

from __future__ import annotations

from contextlib import AbstractContextManager

from harness import servers
from harness.cpu_time import tree_cpu_s
from harness.figures import Goal
from harness.grpc_probe import MODEL_INFER, row_message, until_called
from harness.load import Load, grpc_load
from harness.models import TENSOR, raw_row, v2_binary, v2_body
from harness.processes import Endpoint, Probe
from harness.rows import Conditions, Figures, Measure, Row
from harness.rows_http import closed_loop

_CLIENTS = 4
_WARM_UP_S = 1.0
_LIMITS = f"max_request_size={2**26}\nmax_response_size={2**26}\n"  # the JSON is several times the tensor
_WORKERS = 2


def _torchere(conditions: Conditions) -> AbstractContextManager[Endpoint]:
    return servers.torchere(conditions.shop, "identity", _WORKERS, _LIMITS)


def _triton(conditions: Conditions) -> AbstractContextManager[Endpoint]:
    return servers.triton(conditions.shop, TENSOR, 0)


def _binary(model: str) -> Probe:
    body, headers = v2_binary(TENSOR)
    return Probe(f"/v2/models/{model}/infer", body, raw_row(TENSOR), "application/octet-stream", headers)


def _json(model: str) -> Probe:
    return Probe(f"/v2/models/{model}/infer", v2_body(TENSOR), b'"outputs"')


def _over_rest(server: AbstractContextManager[Endpoint], probe: Probe, conditions: Conditions) -> Figures:
    figures = closed_loop(server, probe, conditions, (1, _CLIENTS), warm_up_clients=1)
    names = {"rps": f"rps_{_CLIENTS}", "p50_1_ms": "p50_1_ms", "cpu_us": f"cpu_{_CLIENTS}_us"}
    return {name: figures[key] for name, key in names.items()}


def _over_grpc(server: AbstractContextManager[Endpoint], model: str, conditions: Conditions) -> Figures:
    message = row_message(model, TENSOR)
    with server as endpoint:
        until_called(endpoint, MODEL_INFER, message, raw_row(TENSOR))
        grpc_load(endpoint.grpc, MODEL_INFER, message, connections=_CLIENTS, streams=1, seconds=_WARM_UP_S)
        alone = _load(endpoint, message, 1, conditions)
        before_s = tree_cpu_s(endpoint.process.pid)
        all_of_them = _load(endpoint, message, _CLIENTS, conditions)
        spent_s = tree_cpu_s(endpoint.process.pid) - before_s
    return {
        "rps": all_of_them.per_second,
        "p50_1_ms": alone.latency_ms["mean"],
        "cpu_us": spent_s / all_of_them.requests * 1e6,
    }


def _load(endpoint: Endpoint, message: bytes, connections: int, conditions: Conditions) -> Load:
    return grpc_load(
        endpoint.grpc, MODEL_INFER, message, connections=connections, streams=1, seconds=conditions.seconds
    )


def _contenders() -> dict[str, Measure]:
    return {
        "torchere": lambda on: _over_rest(_torchere(on), _binary("identity"), on),
        "torchere, JSON": lambda on: _over_rest(_torchere(on), _json("identity"), on),
        "torchere, gRPC": lambda on: _over_grpc(_torchere(on), "identity", on),
        "triton": lambda on: _over_rest(_triton(on), _binary("mlp"), on),
        "triton, gRPC": lambda on: _over_grpc(_triton(on), "mlp", on),
    }


def rows() -> list[Row]:
    """The rows of this module."""
    return [
        Row(
            "tensor_1mib",
            "A tensor of 1 MiB in and out",
            f"{TENSOR:,} float32 by the Open Inference Protocol through an identity in TorchScript: over "
            "REST as raw bytes and as JSON (wrk), over gRPC as raw bytes (h2load). "
            f"{_CLIENTS} clients; the latency is that of one client, over gRPC its mean. torchere has 2 "
            "executor threads, Triton its Python backend.",
            _contenders(),
            {"rps": "tensors/s", "p50_1_ms": "ms, 1 client"},
            (
                Goal("raw bytes over REST, to JSON", "rps", 8, against=("torchere, JSON",)),
                Goal("raw bytes over REST, to Triton's Python backend", "rps", 1.0, against=("triton",)),
                Goal(
                    "raw bytes over gRPC, to Triton's Python backend",
                    "rps",
                    1.0,
                    against=("triton, gRPC",),
                    ours="torchere, gRPC",
                ),
            ),
        )
    ]
