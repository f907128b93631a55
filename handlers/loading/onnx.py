"""ONNX models, where onnxruntime is installed."""

from __future__ import annotations

import importlib
import importlib.util
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
