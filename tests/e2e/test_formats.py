"""Models that `torchere archive` makes without any handler code, served by a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
