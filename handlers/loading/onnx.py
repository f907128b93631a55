"""ONNX models, where onnxruntime is installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.onnx import check_external_files


def load_onnx(path: str, device: torch.device) -> Any:
    """Return an `onnxruntime.InferenceSession` for the file, on the GPU if `device` is a CUDA device.

    Raises:
        RuntimeError: onnxruntime is not installed, or the model names files outside of the archive.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeError(
            f"No model weights could be loaded: {path} needs onnxruntime, which is not installed; "
            "install onnxruntime or onnxruntime-gpu in the server's environment"
        )
    try:
        check_external_files(Path(path))
    except ModelRefused as err:
        raise RuntimeError(f"No model weights could be loaded: {err}") from err
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # the executor's share of the cores, as for torch
    wanted = [("CUDAExecutionProvider", {"device_id": device.index or 0})] if device.type == "cuda" else []
    return runtime.InferenceSession(path, sess_options=options, providers=[*wanted, "CPUExecutionProvider"])
