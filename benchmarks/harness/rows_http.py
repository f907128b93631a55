"""Rows of REST throughput: the tiny MLP and a custom handler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from harness import servers
from harness.cpu_time import tree_cpu_s
from harness.figures import Goal
from harness.load import http_load
from harness.models import ENVELOPE, FEATURES, instances_body, plain_body, v2_body
from harness.processes import Endpoint, Probe, until_answered
from harness.rows import Conditions, Figures, Measure, Row

# The JVM compiles what is hot, TorchScript specialises, and torchere starts a worker for a tiny model that is
# asked for more than the event loop can run, some seconds after that began.
WARM_UP_S = 6.0
CLIENTS = (1, 32, 128)
_TINY = (FEATURES, 4)
WORKERS = 2

Start = Callable[..., AbstractContextManager[Endpoint]]


def closed_loop(
    server: AbstractContextManager[Endpoint],
    probe: Probe,
    conditions: Conditions,
    clients: tuple[int, ...],
    *,
    warm_up_clients: int | None = None,
) -> Figures:
    """Start, warm up with the most clients, and load with each number of them.

    Rates are per second, `cpu_N_us` is the processor time a request of the server with all its processes.
    """
    with server as endpoint:
        figures = {"start_s": until_answered(endpoint, probe)}
        url = f"{endpoint.url}{probe.path}"
        most = warm_up_clients or max(clients)
        http_load(url, probe.body, most, WARM_UP_S, probe.content_type, headers=probe.headers)
        until_answered(endpoint, probe)  # what wrk left behind is run, and would count for nobody
        for count in clients:
            before_s = tree_cpu_s(endpoint.process.pid)
            load = http_load(
                url, probe.body, count, conditions.seconds, probe.content_type, headers=probe.headers
            )
            spent_s = tree_cpu_s(endpoint.process.pid) - before_s
            figures |= {f"rps_{count}": load.per_second, f"cpu_{count}_us": spent_s / load.requests * 1e6}
            figures |= {f"p{key}_{count}_ms": value for key, value in load.latency_ms.items()}
    return figures


_OTHERS = ("mosec", "triton", "litserve")
_FAST_JSON = "mosec, orjson"
_UNBATCHED = "torchserve, batch size 1"
_TORCHSERVES = ("torchserve", _UNBATCHED)
_OURS_UNBATCHED = "torchere, batch size 1"
_TINY_GOALS = (
    Goal("req/s at 32 clients, to TorchServe as it comes", "rps_32", 12, against=(_UNBATCHED,)),
    Goal("req/s at 128 clients, to TorchServe as it comes", "rps_128", 12, against=(_UNBATCHED,)),
    Goal("req/s at 32 clients, to TorchServe with batches", "rps_32", 12, against=("torchserve",)),
    Goal("req/s at 128 clients, to TorchServe with batches", "rps_128", 12, against=("torchserve",)),
    Goal("req/s at 32 clients, neither batches", "rps_32", None, against=(_UNBATCHED,), ours=_OURS_UNBATCHED),
    Goal("req/s at 32 clients, to the best of mosec, Triton, LitServe", "rps_32", 1.1, against=_OTHERS),
    Goal("req/s at 128 clients, to the best of mosec, Triton, LitServe", "rps_128", 1.0, against=_OTHERS),
    Goal("req/s at 32 clients, to mosec with orjson in its worker", "rps_32", 1.1, against=(_FAST_JSON,)),
    Goal("req/s at 128 clients, to mosec with orjson in its worker", "rps_128", 1.0, against=(_FAST_JSON,)),
    Goal("p50 of 1 client, to the best peer", "p50_1_ms", 0.75, False, (*_TORCHSERVES, *_OTHERS, _FAST_JSON)),
    Goal("req/s at 32 clients, to the echo", "rps_32", None, against=("echo",)),
    Goal("the echo, to TorchServe", "rps_32", None, against=("torchserve",), ours="echo"),
)


def _tiny() -> Row:
    mosec = Probe("/inference", plain_body(), b'"y"')
    return Row(
        "tiny_mlp",
        "Tiny MLP, thread executors",
        "TorchScript MLP of 4 layers 64 x 64; 64 floats in and out as JSON over REST, wrk. torchere and "
        "TorchServe serve the same archive (base_handler, json envelope, batches of up to 32, 2 workers), "
        "both also without batches, which is what they do unless they are told otherwise; "
        "mosec, LitServe and Triton run the same file with batches of up to 32 in one worker, as their "
        "documents say, mosec also with orjson in the place of its own JSON, which is written by Python. The "
        "echo is uvloop and httptools with nothing behind them: what one process of Python could reach if it "
        "did nothing.",
        {
            "torchere": _with_archive(servers.torchere, "tiny"),
            "torchserve": _with_archive(servers.torchserve, "tiny"),
            _OURS_UNBATCHED: _with_archive(servers.torchere, "single"),
            _UNBATCHED: _with_archive(servers.torchserve, "single"),
            "echo": _echo,
            "mosec": _with_file(servers.mosec, mosec),
            _FAST_JSON: _with_file(partial(servers.mosec, fast_json=True), mosec),
            "litserve": _with_file(servers.litserve, Probe("/predict", plain_body(), b'"y"')),
            "triton": _with_file(servers.triton, Probe("/v2/models/mlp/infer", v2_body(), b'"outputs"')),
        },
        {
            "rps_1": "req/s, 1 client",
            "p50_1_ms": "p50 ms",
            "rps_32": "req/s, 32",
            "p50_32_ms": "p50 ms",
            "p99_32_ms": "p99 ms",
            "rps_128": "req/s, 128",
            "p99_128_ms": "p99 ms",
        },
        _TINY_GOALS,
    )


def _echo(conditions: Conditions) -> Figures:
    probe = Probe("/", instances_body(), b'"predictions"')
    return closed_loop(servers.http_echo(conditions.shop), probe, conditions, CLIENTS)


def _with_archive(start: Start, archive: str) -> Measure:
    """The tiny MLP as an archive for the built-in handler."""
    probe = Probe(f"/predictions/{archive}", instances_body(), b'"predictions"')

    def measure(conditions: Conditions) -> Figures:
        return closed_loop(start(conditions.shop, archive, WORKERS, ENVELOPE), probe, conditions, CLIENTS)

    return measure


def _with_file(start: Start, probe: Probe) -> Measure:
    """The tiny MLP as a file, for servers that run a script."""

    def measure(conditions: Conditions) -> Figures:
        return closed_loop(start(conditions.shop, *_TINY), probe, conditions, CLIENTS)

    return measure


def _custom() -> Row:
    probe = Probe("/predictions/custom", plain_body(), b'"y"')
    clients = (1, 32)

    def torchere(conditions: Conditions) -> Figures:
        return closed_loop(servers.torchere(conditions.shop, "custom", WORKERS), probe, conditions, clients)

    def torchserve(conditions: Conditions) -> Figures:
        return closed_loop(servers.torchserve(conditions.shop, "custom", WORKERS), probe, conditions, clients)

    peer = ("torchserve",)
    return Row(
        "custom_handler",
        "Custom handler, process executors",
        "The same MLP behind a handler of the archive's own, written for TorchServe; 2 workers, batch "
        "size 1. Both serve the same archive.",
        {"torchere": torchere, "torchserve": torchserve},
        {
            "rps_1": "req/s, 1 client",
            "p50_1_ms": "p50 ms",
            "rps_32": "req/s, 32",
            "p50_32_ms": "p50 ms",
            "p99_32_ms": "p99 ms",
        },
        (
            Goal("req/s at 32 clients, to TorchServe", "rps_32", 6, against=peer),
            Goal("p50 of 1 client, to TorchServe", "p50_1_ms", 0.35, more_is_better=False, against=peer),
        ),
    )


def rows() -> list[Row]:
    """The rows of this module."""
    return [_tiny(), _custom()]
