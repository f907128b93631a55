"""Helpers of `ts.utils` and the flags of `ts.torch_handler.base_handler`, which handlers import."""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
import time
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torchere.handlers.loading.compile import PT2_BACKENDS

# Flags that TorchServe's base handler sets when it is imported; handlers branch on them.
PROFILER_AVAILABLE = True
XLA_AVAILABLE = importlib.util.find_spec("torch_xla") is not None
PT2_AVAILABLE = True
PT230_AVAILABLE = True  # torch 2.10 is the oldest that torchere runs with
ONNX_AVAILABLE = importlib.util.find_spec("onnxruntime") is not None
PT2Backend: Any = Enum("PT2Backend", [(name.upper(), name) for name in sorted(PT2_BACKENDS)], type=str)  # type: ignore[misc]

F = TypeVar("F", bound=Callable[..., Any])


def get_yaml_config(yaml_file_path: str) -> Any:
    """Return the contents of a YAML file."""
    import yaml  # noqa: PLC0415  # only where a handler asks for it

    return yaml.safe_load(Path(yaml_file_path).read_text(encoding="utf-8"))


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copy files, given as source and target names, from one folder to another."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir, source), Path(dst_dir, target))


def download_model(model_url: str, model_dir: Path) -> None:
    """Download a file to `model.pt` in a folder."""
    with urllib.request.urlopen(model_url) as source, Path(model_dir, "model.pt").open("wb") as target:
        shutil.copyfileobj(source, target)


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[F], F]:
    """Return a decorator that warns at each call that the function moves to `replacement` in `version`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            text = f"{function.__name__} is deprecated in {version} and moved to {replacement}"
            warnings.warn(text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # of the same signature

    return decorate


def timeit(function: F) -> F:
    """Decorate a function so that the duration of each call is logged."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        result = function(*args, **kwargs)
        elapsed_ms = (time.perf_counter() - began_s) * 1000
        logging.getLogger(function.__module__).info("%s took %.2f ms", function.__name__, elapsed_ms)
        return result

    return call  # type: ignore[return-value]  # of the same signature
