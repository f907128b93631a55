"""Load models compiled ahead of time, and choose how each one runs.

| archive contents | execution |
| --- | --- |
| a package or bare library for the CPU | through the C ABI (`library.py`), without the GIL |
| the same for a GPU, or with operators outside of torch | torch's binding |
| a package with weights in separate files | torch's binding, where this torch can read them |
| a package that does not fit this machine, with a fallback; an exported program | torch's interpreter |
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.models.load.exported_program import ServedProgram
from torchere.archiver.scan import UnsafeModel
from torchere.archiver.scan.exported_program import INT8_OPERATORS, check_program
from torchere.handlers.cgroup import available_cores
from torchere.handlers.compiled import library as aot_abi
from torchere.handlers.compiled.library import AotModel, BoundModel
from torchere.handlers.compiled.package import (
    Build,
    InputRule,
    Misfit,
    Package,
    extracted_library,
    fits_c_abi,
    lacks_weights,
    misfit,
    read_build,
    read_cpu_flags,
    read_package,
    read_rules,
)

logger = logging.getLogger(__name__)

CompiledModel = Callable[..., Any]
_UNCHECKED = (
    "A wrong shape or type makes it read memory out of bounds; pack a file of a recent torch's "
    "aoti_compile_and_package, with the source that this puts in"
)
_LIBRARY_FOLDER = ".aot"  # lies in the unpacked archive, and is deleted with it
# torch keeps the exported program that it reads in a global variable, and refuses to read another meanwhile.
_READING_LOCK = threading.Lock()


def load_shared_object(path: str, device: str | None) -> CompiledModel:
    """Load a bare `.so` that `torch._export.aot_compile` wrote: machine code, run in this process.

    Raises:
        RuntimeError: the file can't be opened, or is not such a library.
    """
    logger.warning("%s: a bare library is not told to check its inputs. %s", path, _UNCHECKED)
    device = device or "cpu"
    is_plain = not Path(path).with_suffix(".json").exists()  # the JSON file names operators outside torch
    model: CompiledModel | None = _run_by_abi(path, ()) if device == "cpu" and is_plain else None
    return model or torch._export.aot_load(path, device)


def load_package(path: str, model_dir: str, device: str | None) -> CompiledModel:
    """Load a `.pt2` file written by `torch._inductor.aoti_compile_and_package` or `torch.export.save`.

    Args:
        path: the file.
        model_dir: the unpacked archive, for its build record and the fallback named there.
        device: "cpu", "cuda:1", ...; None counts as "cpu".

    Raises:
        RuntimeError: the file is of neither kind, is damaged, or does not fit this machine and has no
            fallback.
    """
    package = read_package(path)
    if package.is_program:
        return _load_program(path, device)
    build = read_build(model_dir, package.metadata)
    found = _reason_against(package, build, device)
    if found and build.fallback:
        logger.warning("%s is not used: %s. Its fallback %s is slower", path, found.reason, build.fallback)
        return _load_program(str(Path(model_dir, build.fallback)), device)
    if found and found.fatal:
        raise RuntimeError(
            f"{path} can't run here: {found.reason}; compile it again on a machine like this one, or pack it "
            "with the exported program as its fallback"
        )
    if found:
        logger.warning("%s: %s; it is tried nevertheless, for there is no fallback", path, found.reason)
    rules = read_rules(package)
    if rules == []:
        logger.warning("%s: its source holds no checks of its inputs. %s", path, _UNCHECKED)
    model = None
    if (device or "cpu") == "cpu" and fits_c_abi(package) and aot_abi.available():
        model = _run_by_abi(str(_library_file(package, model_dir)), rules)
    return model or BoundModel(_load_by_binding(package), rules)


def _run_by_abi(path: str, rules: Sequence[InputRule] | None) -> AotModel | None:
    """Return a model that one thread per core of this process, at least 2, can run; other threads wait in it.

    None if it has to run by torch's own binding, which is then logged.
    """
    try:
        return AotModel(path, max(2, available_cores()), rules)
    except aot_abi.AbiMismatch as err:
        logger.warning("%s; it runs by torch's own binding, one run at a time", err)
        return None


def is_for_cpu(path: str) -> bool:
    """Return whether a `.pt2` file names the CPU as its target, so that its code can run nowhere else.

    Raises:
        RuntimeError: see `read_package`.
    """
    return read_package(path).device == "cpu"


def _reason_against(package: Package, build: Build, device: str | None) -> Misfit | None:
    """Return the reason against running a package on this device of this machine; None if it can run."""
    kind = (device or "cpu").partition(":")[0]
    if package.device not in (kind, "unknown"):  # its code would misread addresses of the other device
        return Misfit(f"it was compiled for {package.device}, and is to run on {kind}", fatal=True)
    if lacks_weights(package):
        return Misfit("it was compiled without its weights (package_constants_in_so is False)", fatal=True)
    here = torch.backends.cpu.get_cpu_capability()
    found = misfit(build, torch.__version__, read_cpu_flags())
    if not (found and found.fatal) and build.weights_for not in (None, here):
        # The kernel would read each weight from the wrong place, and give wrong outputs.
        text = f"its weights of 4 bits are ordered for {build.weights_for}; this is {here}"
        return Misfit(text, fatal=True)
    return found


def _load_program(path: str, device: str | None) -> CompiledModel:
    _refuse_code(path)
    importlib.import_module(INT8_OPERATORS)
    with _READING_LOCK:
        program = torch.export.load(path)
    if device not in (None, "cpu"):  # operators that create tensors name the export's device
        program = importlib.import_module("torch.export.passes").move_to_device_pass(program, device)
    return ServedProgram(program)


def _refuse_code(path: str) -> None:
    """Refuse an exported program that could run code, because torch evaluates and unpickles parts of it."""
    try:
        with open(path, "rb") as file:
            check_program(file, os.path.getsize(path))
    except UnsafeModel as err:
        raise RuntimeError(
            f"{path} is not loaded, for it could run code of its own: {err}; save it again with "
            "torch.export.save, or load it in a handler of the archive's own"
        ) from err


def _library_file(package: Package, model_dir: str) -> Path:
    folder = Path(model_dir, _LIBRARY_FOLDER)
    try:
        return extracted_library(package, folder)
    except OSError as err:
        # For example, the folder is read-only. A temporary folder stays until the system clears it.
        logger.info("%s can't be written (%s): using a temporary folder", folder, err)
        return extracted_library(package, Path(tempfile.mkdtemp(prefix="torchere-aot-")))


def _load_by_binding(package: Package) -> Any:
    from torch._inductor import aoti_load_package  # noqa: PLC0415  # seconds

    importlib.import_module("torch._inductor.codecache")  # torch 2.10 uses it without an import
    path = package.path
    if package.weights_apart:
        return _load_with_weights(path)
    try:
        return aoti_load_package(path)
    except RuntimeError as err:
        raise RuntimeError(
            f"{path} can't be loaded as an AOTInductor package ({err}); compile it again with this version "
            f"of torch ({torch.__version__}) on a machine like this one"
        ) from err


def _load_with_weights(path: str) -> Any:
    """Load a package whose weights are in separate files: `aoti_load_package` leaves them out."""
    try:
        from torch.export.pt2_archive._package import load_pt2  # noqa: PLC0415  # seconds

        return load_pt2(path, load_weights_from_disk=True).aoti_runners["model"]
    except (ImportError, TypeError) as err:  # an older torch
        raise RuntimeError(
            f"{path} has its weights in separate files, which torch {torch.__version__} can't load ({err}); "
            "compile it with aot_inductor.package_constants_in_so, or install a newer torch"
        ) from err
