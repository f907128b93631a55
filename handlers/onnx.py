"""ONNX models, where onnxruntime is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import psutil


def load_onnx(path: str, map_location: str | None) -> Any:
    """An `onnxruntime.InferenceSession` for the file, on CUDA when `map_location` is "cuda".

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
    options.intra_op_num_threads = psutil.cpu_count(logical=True) or 1
    wanted = ["CUDAExecutionProvider"] if map_location == "cuda" else []
    return runtime.InferenceSession(path, sess_options=options, providers=[*wanted, "CPUExecutionProvider"])
