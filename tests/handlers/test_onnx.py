from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from torchere.handlers.onnx import load_onnx


class Runtime(types.ModuleType):
    """An onnxruntime on a machine with GPUs: its sessions tell what they were asked for."""

    SessionOptions = types.SimpleNamespace

    def InferenceSession(self, path: str, *, sess_options: Any, providers: list[Any]) -> list[Any]:
        return providers


@pytest.mark.parametrize(
    ("device", "providers"),
    [
        ("cpu", ["CPUExecutionProvider"]),
        ("cuda:1", [("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider"]),
    ],
)
def test_a_session_runs_on_the_gpu_of_its_executor(
    device: str, providers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime("onnxruntime")
    runtime.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]  # what find_spec looks at
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    assert load_onnx("m.onnx", torch.device(device)) == providers
