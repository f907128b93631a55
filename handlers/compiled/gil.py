"""Predict whether a compiled model will hold the GIL, from its files and without importing torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from torchere.handlers.compiled.package import Package, misfit, read_build, read_cpu_flags, read_package

# Functions of torch's extension that `aot_abi.py` needs; torch lists them in the file `_LISTED_IN`.
HANDLE_FUNCTIONS = ("unsafe_alloc_void_ptrs_from_tensors", "alloc_tensors_by_stealing_from_void_ptrs")
_LISTED_IN = ("_C", "_aoti.pyi")


def holds_gil(path: str, model_dir: str) -> bool:
    """Return whether a `.pt2` file on the CPU holds the GIL while it runs, so that threads gain nothing.

    False for a file that can't be loaded at all.
    """
    try:
        package = read_package(path)
        build = read_build(model_dir).with_metadata(package.metadata)
        torch_version = importlib.metadata.version("torch")
    except (RuntimeError, OSError, importlib.metadata.PackageNotFoundError):
        return False
    replaced = build.fallback is not None and misfit(build, torch_version, read_cpu_flags()) is not None
    return replaced or not (fits_c_abi(package) and _torch_gives_handles())


def fits_c_abi(package: Package) -> bool:
    """Return whether the C ABI can run the package; torch's own part is not checked."""
    return package.device in ("cpu", "unknown") and package.library is not None


def _torch_gives_handles() -> bool:
    """Return whether the installed torch has `HANDLE_FUNCTIONS`; importing it would take seconds."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            text = Path(folder, *_LISTED_IN).read_text(encoding="utf-8")
        except OSError:
            continue
        return all(f"def {name}(" in text for name in HANDLE_FUNCTIONS)
    return False
