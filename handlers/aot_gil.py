"""Whether a model compiled ahead of time will hold the GIL: told from files, for processes without torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from torchere.handlers.aot_build import misfit, read_build, read_cpu_flags
from torchere.handlers.aot_package import Package, read_package

# What `aot_abi.py` needs of torch, which lists the functions of its extension in this file.
HANDLE_FUNCTIONS = ("unsafe_alloc_void_ptrs_from_tensors", "alloc_tensors_by_stealing_from_void_ptrs")
_LISTED_IN = ("_C", "_aoti.pyi")


def holds_gil(path: str, model_dir: str) -> bool:
    """Whether a `.pt2` file on the CPU will keep the GIL while it runs, so that threads gain nothing.

    A file that will not load at all does not.
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
    """Whether the C ABI can run the package, as far as the package is concerned."""
    return package.device in ("cpu", "unknown") and package.library is not None


def _torch_gives_handles() -> bool:
    """Whether the torch that is installed has `HANDLE_FUNCTIONS`; importing it would take seconds."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            text = Path(folder, *_LISTED_IN).read_text(encoding="utf-8")
        except OSError:
            continue
        return all(f"def {name}(" in text for name in HANDLE_FUNCTIONS)
    return False
