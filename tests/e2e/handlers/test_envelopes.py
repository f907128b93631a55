"""The envelopes, which are a property of the server: one server for each.

Those of other tests: `body` in `e2e/test_rooms.py`, `kserve` in `conformance/suite/files.py`.
"""

import base64
import json
from typing import Any

import pytest


@pytest.fixture
def served(pack_one: Any, start_server: Any, client_of: Any) -> Any:
    """`served(envelope, model)`: a client of a server with that envelope and one model."""
    servers = []

    def serve(envelope: str, model: str) -> Any:
        pack_one(model)
        arguments = ("--disable-token-auth", "--models", f"{model}.mar")
        servers.append(start_server(*arguments, properties=f"service_envelope={envelope}\n"))
        servers[-1].follow(f"{model}:1.0 is ready")
        return client_of(servers[-1])

    yield serve
    for server in servers:
        server.stop()


def test_an_envelope_unwraps_what_the_base_handler_gets(served: Any) -> None:
    body = json.dumps({"instances": [[1, 2], [3, 4]]}).encode()
    reply = served("json", "line").call("line", body, content_type="application/json")
    assert (reply.status, reply.body) == (200, b'{"predictions": [[3, 5], [7, 9]]}')


def test_the_v2_envelope_brings_base64_pictures_to_a_classifier(served: Any, picture: Any) -> None:
    client = served("kservev2", "colours")
    tensor = {"name": "cat", "shape": [1], "datatype": "BYTES"}
    tensor["data"] = [base64.b64encode(picture("blue")).decode()]
    answer = client.send_json("colours", {"id": "7", "inputs": [tensor]})
    (output,) = answer.pop("outputs")
    assert answer == {"id": "7", "model_name": "colours", "model_version": "1.0"}
    assert (output["name"], output["datatype"], output["shape"]) == ("cat", "BYTES", [1])
    assert next(iter(output["data"][0])) == "blue"
