from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.context import Context
from torchere.handlers.loading.onnx import load_onnx
from torchere.handlers.tensor_handler import TensorHandler


class Session:
    """Doubles its input, and tells what it was asked for."""

    def __init__(self, path: str, *, sess_options: Any, providers: list[Any]) -> None:
        self.providers = providers
        self.threads = sess_options.intra_op_num_threads

    def get_inputs(self) -> list[Any]:
        return [types.SimpleNamespace(name="input")]

    def run(self, names: None, arrays: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        return [arrays["input"] * 2]


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime on a machine with GPUs."""
    module: Any = types.ModuleType("onnxruntime")
    module.__spec__ = types.SimpleNamespace()  # what find_spec looks at
    module.SessionOptions, module.InferenceSession = types.SimpleNamespace, Session
    monkeypatch.setitem(sys.modules, "onnxruntime", module)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "m.onnx").touch()
    return str(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("device", "providers"),
    [
        ("cpu", ["CPUExecutionProvider"]),
        ("cuda:1", [("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider"]),
    ],
)
def test_a_session_runs_on_the_gpu_of_its_executor(file: str, device: str, providers: list[Any]) -> None:
    assert load_onnx(file, torch.device(device)).providers == providers


def test_a_session_has_as_many_threads_as_its_executor_may_use_for_torch(file: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # as the worker does before it loads
    try:
        assert load_onnx(file, torch.device("cpu")).threads == 3
    finally:
        torch.set_num_threads(before)


def test_a_model_whose_weights_lie_outside_of_the_archive_does_not_reach_the_runtime(file: str) -> None:
    entry = b"\x0a\x08location\x12\x08../w.bin"
    tensor = b"\x6a" + bytes([len(entry)]) + entry  # TensorProto.external_data
    graph = b"\x2a" + bytes([len(tensor)]) + tensor  # GraphProto.initializer
    Path(file).write_bytes(b"\x08\x08\x3a" + bytes([len(graph)]) + graph)
    with pytest.raises(RuntimeError, match=r"its weights are said to lie in '../w.bin'"):
        load_onnx(file, torch.device("cpu"))


def test_tensors_for_a_session_on_a_gpu_stay_where_it_takes_them_from(
    tmp_path: Path,
    make_context: Callable[..., Context],
    begin: Callable[[Context], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda:1")
    monkeypatch.setattr("torchere.handlers.base.choose_device", lambda *_: gpu)
    taken, given = (TensorSpec(name, "FP32", (-1, 2)) for name in ("input", "output"))
    (tmp_path / "signature.json").write_text(Signature((taken,), (given,)).to_json())
    (tmp_path / "m.onnx").touch()
    context = make_context(tmp_path, model={"serializedFile": "m.onnx"})
    handler = TensorHandler()
    handler.initialize(context)
    begin(context)
    assert handler.handle([{"input": [1, 2]}], context) == [[2, 4]]
