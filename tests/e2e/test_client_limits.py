"""Limits for each client and turns in the queue, over REST and gRPC, with two identities."""

import concurrent.futures
import json
import re
import time
from typing import Any, cast

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest

PATIENCE_S = 30.0
# Writes the order of its requests, and waits as long as a file of the name that it is sent is there.
HANDLER = """
import os, time
class Handler:
    def initialize(self, context): pass
    def handle(self, data, context):
        for row in data:
            text = bytes(row.get("body", row.get("data"))).decode()
            with open("ORDER", "a") as order:
                order.write(text + chr(10))
            while os.path.exists(text):
                time.sleep(0.01)
        return ["done"] * len(data)
"""
KEYS = {
    "management": "management-key",
    "metrics": "metrics-key",
    "identities": [
        {"identity": "greedy", "roles": ["inference"], "key": "greedy-key"},
        {"identity": "modest", "roles": ["inference"], "key": "modest-key"},
        {"identity": "slow", "roles": ["inference"], "key": "slow-key-1", "rate": 0.01, "burst": 2},
        {"identity": "narrow", "roles": ["inference"], "key": "narrow-key", "concurrency": 1},
    ],
}


@pytest.fixture(scope="module")
def server(start_server: Any, pack: Any, store: Any) -> Any:
    """A server with one executor and batches of two."""
    config = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 2\nmaxBatchDelay: 0\njobQueueSize: 60\n"
    handler = HANDLER.replace("ORDER", str(store.parent / "order"))
    pack("m", {"h.py": handler, "c.yaml": config}, handler="h.py", configFile="c.yaml")
    keys = store.parent / "keys.json"
    keys.write_text(json.dumps(KEYS))
    keys.chmod(0o600)
    running = start_server("--models", "m.mar", properties=f"token_keys_file={keys}\n")
    running.until_ready()
    return running


def predict(server: Any, key: str, text: str = "x") -> Any:
    return server.call("POST", "/predictions/m", text.encode(), headers={"authorization": f"Bearer {key}"})


def predict_by_grpc(server: Any, key: str, text: str = "x") -> bytes:
    with grpc.insecure_channel(server.grpc["inference"]) as channel:
        ask = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
            request_serializer=PredictionsRequest.SerializeToString,
            response_deserializer=PredictionResponse.FromString,
        )
        request = PredictionsRequest(model_name="m", input={"data": text.encode()})
        answer = ask(request, metadata=(("authorization", f"Bearer {key}"),), timeout=30)
        return bytes(answer.prediction)


def metrics(server: Any) -> str:
    return str(server.call("GET", "/metrics", api="metrics").body.decode())


def value_of(text: str, name: str, **labels: str) -> float:
    wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
    found = re.search(rf"^{name}{{{re.escape(wanted)},?}} ([0-9.e+]+)$", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def test_a_client_over_its_rate_is_told_when_to_come_back_and_others_go_on(server: Any) -> None:
    assert [predict(server, "slow-key-1").status, predict_by_grpc(server, "slow-key-1")] == [200, b"done"]

    refused = predict(server, "slow-key-1")
    assert (refused.status, refused.json()["type"]) == (429, "TooManyRequestsException")
    assert 1 <= int(refused.headers["retry-after"]) <= 100

    with pytest.raises(grpc.RpcError) as error:
        predict_by_grpc(server, "slow-key-1")
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers: dict[str, Any] = dict(cast("Any", error.value.trailing_metadata()))
    status = Status.FromString(trailers["grpc-status-details-bin"])
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert info.reason == "TOO_MANY_REQUESTS"
    assert 1 <= retry.retry_delay.seconds <= 100

    assert predict(server, "modest-key").status == 200
    text = metrics(server)
    assert value_of(text, "torchere_client_refusals_total", client="slow", budget="client_rate") == 2
    assert value_of(text, "torchere_budget_refusals_total", budget="client_rate") == 2
    assert value_of(text, "torchere_client_predictions_total", client="slow") == 2


@pytest.fixture
def gate(store: Any) -> Any:
    """A file that holds the executor while it is there."""
    path = store.parent / "gate"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def seen_by_handler(gate: Any) -> list[str]:
    """The texts of the requests in the order in which the handler saw them."""
    order = gate.parent / "order"
    return order.read_text().split("\n") if order.exists() else []


def wait_for_handler(gate: Any) -> None:
    """Wait until the handler runs the request that the gate holds."""
    limit_s = time.monotonic() + PATIENCE_S
    while seen_by_handler(gate)[-2:-1] != [str(gate)]:
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def order_after(gate: Any) -> list[str]:
    """Those behind the last gate."""
    seen = seen_by_handler(gate)
    return seen[len(seen) - seen[::-1].index(str(gate)) :]


def wait_for(server: Any, number: int, name: str, **labels: str) -> None:
    """Wait until a metric has a value."""
    limit_s = time.monotonic() + PATIENCE_S
    while (found := value_of(metrics(server), name, **labels)) != number:
        assert time.monotonic() < limit_s, f"{name} is {found}, expected {number}"
        time.sleep(0.01)


def test_a_client_has_no_more_unanswered_predictions_than_it_may(server: Any, gate: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        first = clients.submit(predict, server, "narrow-key", str(gate))
        wait_for_handler(gate)
        assert predict(server, "narrow-key").status == 429
        with pytest.raises(grpc.RpcError) as error:
            predict_by_grpc(server, "narrow-key")
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.unlink()
        assert first.result().status == 200
    assert predict(server, "narrow-key").status == 200
    assert value_of(metrics(server), "torchere_client_predictions_in_flight", client="narrow") == 0


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_a_client_that_fills_the_queue_delays_another_by_one_batch(
    server: Any, gate: Any, protocol: str
) -> None:
    def modest(number: int) -> Any:
        text = f"modest {protocol} {number}"
        if protocol == "grpc":
            return predict_by_grpc(server, "modest-key", text)
        return predict(server, "modest-key", text).body

    with concurrent.futures.ThreadPoolExecutor(80) as clients:
        held = clients.submit(predict, server, "greedy-key", str(gate))
        wait_for_handler(gate)  # a batch may wait for company before
        greedy = [
            clients.submit(predict, server, "greedy-key", f"greedy {protocol} {number}")
            for number in range(62)
        ]
        refused = concurrent.futures.wait(greedy, return_when=concurrent.futures.FIRST_COMPLETED)
        assert {one.result().status for one in refused.done} == {503}
        asked = [clients.submit(modest, number) for number in range(3)]
        wait_for(server, 1 + 60, "torchere_requests_in_flight", model="m", version="1.0")
        wait_for(server, 3, "torchere_client_predictions_in_flight", client="modest")
        gate.unlink()
        assert [one.result() for one in asked] == [b"done"] * 3
        assert held.result().status == 200
        statuses = [one.result().status for one in greedy]
    order = order_after(gate)
    places = sorted(order.index(f"modest {protocol} {number}") for number in range(3))
    assert places[-1] <= 2 + 2 * 3  # behind what the worker had, one in each batch of two
    assert statuses.count(200) + statuses.count(503) == 62
    text = metrics(server)
    displaced = value_of(text, "torchere_client_refusals_total", client="greedy", budget="client_queue_share")
    assert displaced >= 3
