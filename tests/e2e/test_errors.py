"""What goes wrong at users' hands: a clear cause, a defined answer, and life goes on."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

OK = "def handle(data, context):\n    return data and ['ok'] * len(data)\n"


@pytest.fixture(scope="module")
def healthy(pack: Any, open_server: Any) -> Any:
    """A server with one healthy model."""
    archive = pack("healthy", {"h.py": OK}, handler="h.py")
    assert open_server.register(archive, initial_workers=1).status == 200
    return open_server


@pytest.fixture
def server(healthy: Any) -> Any:
    """The same; its model must still answer after the test, whatever happened to others."""
    yield healthy
    assert healthy.call("GET", "/predictions/healthy").body == b"ok"
    assert healthy.call("GET", "/ping").status == 200


@pytest.mark.parametrize(
    ("files", "model", "cause"),
    [
        ({"h.py": OK}, {"handler": "other.py"}, "other.py"),
        ({"h.py": "import no_such_package\n"}, {"handler": "h.py"}, "no_such_package"),
        ({"h.py": "def handle(:\n"}, {"handler": "h.py"}, "not valid Python"),
        ({"h.py": OK}, {"handler": "image_clasifier"}, "image_classifier"),
        ({"x.txt": ""}, {"handler": "base_handler", "serializedFile": "weights.pt"}, "weights.pt"),
        ({"weights.pt": b"junk"}, {"handler": "base_handler", "serializedFile": "weights.pt"}, "weights.pt"),
    ],
    ids=[
        "missing handler",
        "missing import",
        "syntax error",
        "misspelt",
        "missing weights",
        "broken weights",
    ],
)
def test_a_model_that_does_not_load_names_its_cause_to_client_and_log(
    pack: Any, server: Any, files: dict[str, Any], model: dict[str, str], cause: str
) -> None:
    reply = server.register(pack("broken", files, **model), initial_workers=1)
    assert reply.status == 500
    assert reply.json()["message"] == "Failed to start workers for model broken version: 1.0"
    assert cause in reply.json()["detail"]
    assert server.logs(cause)
    assert (
        server.call("GET", "/models/broken", api="management").status == 404
    )  # it was not left half registered


def test_a_broken_archive_is_refused_by_name(server: Any, store: Path) -> None:
    (store / "torn.mar").write_bytes(b"PK\x03\x04 and then nothing")
    reply = server.register("torn.mar")
    assert reply.status == 400
    assert reply.json()["type"] == "InvalidModelException"
    assert "torn.mar" in reply.json()["detail"]


def test_an_archive_that_reaches_out_is_refused_and_writes_nothing(server: Any, store: Path) -> None:
    with zipfile.ZipFile(store / "slip.mar", "w") as archive:
        archive.writestr("../../../slipped.txt", "x")
        manifest = {
            "runtime": "python",
            "model": {"modelName": "slip", "handler": "h.py", "modelVersion": "1"},
        }
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    reply = server.register("slip.mar")
    assert reply.status == 400
    assert "slipped.txt" in reply.json()["detail"]
    assert list(store.parent.rglob("slipped.txt")) == []


def test_a_wrong_version_is_named(server: Any) -> None:
    reply = server.call("GET", "/predictions/healthy/9.9")
    assert (reply.status, reply.json()["type"]) == (404, "ModelVersionNotFoundException")
    assert reply.json()["message"] == "Model version: 9.9 does not exist for model: healthy"


def test_what_a_handler_raises_is_for_the_log_and_not_for_the_client(pack: Any, server: Any) -> None:
    server.register(
        pack("bug", {"h.py": "def handle(data, context):\n    return data and secret\n"}, handler="h.py"),
        initial_workers=1,
    )
    reply = server.call("POST", "/predictions/bug", b"x")
    assert (reply.status, reply.json()["message"]) == (503, "Prediction failed")
    assert b"secret" not in reply.body
    assert server.logs("NameError: name 'secret' is not defined")


class FlatMean(torch.nn.Module):
    """A classifier of three classes whose probabilities depend on the mean colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3))


@pytest.fixture(scope="module")
def classifier(pack: Any, healthy: Any, store: Path) -> Any:
    """An `image_classifier` archive on executor threads."""
    with torch.no_grad():
        torch.jit.script(FlatMean()).save(str(store.parent / "flat.pt"))
    files = {
        "flat.pt": (store.parent / "flat.pt").read_bytes(),
        "index_to_name.json": '{"0": "red", "1": "green", "2": "blue"}',
    }
    archive = pack("colours", files, handler="image_classifier", serializedFile="flat.pt")
    assert healthy.register(archive, initial_workers=2).status == 200
    return healthy


def picture(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (320, 240), colour).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_built_in_handler_classifies_a_picture_in_threads_of_one_worker(classifier: Any) -> None:
    for colour in ("red", "green", "blue"):
        reply = classifier.call(
            "POST", "/predictions/colours", picture("lime" if colour == "green" else colour)
        )
        assert reply.status == 200
        assert next(iter(reply.json())) == colour
    described = classifier.call("GET", "/models/colours", api="management").json()[0]
    assert len(described["workers"]) == 2
    (pid,) = {worker["pid"] for worker in described["workers"]}
    assert pid != classifier.process.pid


@pytest.mark.parametrize(
    "body", [b"this is no picture", b"", picture("red")[:60]], ids=["text", "nothing", "torn"]
)
def test_a_body_that_is_not_an_image_is_the_clients_fault_and_says_so(classifier: Any, body: bytes) -> None:
    reply = classifier.call("POST", "/predictions/colours", body)
    assert reply.status == 400
    assert "image" in reply.json()["message"]
    assert "image" in classifier.log()


def test_a_body_over_the_limit_is_refused_unread(classifier: Any) -> None:
    assert classifier.call("POST", "/predictions/colours", b"0" * 7_000_000).status == 413


def test_an_unusable_port_ends_the_start_with_a_sentence(server: Any, start_server: Any) -> None:
    taken = server.rest["inference"]
    with pytest.raises(AssertionError, match="the server ended with 1") as caught:
        start_server("--disable-token-auth", properties=f"inference_address=http://{taken}\n")
    assert f"Cannot listen on http://{taken}" in str(caught.value)
