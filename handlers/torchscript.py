"""Loads TorchScript for all handlers; on a CPU the weights are mapped (`torchscript_mapped.py`)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

import torch

from torchere.archiver.models.load.torchscript import optimized
from torchere.archiver.scan.torchscript import UnsafeScript, check_script
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.torchscript_mapped import load_mapped

logger = logging.getLogger(__name__)

# Guards `torch.backends.quantized.engine`, which is process-wide and decides how packed int8 weights are
# rebuilt while a module loads. Every load takes the lock, so that none sees the engine of another load.
_LOAD_LOCK = threading.Lock()
_AS_IT_IS = TorchScriptOptions()
# Each worker process has its own packed weights, but all share the mapped weights of the file.
_MOST_PACKED_BYTES_OF_A_WORKER = 64 * 2**20
_most_packed_bytes: int | None = None  # None: all; set once, before anything is loaded


def spare_memory() -> None:
    """Limit optimised linear layers to 64 MiB in this process, one of several workers of a model."""
    global _most_packed_bytes  # noqa: PLW0603  # the role of a process is process-wide
    _most_packed_bytes = _MOST_PACKED_BYTES_OF_A_WORKER


def load_torchscript(
    path: str, device: torch.device | str, options: TorchScriptOptions = _AS_IT_IS
) -> torch.jit.ScriptModule:
    """Load a module saved with `torch.jit.save`, in eval mode, its parameters without gradients.

    Thread-safe; loads in one process run one after the other. Several threads may call the module at once.

    Args:
        path: the file.
        device: the device of the parameters.
        options: the archive's TorchScript options. The module is optimised on a CPU only, and is served
            unoptimised if that fails.

    Raises:
        ValueError: this build of torch has no int8 engine of the name in `options`.
        RuntimeError: the file is not TorchScript, does not load, or its code could read or write files.
    """
    _refuse_file_access(path)
    with _LOAD_LOCK, _engine(options.quantized_engine):
        module = _in_eval_mode(_load(path, device))
        if options.optimize_for_inference and torch.device(device).type == "cpu":
            try:
                return optimized(module, _most_packed_bytes)
            except RuntimeError as err:
                logger.warning("%s is served as it is, for it can't be optimised: %s", path, err)
                module = _in_eval_mode(_load(path, device))  # the failed attempt may have changed it
    return module


def _refuse_file_access(path: str) -> None:
    """Reject code with file operators, since TorchScript runs some of its code while it is loaded."""
    try:
        with open(path, "rb") as file:
            check_script(file, os.path.getsize(path))
    except UnsafeScript as err:
        raise RuntimeError(
            f"{path} can't be loaded as TorchScript, for its code could read or write any file: {err}; "
            "expected what torch.jit.save writes, without that. A handler of the archive's own can load it "
            "with torch.jit.load; if it holds a state_dict, name the file with the model's class with "
            "--model-file"
        ) from err


def _in_eval_mode(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    for parameter in module.parameters():
        # Otherwise TorchScript plans for gradients when a handler calls it outside inference mode, and the
        # next call in inference mode fails: "Inference tensors cannot be saved for backward".
        parameter.requires_grad_(False)
    if getattr(module, "training", False):  # frozen modules have no such attribute
        module.eval()
    return module


def _load(path: str, device: torch.device | str) -> torch.jit.ScriptModule:
    try:
        if torch.device(device).type == "cpu" and (mapped := load_mapped(path)) is not None:
            return mapped
        module: torch.jit.ScriptModule = torch.jit.load(  # type: ignore[no-untyped-call]
            path, map_location=device
        )
    except RuntimeError as err:
        raise RuntimeError(
            f"{path} can't be loaded as TorchScript ({err}); expected a file written by torch.jit.save. "
            "If it holds a state_dict, name the file with the model's class with --model-file"
        ) from err
    return module


@contextlib.contextmanager
def _engine(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    supported = torch.backends.quantized.supported_engines
    if name not in supported:
        raise ValueError(
            f"torchscript.quantized_engine is {name!r}, which this build of torch does not have; "
            f"expected one of {', '.join(supported)}"
        )
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
