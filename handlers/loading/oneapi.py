"""What `ipex_enable` asks for: the layout that oneDNN prefers, and Intel's extension if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)

_EXTENSION = "intel_extension_for_pytorch"
IS_ASKED_FOR = os.environ.get("TS_IPEX_ENABLE", "false") == "true"
IPEX_AVAILABLE = IS_ASKED_FOR and importlib.util.find_spec(_EXTENSION) is not None
"""Whether models are optimized by the extension; handlers import it from `ts.torch_handler.base_handler`."""


def optimized(model: Any) -> Any:
    """Return the model as TorchServe's handlers run it with `ipex_enable=true`; unchanged without that.

    The extension is archived, and its kernels are torch's own by now (oneDNN). So without it the model gets
    the layout that both prefer, channels last, and torch does the rest.
    """
    if not IS_ASKED_FOR or not isinstance(model, torch.nn.Module):
        return model
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
    if not IPEX_AVAILABLE:
        logger.info("ipex_enable: %s is not installed; torch's own oneDNN kernels run the model", _EXTENSION)
        return model
    optimize = importlib.import_module(_EXTENSION).optimize
    logger.info("Compiled model with ipex")  # TorchServe's line
    return optimize(model)
