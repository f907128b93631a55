"""An archive that is overwritten in the store while its model is served."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive

WIDTH = 3200  # one square float32 layer has 41 MB, which stay in the archive at first
BODY = json.dumps({"instances": [[0.5] * WIDTH]}).encode()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "w.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(WIDTH, WIDTH, bias=False).eval()), str(path))
    return path


def predict(server: Any, name: str) -> Any:
    reply = server.call("POST", f"/predictions/{name}", BODY, content_type="application/json")
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    options = ("--disable-token-auth", "--enable-model-api")
    return start_server(*options, properties="service_envelope=json\n")


@pytest.fixture(scope="module")
def archive(store: Path, weights: Path) -> Path:
    request = ArchiveRequest(
        model_name="large",
        version="1.0",
        serialized_file=str(weights),
        handler="base_handler",
        export_path=str(store),
    )
    return write_archive(request)


def test_a_model_that_comes_and_goes_answers_each_time(server: Any, archive: Path) -> None:
    answers = []
    for _ in range(3):  # each time it goes before its weights are copied
        assert server.register(archive.name, initial_workers=1, synchronous="true").status == 200
        answers.append(predict(server, "large"))
        assert server.call("DELETE", "/models/large", api="management").status == 200
    assert answers == answers[:1] * 3


def test_a_model_outlives_what_becomes_of_its_archive(server: Any, archive: Path) -> None:
    assert server.register(archive.name, initial_workers=1, synchronous="true").status == 200
    expected = predict(server, "large")
    archive.write_bytes(b"cut short, and something else")
    assert [predict(server, "large") for _ in range(3)] == [expected] * 3
    assert server.call("GET", "/ping").json() == {"status": "Healthy"}
    more = server.call("PUT", "/models/large?min_worker=2&synchronous=true", api="management")
    assert more.status == 200
    assert predict(server, "large") == expected
    assert server.call("DELETE", "/models/large", api="management").status == 200
    assert server.register(archive.name).status == 400


LISTING = """
from pathlib import Path

def handle(data, context):
    folder = Path(context.system_properties["model_dir"], "models")
    return data and [sorted(path.name for path in folder.iterdir()) if folder.exists() else []]
"""


def test_an_archive_that_is_added_to_and_registered_again_is_served_as_it_is(
    server: Any, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "h.py").write_text(LISTING)
    request = ArchiveRequest(
        model_name="listing", version="1.0", handler=str(tmp_path / "h.py"), export_path=store
    )
    path = write_archive(request)
    answers = []
    for added in ("a.bin", "b.bin"):
        with zipfile.ZipFile(path, "a") as changed:
            changed.writestr(f"models/{added}", "weights")
        assert server.register(path.name, initial_workers=1, synchronous="true").status == 200
        answers += predict(server, "listing")["predictions"]
        assert server.call("DELETE", "/models/listing", api="management").status == 200
    assert answers == [["a.bin"], ["a.bin", "b.bin"]]
    assert server.log().count("was changed after packing") == 2  # once for each registration
