"""Loads TorchScript for all handlers; on a CPU the weights are mapped (`torchscript_mapped.py`)."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from torch.jit._script import wrap_cpp_module

from torchere.archiver.container.zip import DAMAGED, Malformed, read_local
from torchere.archiver.models.load.torchscript import optimized
from torchere.archiver.scan.torchscript import UnsafeScript, check_script
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.loading.weights import WORTH_MAPPING_BYTES, file_to_map

logger = logging.getLogger(__name__)

# Guards `torch.backends.quantized.engine`, which is process-wide and decides how packed int8 weights are
# rebuilt while a module loads. Every load takes the lock, so that none sees the engine of another load.
_LOAD_LOCK = threading.Lock()
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

    Thread-safe; loads in one process run one after the other. Several threads may call the module at once.

    Args:
        path: the file.
        device: the device of the parameters.
        options: the archive's TorchScript options. The module is optimised on a CPU only, and is served
            unoptimised if that fails.

    Raises:
        ValueError: this build of torch has no int8 engine of the name in `options`.
        RuntimeError: the file is not TorchScript, does not load, or its code could read or write files.
    """
    _refuse_file_access(path)
    with _LOAD_LOCK, _engine(options.quantized_engine):
        module = _in_eval_mode(_load(path, device))
        if options.optimize_for_inference and torch.device(device).type == "cpu":
            try:
                return optimized(module, _most_packed_bytes)
            except RuntimeError as err:
                logger.warning("%s is served as it is, for it can't be optimised: %s", path, err)
                module = _in_eval_mode(_load(path, device))  # the failed attempt may have changed it
    return module


def _refuse_file_access(path: str) -> None:
    """Reject code with file operators, since TorchScript runs some of its code while it is loaded."""
    try:
        with open(path, "rb") as file:
            check_script(file, os.path.getsize(path))
    except UnsafeScript as err:
        raise RuntimeError(
            f"{path} can't be loaded as TorchScript, for its code could read or write any file: {err}; "
            "expected a file of torch.jit.save, without that. A handler of the archive's own can load it "
            "with torch.jit.load; if it holds a state_dict, name the file with the model's class with "
            "--model-file"
        ) from err


