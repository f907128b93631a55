"""Models compiled ahead of time by AOTInductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CompiledModel = Callable[..., Any]


def load_shared_object(path: str, map_location: str | None) -> CompiledModel:
    """A bare `.so`, as `torch._export.aot_compile` wrote it: machine code of the archive, run in here."""
    model: CompiledModel = torch._export.aot_load(path, map_location or "cpu")
    return model


def load_package(path: str) -> CompiledModel:
    """A `.pt2` package, as `torch._inductor.aoti_compile_and_package` wrote it.

    Raises:
        RuntimeError: the file is not such a package, or was compiled for another machine.
    """
    from torch._inductor import aoti_load_package  # noqa: PLC0415  # seconds

    try:
        model: CompiledModel = aoti_load_package(path)
    except RuntimeError as err:
        raise RuntimeError(
            f"{path} can't be loaded as an AOTInductor package ({err}); compile it again with this version "
            f"of torch ({torch.__version__}) on a machine like this one"
        ) from err
    return model
