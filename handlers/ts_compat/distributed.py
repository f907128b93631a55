"""TorchServe's `ts.torch_handler.distributed` and `ts.handler_utils.distributed`, for large models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.rows import config_of

PIPPY_REMEDY = (
    "PiPPy has become torch.distributed.pipelining: `parallel: {pipeline: 2}` in model-config.yaml makes "
    "stages of a model that BaseHandler loads (docs/operations.md, Models over several processes)"
)


class BasePippyHandler(BaseHandler):
    """A handler that knows its rank and the number of ranks in the worker's group."""

    def __init__(self) -> None:
        super().__init__()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        initialize_rpc_workers(self.local_rank, self.world_size)

    def initialize(self, context: Context) -> None:
        """Set only the device; as in TorchServe, a subclass loads the model."""
        self._torchere_configure(context)


class BaseDeepSpeedHandler(BaseHandler):
    """A handler whose device is that of its rank; a subclass loads the model, as in TorchServe."""

    def initialize(self, context: Context) -> None:
        """Set the device only."""
        self._torchere_configure(context)


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any = None) -> None:
    """Join the ranks of the worker in a process group, once; PiPPy joined them by RPC."""
    if world_size > 1 and not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, rank=local_rank, world_size=world_size)


def get_pipeline_driver(model: Any, world_size: int, ctx: Context) -> NoReturn:
    """Raise a `RuntimeError` that names the replacement of PiPPy."""
    raise RuntimeError(PIPPY_REMEDY)


def get_ds_engine(model: Any, ctx: Context) -> Any:
    """Return DeepSpeed's engine for a model, configured by the section `deepspeed` of `model-config.yaml`.

    DeepSpeed finds the weights in `handler.model_path`. If the archive lacks the file that
    `deepspeed.checkpoint` names, DeepSpeed gets a list of the weight files in that folder.

    Raises:
        ValueError: the section or a file that it names is missing, or there are no weight files.
        ImportError: DeepSpeed is not installed.
    """
    settings = config_of(ctx)
    section = settings.get("deepspeed")
    if not section:
        raise ValueError(f"{ctx.model_name}: model-config.yaml has no section deepspeed")
    try:
        import deepspeed  # type: ignore[import-not-found]  # noqa: PLC0415 - optional
    except ImportError as err:
        text = (
            "DeepSpeed is not installed; add it to the archive's requirements, or to the server's environment"
        )
        raise ImportError(text) from err
    folder = Path(ctx.system_properties["model_dir"])
    path = (settings.get("handler") or {}).get("model_path")
    weights = folder / path if path else None
    given: dict[str, Any] = {} if weights is None else {"base_dir": str(weights)}
    for key in ("config", "checkpoint"):
        if not section.get(key):
            continue
        if (folder / section[key]).exists():
            given[key] = str(folder / section[key])
        elif key == "checkpoint" and weights is not None:
            given[key] = _checkpoint(weights, f"{ctx.model_name}: handler.model_path")
        else:
            raise ValueError(f"{ctx.model_name}: deepspeed.{key} names {section[key]}, which is not there")
    return deepspeed.init_inference(model, **given)


def _checkpoint(weights: Path, setting: str) -> dict[str, Any]:
    """Return DeepSpeed's list of the weight files below a folder.

    TorchServe writes the list to a file. A value needs no writable folder, and no rank can read a file that
    another rank is still writing.
    """
    files = sorted(str(file) for file in weights.rglob("*.[bp][it][n]") if file.is_file())
    if not files:
        raise ValueError(f"{setting} names {weights}, which holds no .bin file; download the model to it")
    return {"type": "ds_model", "checkpoints": files, "version": 1.0}