def _in_eval_mode(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    for parameter in module.parameters():
        # Otherwise TorchScript plans for gradients when a handler calls it outside inference mode, and the
        # next call in inference mode fails: "Inference tensors cannot be saved for backward".
        parameter.requires_grad_(False)
    if getattr(module, "training", False):  # frozen modules have no such attribute
        module.eval()
    return module


def _load(path: str, device: torch.device | str) -> torch.jit.ScriptModule:
    try:
        if torch.device(device).type == "cpu" and (mapped := load_mapped(path)) is not None:
            return mapped
        module: torch.jit.ScriptModule = torch.jit.load(  # type: ignore[no-untyped-call]
            path, map_location=device
        )
    except RuntimeError as err:
        raise RuntimeError(
            f"{path} can't be loaded as TorchScript ({err}); expected a file written by torch.jit.save. "
            "If it holds a state_dict, name the file with the model's class with --model-file"
        ) from err
    return module


@contextlib.contextmanager
def _engine(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    supported = torch.backends.quantized.supported_engines
    if name not in supported:
        raise ValueError(
            f"torchscript.quantized_engine is {name!r}, which this build of torch does not have; "
            f"expected one of {', '.join(supported)}"
        )
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


# Loads TorchScript with its weights memory-mapped from the file.
#
# `torch.jit.load` copies every weight to the heap with the GIL held: a third of a second for 400 MB, once
# for each process. Here the pages of the file are the weights. They are read at first use, all processes
# that map the file share them, and a write copies the page written to.
#
# torch itself can map weights with `torch.load(mmap=True)` only. This module uses the internal function
# by which `torch.package` loads TorchScript, because it accepts existing storages. It expects other names
# in the zip, so the rest of the file (code and two small pickles) is repacked in memory under those
# names. The functions used are private to torch: `torch.jit.load` handles any unusual file or torch
# version.

# torch/csrc/jit/serialization/import.cpp, the deserializer's constructor for packages.
_PACKAGE_CODE = ".data/ts_code/"
_PACKAGE_PICKLES = ".data/ts_code/0/"
_SCRIPT_ID = "0"
_PICKLES = ("data.pkl", "constants.pkl")
_TENSOR_FOLDERS = ("data/", "constants/")
_ALIGNMENT = 64  # of tensors in memory, as torch allocates and writes them


def load_mapped(path: str) -> torch.jit.ScriptModule | None:
    """Load a TorchScript file onto the CPU with mapped weights; None if it can't be, or is too small.

    The file must not be truncated while the module lives. If versions share their weights, the shared file is
    mapped.
    """
    path = file_to_map(path)
    if os.path.getsize(path) < WORTH_MAPPING_BYTES:
        return None
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            weights = _weights(archive, file)
            if weights is None or not _is_ordinary(archive):
                return None
            small = _repacked(archive)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # all of it
    except (*DAMAGED, Malformed, AttributeError):  # not a zip, or a system without fadvise
        return None
    try:
        # False: a private mapping, so that written pages are copied.
        whole: Any = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
        return _imported(small, whole, weights)
    except (RuntimeError, TypeError, AttributeError) as err:  # the caller's torch.jit.load loads it or raises
        logger.info("%s is not mapped: %s", path, err)
        return None


def _imported(small: io.BytesIO, file: Any, weights: dict[str, tuple[int, int]]) -> torch.jit.ScriptModule:
    storages = torch._C.DeserializationStorageContext()
    for key, (offset, size) in weights.items():
        view = torch.empty(0, dtype=torch.uint8).set_(file[offset : offset + size])
        storages.add_storage(key, view)
    module = torch._C._import_ir_module_from_package(
        torch._C.CompilationUnit(),
        torch._C.PyTorchFileReader(small),
        storages,
        torch.device("cpu"),
        _SCRIPT_ID,
    )
    wrapped: torch.jit.ScriptModule = wrap_cpp_module(module)  # type: ignore[no-untyped-call]
    return wrapped


def _is_ordinary(archive: zipfile.ZipFile) -> bool:
    """Whether the file has the layout that torch writes since 1.6, and this machine's byte order."""
    records = {_record(name): name for name in archive.namelist()}
    order = archive.read(records["byteorder"]).decode() if "byteorder" in records else "little"
    return (
        all(pickle in records for pickle in _PICKLES)
        and not any(record.startswith(_PACKAGE_CODE) for record in records)
        and order == sys.byteorder
    )


def _weights(archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, tuple[int, int]] | None:
    """Return the (offset, size) in bytes of each tensor by its key, or None if they can't be mapped.

    Keys count from 0 in each of the two folders, but the loader of `torch.package` has one folder, so a file
    with tensors in both is not mapped.
    """
    found: dict[str, tuple[int, int]] = {}
    folders = set()
    for entry in archive.infolist():
        folder, key = _split(_record(entry.filename))
        if folder not in _TENSOR_FOLDERS:
            continue
        folders.add(folder)
        offset = read_local(file, entry.header_offset).data_offset
        if len(folders) > 1 or entry.compress_type != zipfile.ZIP_STORED or offset % _ALIGNMENT:
            return None
        found[key] = (offset, entry.file_size)
    return found or None


def _repacked(archive: zipfile.ZipFile) -> io.BytesIO:
    """Return a zip of everything but the weights, under the names of `torch.package`."""
    small = io.BytesIO()
    with zipfile.ZipFile(small, "w") as out:
        for entry in archive.infolist():
            root, _, record = entry.filename.partition("/")
            folder, _ = _split(record)
            if folder in _TENSOR_FOLDERS or record.startswith("extra/"):
                continue
            if record in _PICKLES:
                record = _PACKAGE_PICKLES + record
            elif record.startswith("code/"):
                record = _PACKAGE_CODE + record
            out.writestr(f"{root}/{record}", archive.read(entry))
    small.seek(0)
    return small


def _record(name: str) -> str:
    """Return the name of an entry without the top folder of the zip."""
    return name.partition("/")[2]


def _split(record: str) -> tuple[str, str]:
    folder, slash, key = record.rpartition("/")
    return folder + slash, key


# Detects TorchScript modules that change their own state in `forward`, by static analysis.
#
# Such a module (it counts, caches, or computes in its own buffer) gives wrong results if several threads
# run it at once. In TorchServe it works, because each worker has its own copy.

# The nodes for the module's own state in the graph of `forward`, with the methods it calls inlined.
_ITS_OWN = ("prim::GetAttr", "prim::Constant")
_CHANGES = ("prim::SetAttr", "prim::CallMethod")  # a method that can't be inlined may do anything


def changes_itself(module: torch.jit.ScriptModule) -> bool:
    """Whether `forward` of a module in eval mode may write to the module's tensors, lists or attributes.

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
    """Whether a value can be written to: not a module, whose attributes are checked, nor a scalar or text."""
    return not str(value.type()).startswith(("__torch__.", "int", "float", "bool", "str", "NoneType"))
