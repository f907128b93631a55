"""The start-up models are unpacked, and torch is mapped, before the server's modules are imported."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from torchere.serving.preparation import preparation
from torchere.serving.settings import ServerSettings

MANIFEST = '{"runtime": "python", "model": {"modelName": "m", "modelVersion": "1.0", "handler": "h.py"}}'


def test_a_start_up_model_is_ready_to_take_and_nothing_stays_behind(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "temp").mkdir()
    with zipfile.ZipFile(tmp_path / "store" / "m.mar", "w") as archive:
        archive.writestr("h.py", "")
        archive.writestr("MAR-INF/MANIFEST.json", MANIFEST)
    settings = ServerSettings(
        model_store=tmp_path / "store",
        temp_dir=tmp_path / "temp",
        load_models=("m=m.mar", "https://127.0.0.1/other.mar"),
    )
    with preparation(settings) as prepared:
        stored = prepared.ahead.take("m.mar", prepared.store.open("m.mar"))
        assert stored is not None
        assert stored.directory.is_dir()
    assert list((tmp_path / "temp").iterdir()) == []


def store_with(tmp_path: Path, handler: str) -> ServerSettings:
    (tmp_path / "store").mkdir()
    (tmp_path / "temp").mkdir()
    with zipfile.ZipFile(tmp_path / "store" / "m.mar", "w") as archive:
        archive.writestr("h.py", "")
        archive.writestr("m.pt", "")
        manifest = json.loads(MANIFEST)
        manifest["model"] |= {"handler": handler, "serializedFile": "m.pt"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    return ServerSettings(
        model_store=tmp_path / "store", temp_dir=tmp_path / "temp", load_models=("missing.mar", "m.mar")
    )


def test_the_fork_server_is_started_for_a_model_that_runs_in_processes(tmp_path: Path) -> None:
    with preparation(store_with(tmp_path, "h.py")) as prepared:
        assert prepared.fork_server is not None
        process = prepared.fork_server.process
        assert process.poll() is None
    assert process.poll() is not None


def test_models_that_run_in_threads_need_none(tmp_path: Path) -> None:
    with preparation(store_with(tmp_path, "image_classifier")) as prepared:
        assert prepared.fork_server is None


def test_preparing_imports_neither_torch_nor_a_frontend_and_torch_works_after_it() -> None:
    code = """
import sys
import torchere.serving.preparation
from torchere.serving.torch_mapping import map_torch
print(sorted({"torch", "fastapi", "grpc"} & set(sys.modules)))
map_torch()
import torch
print(torch.ones(2, 2).matmul(torch.ones(2, 1)).tolist())
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["[]", "[[2.0], [2.0]]"]
