"""Models that `torchere archive` makes without any handler code, served by a real server."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.serving.commands.cli import main

MODEL = """\
import torch


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return {"scaled": x * self.factor, "total": (x * self.factor).sum(1)}
"""
FORMATS = ("keep", "torchscript", "export")


@pytest.fixture(scope="module")
def server(store: Path, start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "scale.py").write_text(MODEL)
    (folder / "example.json").write_text("[[0.5, 1.5, 2.5, 3.5], [1.0, 2.0, 3.0, 4.0]]")
    torch.save({"module.factor": torch.full((4,), 3.0)}, folder / "scale.pth")
    for name in FORMATS:
        arguments = ["archive", f"--model-name={name}", f"--format={name}", f"--export-path={store}"]
        arguments += [f"--model-file={folder}/scale.py", f"--serialized-file={folder}/scale.pth"]
        arguments += [f"--example={folder}/example.json", "--dynamic-batch=1:16", "--no-verify"]
        assert main(arguments) == 0
    running = start_server("--disable-token-auth", "--enable-model-api")
    for name in FORMATS:
        reply = running.register(f"{name}.mar", initial_workers=1, synchronous="true", batch_size=4)
        assert reply.status == 200, running.log()
    return running


@pytest.mark.parametrize("name", FORMATS)
def test_a_list_is_answered_with_the_models_outputs_by_name(server: Any, name: str) -> None:
    body = json.dumps([1.0, 2.0, 3.0, 4.0]).encode()
    reply = server.call("POST", f"/predictions/{name}", body, content_type="application/json")
    assert reply.status == 200, reply.body
    assert reply.json() == {"scaled": [3.0, 6.0, 9.0, 12.0], "total": 30.0}


@pytest.mark.parametrize("name", FORMATS)
def test_the_open_inference_protocol_takes_the_names_of_the_signature(server: Any, name: str) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1, 0, 0, 0, 0, 0, 0, 2]}
    body = json.dumps({"inputs": [tensor]}).encode()
    reply = server.call("POST", f"/v2/models/{name}/infer", body, content_type="application/json")
    assert reply.status == 200, reply.body
    outputs = {
        item["name"]: (item["datatype"], item["shape"], item["data"]) for item in reply.json()["outputs"]
    }
    assert outputs["total"] == ("FP32", [2], [3.0, 6.0])
    assert outputs["scaled"][:2] == ("FP32", [2, 4])


class Ids(torch.nn.Module):
    """Gives each token the vector (its number, 0)."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.stack([ids * mask, torch.zeros_like(ids)], dim=2).float()


@pytest.fixture(scope="module")
def vectors(server: Any, pack: Callable[..., str]) -> Any:
    """The server, with `text_embedding` as the model `vectors`."""
    tokenizers = pytest.importorskip("tokenizers", reason="install torchere[tokenizers]")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "cats": 2, "sleep": 4}, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = io.BytesIO()
    torch.jit.save(torch.jit.script(Ids().eval()), model)
    files = {
        "model.pt": model.getvalue(),
        "tokenizer.json": tokenizer.to_str(),
        "model-config.yaml": "handler: {text_embedding: {normalize: false}}",
    }
    described = {"serializedFile": "model.pt", "configFile": "model-config.yaml"}
    archive = pack("vectors", files, handler="text_embedding", **described)
    reply = server.register(archive, initial_workers=1, synchronous="true")
    assert reply.status == 200, server.log()
    return server


def test_the_openai_client_gets_embeddings(vectors: Any) -> None:
    openai = pytest.importorskip("openai", reason="openai's parser of JSON has no wheel for Python 3.10")
    url = f"http://{vectors.rest['inference']}/predictions/vectors/1.0/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="vectors", input=["cats sleep", "sleep"])
        assert [one.embedding for one in answer.data] == [[3.0, 0.0], [4.0, 0.0]]
        assert (answer.model, answer.usage.prompt_tokens) == ("vectors", 3)
        answer = client.embeddings.create(
            model="vectors", input="cats", encoding_format="float", dimensions=2
        )
        assert answer.data[0].embedding == [2.0, 0.0]
        with pytest.raises(openai.BadRequestError, match="takes no token ids"):
            client.embeddings.create(model="vectors", input=[2, 4])


def test_openais_requests_are_answered_in_its_form(vectors: Any) -> None:
    def asked(**body: object) -> Any:
        headers = {"content-type": "application/json", "authorization": "Bearer none"}
        path = "/predictions/vectors/1.0/v1/embeddings"
        return vectors.call("POST", path, json.dumps(body).encode(), headers=headers)

    reply = asked(input=["cats sleep", "sleep"], model="vectors", encoding_format="base64")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json"), reply.body
    answer = reply.json()
    found = [
        np.frombuffer(base64.b64decode(line.pop("embedding")), "<f4").tolist() for line in answer["data"]
    ]
    assert found == [[3.0, 0.0], [4.0, 0.0]]
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}],
        "model": "vectors",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert asked(input="cats", model="vectors").json()["data"][0]["embedding"] == [2.0, 0.0]
    reply = asked(input=[2, 4], model="vectors")
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert "takes no token ids" in reply.json()["message"]
