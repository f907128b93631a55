"""Names, numbers and scrapes that no operator should send, to a real server that goes on as before.

`docs/bad-inputs.md` names these tests.
"""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

HANDLER = """
class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["ok"] * len(data)
"""
NAMES = [
    *(" ", ".", "..", "a/b", "a\\b", "a\0b", "-a", "é", "\U0001f600", "\u202eevil", "a" * 3000, "a\nb"),
    *("ping ", "v2/models", "%2e%2e", "a;b", "a=b", "{model}", "*", "?", "#"),
]


@pytest.fixture(scope="module")
def server(start_server: Any, pack: Any) -> Any:
    """A server with a model, without tokens."""
    pack("good", {"h.py": HANDLER}, handler="h.py")
    running = start_server("--disable-token-auth", "--enable-model-api", "--models", "good.mar")
    running.until_ready()
    return running


@pytest.fixture(autouse=True)
def goes_on(server: Any) -> Any:
    """The model answers as before, behind each test."""
    yield
    assert server.call("POST", "/predictions/good", b"x").body == b"ok"


def labels(server: Any) -> set[str]:
    text = server.call("GET", "/metrics", api="metrics").body.decode()
    return set(re.findall(r'(?:model|model_name|ModelName)="([^"]*)"', text))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_registered_under_no_name_that_could_be_a_path(server: Any, name: str) -> None:
    reply = server.register("good.mar", model_name=quote(name, safe=""), initial_workers=0)
    assert reply.status == 400
    assert "Model name" in reply.json()["message"]


@pytest.mark.parametrize("name", ["ping", "v2", "models", "metrics", "predictions", "api-description"])
def test_names_of_paths_are_names_like_others(server: Any, name: str) -> None:
    assert server.register("good.mar", model_name=name, initial_workers=0).status == 200
    assert server.call("GET", f"/models/{name}", api="management").json()[0]["modelName"] == name
    assert server.call("GET", "/ping").status == 200
    assert server.call("DELETE", f"/models/{name}", api="management").status == 200


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_such_a_name_is_found_nowhere(server: Any, method: str, name: str) -> None:
    reply = server.call(method, f"/models/{quote(name, safe='')}", api="management")
    assert reply.status in (400, 404, 405)


def test_names_of_clients_are_no_labels_of_metrics(server: Any) -> None:
    before = labels(server)
    for number in range(100):
        server.call("POST", f"/predictions/attack{number}", b"x")
        server.call("GET", f"/models/attack{number}", api="management")
    assert labels(server) | before <= {"good", ""}


@pytest.mark.parametrize(
    "query",
    [
        *("min_worker=-1&max_worker=1", "min_worker=3&max_worker=2", "min_worker=one", "min_worker=1.5"),
        *("min_worker=1000000000&max_worker=1000000000", "min_worker=9999999999999999999999"),
    ],
)
def test_numbers_of_workers_that_make_no_sense_change_nothing(server: Any, query: str) -> None:
    assert server.call("PUT", f"/models/good?{query}", api="management").status == 400
    described = server.call("GET", "/models/good", api="management").json()[0]
    assert (described["minWorkers"], described["maxWorkers"]) == (1, 1)


def test_scaling_to_nothing_and_back_in_quick_turns_ends_as_the_last_call_says(server: Any) -> None:
    for number in (0, 1, 0, 1, 0, 1):
        query = f"min_worker={number}&max_worker={number}"
        assert server.call("PUT", f"/models/good?{query}", api="management").status == 202
    reply = server.call("PUT", "/models/good?min_worker=1&synchronous=true", api="management")
    assert reply.status == 200
    assert len(server.call("GET", "/models/good", api="management").json()[0]["workers"]) == 1


def test_a_hundred_scrapers_and_one_that_never_reads_are_served(server: Any) -> None:
    host, _, port = server.rest["metrics"].rpartition(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        with ThreadPoolExecutor(20) as pool:
            replies = pool.map(lambda _: server.call("GET", "/metrics", api="metrics").status, range(100))
            assert set(replies) == {200}
