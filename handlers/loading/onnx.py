"""ONNX models, where onnxruntime is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def load_onnx(path: str, device: torch.device) -> Any:
    """Return an `onnxruntime.InferenceSession` for the file, on the GPU if `device` is a CUDA device.

    Raises:
        RuntimeError: onnxruntime is not installed.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeError(
            f"No model weights could be loaded: {path} needs onnxruntime, which is not installed; "
            "install onnxruntime or onnxruntime-gpu in the server's environment"
        )
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # the executor's share of the cores, as for torch
    wanted = [("CUDAExecutionProvider", {"device_id": device.index or 0})] if device.type == "cuda" else []
    return runtime.InferenceSession(path, sess_options=options, providers=[*wanted, "CPUExecutionProvider"])


def as_function(session: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the session as a function of tensors, one per input in order; its results are on the CPU.

    The session may be called from several threads at once, and so may the function.
    """
    names = [item.name for item in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = {name: tensor.cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return tuple(torch.from_numpy(result) for result in session.run(None, arrays))

    return run
