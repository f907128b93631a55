"""Read the `pt2` block of model-config.yaml: whether and how a model is compiled."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

# The names that TorchServe accepts; this build of torch may lack some, which shows when it compiles.
PT2_BACKENDS = frozenset(
    {
        "aot_cudagraphs",
        "aot_eager",
        "aot_nvfuser",
        "eager",
        "fx2trt",
        "hpu_backend",
        "inductor",
        "ipex",
        "nvfuser",
        "ofi",
        "onnxrt",
        "openvino",
        "tensorrt",
        "torchxla_trace_once",
    }
)


def check_valid_pt2_backend(backend: str) -> bool:
    """Return whether the backend is a known one of `torch.compile`; log a warning if it is not."""
    if backend in PT2_BACKENDS:
        return True
    logger.warning(
        "%s is not a supported backend; expected one of %s", backend, ", ".join(sorted(PT2_BACKENDS))
    )
    return False


def compile_options(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the keyword arguments for `torch.compile`, or None when the model stays as it is.

    Args:
        config: the whole model-config.yaml.

    Raises:
        ValueError: `pt2`, or `compile` in it, has the wrong type.
    """
    pt2 = config.get("pt2")
    if pt2 is None:
        return None
    options = _requested(pt2)
    if options is None or ("backend" in options and not check_valid_pt2_backend(options["backend"])):
        return None
    return options


def _requested(pt2: object) -> dict[str, Any] | None:
    if isinstance(pt2, str):
        return {"backend": pt2}
    if not isinstance(pt2, dict):
        raise ValueError(f"pt2 should be str or dict; model-config.yaml has {pt2!r}")
    if "compile" not in pt2:
        return None if "export" in pt2 else dict(pt2)  # the older form: the arguments themselves
    compile_block = pt2["compile"]
    if not isinstance(compile_block, dict):
        raise ValueError(
            f"pt2.compile should be a dict with 'enable'; model-config.yaml has {compile_block!r}"
        )
    options = dict(compile_block)
    return options if options.pop("enable", False) is True else None


def wants_aot_compile(config: dict[str, Any]) -> bool:
    """Return whether `pt2.export.aot_compile` says that the weights are a compiled `.so`."""
    pt2 = config.get("pt2")
    export = pt2.get("export") if isinstance(pt2, dict) else None
    return isinstance(export, dict) and export.get("aot_compile") is True
