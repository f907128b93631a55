"""Threads for a compiled model without Python of its own, processes for the rest, a shared one when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchere.serving.config.server_settings import ModelSettings
from torchere.serving.store.package import StoredArchive
from torchere.serving.workers.isolation import choose_isolation


def chosen(
    wanted: Any, handler: str, model: dict[str, str], *, holds_gil=False, gpu_ids=(), may_share=True
) -> str:
    archive = StoredArchive("m.mar", Path(), {"model": model}, holds_gil=holds_gil)
    settings = ModelSettings(isolation=wanted, gpu_ids=gpu_ids)
    return choose_isolation(archive, settings, handler, may_share=may_share)


@pytest.mark.parametrize("file", ["net.pt", "net.pt2"])
def test_a_compiled_model_under_a_built_in_handler_runs_in_threads(file: str) -> None:
    assert chosen("auto", "image_classifier", {"serializedFile": file}) == "thread"


@pytest.mark.parametrize(
    ("handler", "model"),
    [
        ("handler.py:Own", {"serializedFile": "net.pt"}),
        ("base_handler", {"serializedFile": "net.pth", "modelFile": "net.py"}),
        ("base_handler", {"serializedFile": "net.onnx"}),
        ("base_handler", {}),
    ],
)
def test_python_of_the_archives_own_gets_a_process(handler: str, model: dict[str, str]) -> None:
    assert chosen("auto", handler, model) == "process"


def test_a_model_that_keeps_the_gil_gets_processes() -> None:
    model = {"serializedFile": "net.pt2"}
    assert chosen("auto", "base_handler", model, holds_gil=True) == "process"


def test_on_a_gpu_every_executor_is_a_process() -> None:
    model = {"serializedFile": "net.pt"}
    assert chosen("auto", "base_handler", model, gpu_ids=(0,)) == "process"


@pytest.mark.parametrize("wanted", ["thread", "process"])
def test_what_the_operator_says_is_done(wanted: str) -> None:
    model = {"serializedFile": "net.pt2"}
    assert chosen(wanted, "own.py", model, holds_gil=True) == wanted


@pytest.mark.parametrize("file", ["net.pt", "net.pt2"])
def test_a_compiled_model_shares_a_process_where_that_is_wanted(file: str) -> None:
    assert chosen("shared", "image_classifier", {"serializedFile": file}) == "shared"


@pytest.mark.parametrize(
    ("handler", "model", "facts"),
    [
        ("handler.py:Own", {"serializedFile": "net.pt"}, {}),
        ("base_handler", {"serializedFile": "net.pth", "modelFile": "net.py"}, {}),
        ("base_handler", {"serializedFile": "net.onnx"}, {}),
        ("base_handler", {"serializedFile": "net.pt2"}, {"holds_gil": True}),
        ("base_handler", {"serializedFile": "net.pt"}, {"gpu_ids": (0,)}),
        ("base_handler", {"serializedFile": "net.pt"}, {"may_share": False}),
    ],
)
def test_what_can_not_share_a_process_gets_what_auto_gives(
    handler: str, model: dict[str, str], facts: dict[str, Any]
) -> None:
    given = chosen("shared", handler, model, **facts)
    assert given == chosen("auto", handler, model, **facts) != "shared"
