"""Run a handler under torch's profiler, if `ENABLE_TORCH_PROFILER` is set."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

# torch has one profiler per process: a second one at the same time breaks both, and may end the process.
_ONE_AT_A_TIME = threading.Lock()


def run_profiled(
    stages: Callable[[], Any], model_name: str, profiler_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Run one batch under the profiler and write its trace.

    Thread-safe: the process profiles one batch at a time.

    Args:
        stages: runs the batch; names its parts with `torch.profiler.record_function`.
        model_name: names the folder of the traces, `<temporary folder>/pytorch_profiler/<model_name>`.
        profiler_args: arguments for `torch.profiler.profile`. If empty, activities and shapes get defaults;
            without `on_trace_ready`, the traces go to that folder.

    Returns:
        The result of `stages`, and the profiler.
    """
    args = dict(profiler_args)
    if not args:
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        args = {"activities": [ProfilerActivity.CPU, *cuda], "record_shapes": True}
    if "on_trace_ready" not in args:
        safe_name = re.sub(r"[^\w.-]", "_", model_name).lstrip(".")
        folder = str(Path(tempfile.gettempdir(), "pytorch_profiler", safe_name))
        args["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(folder)
        logger.info("Saving chrome trace to : %s", folder)
    with _ONE_AT_A_TIME, profile(**args) as profiler:
        output = stages()
    logger.info("%s", profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    return output, profiler
