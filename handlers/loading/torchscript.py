"""Loads TorchScript for all handlers: checked, in eval mode, on a CPU memory-mapped and optimised."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from torchere.archiver.models.load.torchscript import load_script, optimized, using
from torchere.archiver.scan import UnsafeModel
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.loading.weights import WORTH_MAPPING_BYTES, file_to_map

logger = logging.getLogger(__name__)

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

    Thread-safe: a process loads one module at a time. Several threads may call the module at once.

    Args:
        path: the file.
        device: the device of the parameters.
        options: the archive's TorchScript options. The module is optimised on a CPU only, and is served
            unoptimised if that fails.

    Raises:
        ValueError: this build of torch has no int8 engine of the name in `options`.
        RuntimeError: the file is not TorchScript, does not load, or its code could read or write files.
    """
    with using(options.quantized_engine):  # for the optimiser, too, which packs weights
        module = _load(path, device, check=True)
        if options.optimize_for_inference and torch.device(device).type == "cpu":
            try:
                return optimized(module, _most_packed_bytes)
            except RuntimeError as err:
                logger.warning("%s is served as it is, for it can't be optimised: %s", path, err)
                module = _load(path, device, check=False)  # the failed attempt may have changed it
    return module


def _in_eval_mode(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    for parameter in module.parameters():
        # Otherwise TorchScript plans for gradients when a handler calls it outside inference mode, and the
        # next call in inference mode fails: "Inference tensors cannot be saved for backward".
        parameter.requires_grad_(False)
    if getattr(module, "training", False):  # frozen modules have no such attribute
        module.eval()
    return module


def _load(path: str, device: torch.device | str, *, check: bool) -> torch.jit.ScriptModule:
    try:
        on_cpu = torch.device(device).type == "cpu"
        mapped = file_to_map(path) if on_cpu and os.path.getsize(path) >= WORTH_MAPPING_BYTES else None
        return _in_eval_mode(load_script(path, check=check, device=device, map_file=mapped))
    except UnsafeModel as err:
        raise RuntimeError(
            f"{path} can't be loaded as TorchScript, for its code could read or write any file: {err}; "
            "expected a file of torch.jit.save, without that. A handler of the archive's own can load it "
            "with torch.jit.load; if it holds a state_dict, name the file with the model's class with "
            "--model-file"
        ) from err
    except RuntimeError as err:
        raise RuntimeError(
            f"{path} can't be loaded as TorchScript ({err}); expected a file written by torch.jit.save. "
            "If it holds a state_dict, name the file with the model's class with --model-file"
        ) from err


# A module that changes its own state in `forward` (it counts, caches, or computes in its own buffer) gives
# wrong results if several threads run it at once. In TorchServe it works: each worker has its own copy.

# The kinds of nodes that read the module's own state, in the graph of `forward` with all methods inlined.
_ITS_OWN = ("prim::GetAttr", "prim::Constant")
_CHANGES = ("prim::SetAttr", "prim::CallMethod")  # a method that can't be inlined may do anything


def changes_itself(module: torch.jit.ScriptModule) -> bool:
    """Return whether `forward` of a module in eval mode may change the module's tensors, lists or attributes.

    The answer is from torch's alias analysis, which is conservative: True may be wrong, False is not.
    """
    graph: Any = module.inlined_graph  # a copy
    _take_as_not_training(graph)
    if any(graph.findAllNodes(kind, True) for kind in _CHANGES):
        return True
    aliases = graph.alias_db()
    own = [node.output() for kind in _ITS_OWN for node in graph.findAllNodes(kind, True)]
    return any(aliases.has_writers(value) for value in own if _can_change(value))


def _take_as_not_training(graph: Any) -> None:
    """Remove the code for training only, such as the batch counter of batch normalisation."""
    passes: Any = torch._C
    graph.setInsertPoint(next(graph.nodes(), graph.return_node()))
    false = graph.insertConstant(False)
    for node in graph.findAllNodes("prim::GetAttr", True):
        if node.s("name") == "training":
            node.output().replaceAllUsesWith(false)
    passes._jit_pass_constant_propagation_immutable_types(graph)
    passes._jit_pass_dce(graph)


def _can_change(value: Any) -> bool:
    """Return whether a value is writable: not a module, whose attributes are checked, a scalar or a text."""
    return not str(value.type()).startswith(("__torch__.", "int", "float", "bool", "str", "NoneType"))
