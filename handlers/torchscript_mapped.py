"""Loads TorchScript with its weights memory-mapped from the file.

`torch.jit.load` copies every weight to the heap with the GIL held: a third of a second for 400 MB, once for
each process. Here the pages of the file are the weights. They are read at first use, all processes that map
the file share them, and a write copies the page written to.

torch itself can map weights with `torch.load(mmap=True)` only. This module uses the internal function by
which `torch.package` loads TorchScript, because it accepts existing storages. It expects other names in the
zip, so the rest of the file (code and two small pickles) is repacked in memory under those names. The
functions used are private to torch: `torch.jit.load` handles any unusual file or torch version.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import zipfile
from typing import Any, BinaryIO

import torch
from torch.jit._script import wrap_cpp_module

from torchere.archiver.container.zip import DAMAGED, Malformed, read_local
from torchere.handlers.shared_weights import WORTH_MAPPING_BYTES, file_to_map

logger = logging.getLogger(__name__)

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
