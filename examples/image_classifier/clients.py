"""One photograph sent over REST and over gRPC, as any client of TorchServe sends it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import requests

from examples.harness.server import CALL_TIMEOUT_S, Server
from torchere.serving.commands.predict_grpc import Connection

Labels = dict[str, float]  # class name to probability, the most probable first
Ask = Callable[[bytes], Labels]

_WARM_UP = 5
_ASKED = 40


def rest_client(server: Server, model: str, version: str) -> Ask:
    """Asks by POST /predictions/{model}/{version} with the photograph as the body, on one connection."""
    session = requests.Session()
    session.headers.update(server.bearer("inference"))
    url = server.url(server.ports.inference, f"/predictions/{model}/{version}")

    def ask(photograph: bytes) -> Labels:
        response = session.post(url, data=photograph, timeout=CALL_TIMEOUT_S)
        response.raise_for_status()
        labels: Labels = response.json()
        return labels

    return ask


def grpc_client(connection: Connection, model: str, version: str) -> Ask:
    """Asks by the Predictions call with the photograph as the input `data`."""

    def ask(photograph: bytes) -> Labels:
        labels: Labels = connection.predict(model, photograph, version=version).json()
        return labels

    return ask


def median_ms(ask: Ask, photograph: bytes) -> float:
    """Return the median latency in milliseconds: one client, one request at a time, after a warm-up."""
    times = []
    for number in range(_WARM_UP + _ASKED):
        start = time.perf_counter()
        ask(photograph)
        if number >= _WARM_UP:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
