"""TorchScript whose weights stay where they are: in the file, mapped into memory.

`torch.jit.load` copies every weight to the heap with the GIL held: a third of a second for 400 MB, once for
each process. Here the pages of the file are the weights. They are read when they are first used, every
process that maps the file shares them, and writing to them copies the page written to.

torch has this for `torch.load(mmap=True)` only. What makes it work is the door by which `torch.package` loads
TorchScript: it takes storages that are there already. It wants other names in the zip, so that what is no
weight (code and two small pickles) is repacked under those names, in memory. The functions behind it are
private: whatever is unusual about a file or a torch is left to `torch.jit.load`.
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
    """Load a TorchScript file onto the CPU, its weights mapped; None when it is to be loaded in another way.

    The file must not be cut short while the module lives, as with everything that is mapped. Where versions
    share their weights, theirs is the file that is mapped.
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
    except (*DAMAGED, Malformed, AttributeError):  # no zip; or a system without fadvise
        return None
    try:
        # Private to us: written pages are copied.
        whole: Any = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
        return _imported(small, whole, weights)
    except (RuntimeError, TypeError, AttributeError) as err:  # torch.jit.load can do it, or says why not
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
    """Whether it is TorchScript as every torch since 1.6 writes it, for this machine's byte order."""
    records = {_record(name): name for name in archive.namelist()}
    order = archive.read(records["byteorder"]).decode() if "byteorder" in records else "little"
    return (
        all(pickle in records for pickle in _PICKLES)
        and not any(record.startswith(_PACKAGE_CODE) for record in records)
        and order == sys.byteorder
    )


def _weights(archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, tuple[int, int]] | None:
    """Where each tensor's bytes are: key -> (offset, size); None when they can't be mapped.

    Keys count from 0 in each of the two folders, and the package's door knows one folder: a file with tensors
    in both is left alone.
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
    """Everything but the weights, under the names that a package has."""
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
    """The name of an entry without the file's own folder."""
    return name.partition("/")[2]


def _split(record: str) -> tuple[str, str]:
    folder, slash, key = record.rpartition("/")
    return folder + slash, key
