"""The one place that loads TorchScript; on a CPU its weights stay in the file (`torchscript_mapped.py`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from torchere.handlers.torchscript_mapped import load_mapped

# Guards `torch.backends.quantized.engine`, which is process-wide and decides how packed int8 weights are
# rebuilt while a module loads. Every load takes it: one without a wish must not see another's.
_LOAD_LOCK = threading.Lock()


def load_torchscript(
    path: str, device: torch.device | str, quantized_engine: str | None = None
) -> torch.jit.ScriptModule:
    """Load a module saved with `torch.jit.save`, in eval mode, its parameters without gradients.

    Thread-safe; loads in one process run one after the other. The module may be called from several threads
    at once.

    Args:
        path: the file.
        device: where its parameters go.
        quantized_engine: name of the engine that its int8 weights are packed for ("onednn", "x86", ...); None
            keeps the process's.

    Raises:
        ValueError: this build of torch has no such engine.
        RuntimeError: the file is not TorchScript, or does not load.
    """
    with _LOAD_LOCK, _engine(quantized_engine):
        try:
            module = _load(path, device)
        except RuntimeError as err:
            raise RuntimeError(
                f"{path} can't be loaded as TorchScript ({err}); expected a file written by torch.jit.save. "
                "If it holds a state_dict, name the file with the model's class with --model-file"
            ) from err
    for parameter in module.parameters():
        # Else TorchScript plans for gradients when a handler calls it outside inference mode, and the next
        # call inside fails: "Inference tensors cannot be saved for backward".
        parameter.requires_grad_(False)
    if getattr(module, "training", False):  # frozen modules have no such attribute
        module.eval()
    return module


def _load(path: str, device: torch.device | str) -> torch.jit.ScriptModule:
    if torch.device(device).type == "cpu" and (mapped := load_mapped(path)) is not None:
        return mapped
    module: torch.jit.ScriptModule = torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call]
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
