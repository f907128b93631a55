"""One photograph sent over REST and over gRPC, as any client of TorchServe sends it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import grpc
import requests
from server import Server

from torchere.serving.frontend.grpc.protos import inference_pb2

Labels = dict[str, float]  # class name to probability, the most probable first
Ask = Callable[[bytes], Labels]

_METHOD = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_TIMEOUT_S = 60.0
_WARM_UP = 5
_ASKED = 40


def rest_client(server: Server, model: str, version: str) -> Ask:
    """Asks by POST /predictions/{model}/{version} with the photograph as the body, on one connection."""
    session = requests.Session()
    session.headers.update(server.bearer("inference"))
    url = server.url(server.ports.inference, f"/predictions/{model}/{version}")

    def ask(photograph: bytes) -> Labels:
        response = session.post(url, data=photograph, timeout=_TIMEOUT_S)
        response.raise_for_status()
        labels: Labels = response.json()
        return labels

    return ask


def grpc_client(channel: grpc.Channel, server: Server, model: str, version: str) -> Ask:
    """Asks by the Predictions call with the photograph as the input `data`."""
    call = channel.unary_unary(
        _METHOD,
        request_serializer=inference_pb2.PredictionsRequest.SerializeToString,
        response_deserializer=inference_pb2.PredictionResponse.FromString,
    )
    metadata = tuple(server.bearer("inference").items())

    def ask(photograph: bytes) -> Labels:
        request = inference_pb2.PredictionsRequest(
            model_name=model, model_version=version, input={"data": photograph}
        )
        answer = call(request, metadata=metadata, timeout=_TIMEOUT_S)
        labels: Labels = json.loads(answer.prediction)
        return labels

    return ask


def median_ms(ask: Ask, photograph: bytes) -> float:
    """Median time of an answer in milliseconds: one client, one request at a time, after a warm-up."""
    times = []
    for number in range(_WARM_UP + _ASKED):
        start = time.perf_counter()
        ask(photograph)
        if number >= _WARM_UP:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
