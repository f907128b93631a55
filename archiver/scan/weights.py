"""Detects the kind of a weights file, and whether reading it runs a pickle, from its bytes alone.

Nothing is loaded or unpickled, and file names are ignored. TorchScript and `torch.save` files are zips, which
are recognised by the names of their records.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchere.archiver.container.entries import open_regular
from torchere.archiver.container.zip import Malformed, read_central, read_directory
from torchere.archiver.errors import first_names
from torchere.archiver.scan import UnsafeModel
from torchere.archiver.scan.exported_program import OLD_PROGRAM, check_program
from torchere.archiver.scan.pickles import MAX_PICKLE_BYTES, foreign_names_in, is_pickle
from torchere.archiver.scan.torchscript import check_script

HEAD_BYTES = 16  # first bytes of a file, which identify the kinds that are neither a zip nor a pickle
SUFFIXES = frozenset(
    {".pt", ".pth", ".pt2", ".bin", ".ckpt", ".jit", ".pkl", ".pickle", ".onnx", ".so", ".safetensors"}
)
TORCHSCRIPT, TORCH_SAVE, PICKLE = "TorchScript", "torch.save", "pickle"
EXPORTED_PROGRAM, AOTINDUCTOR = "ExportedProgram", "AOTInductor"
ONNX, SAFETENSORS, SHARED_LIBRARY = "ONNX", "safetensors", "shared library"
_COMPILED_FOLDER = "data/aotinductor/"  # of one model or several, each in a folder of its own
_MAX_LISTED = 100_000
_NATIVE = "runs as native code in a worker process"
_PICKLE_RISK = "its pickle can run any Python code unless read with weights_only"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit for its header
# First key bytes of the fields that may follow field 1, ir_version, in ONNX's ModelProto (onnx.proto).
_ONNX_SECOND_FIELDS = frozenset(b"\x12\x1a\x22\x28\x32\x3a\x42\x72\xa2\xca")


@dataclass(frozen=True, slots=True)
class Weights:
    """The kind of one weights file; `pickled` when reading it involves Python's pickle format.

    `foreign` names the code that its pickle or program would run beyond rebuilding tensors; empty if there is
    none, or if it was not checked.
    """

    name: str
    kind: str
    pickled: bool
    risk: str  # the code that reading it may execute, as the end of a sentence
    foreign: tuple[str, ...] = ()


def classify(name: str, file: BinaryIO) -> Weights:
    """Classify a file by its first bytes; at least the first `bytes_to_see` bytes must be present."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    known = _known_by_head(name, head)
    if known is not None:
        return known
    if head.startswith(b"PK"):
        return _classify_records(name, _sizes_in(file), file)
    if _begins_as_pickle(head) or is_pickle(file):  # protocols 0 and 1 have no fixed first bytes
        return _pickle(name, PICKLE, file)
    return Weights(name, "unknown", False, "is not of a kind known here")


def bytes_to_see(head: bytes) -> float:
    """Return how many bytes `classify` reads of a file with these first bytes (at most `HEAD_BYTES`)."""
    if _known_by_head("", head) is not None:
        return HEAD_BYTES
    return math.inf if head.startswith(b"PK") else MAX_PICKLE_BYTES


def _known_by_head(name: str, head: bytes) -> Weights | None:
    if head.startswith(b"PK") or _begins_as_pickle(head):
        return None
    if head.startswith(b"\x7fELF"):
        return Weights(name, SHARED_LIBRARY, False, _NATIVE)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES:
        return Weights(name, SAFETENSORS, False, "runs nothing")
    if len(head) > 2 and head[0] == 0x08 and 0 < head[1] < 0x80 and head[2] in _ONNX_SECOND_FIELDS:
        return Weights(name, ONNX, False, "runs nothing but the graph")
    return None


def _begins_as_pickle(head: bytes) -> bool:
    # Safetensors with a 128-byte header begin with 0x80, too, but their third byte is 0, below any opcode.
    return head.startswith(b"\x80") and head[1:2] <= b"\x05" and head[2:3] >= b"("


def classify_file(path: Path) -> Weights:
    """Classify a file on disk.

    Raises:
        ArchiveError: it is not a regular file.
        OSError: it can't be read.
    """
    with open_regular(path) as file:
        return classify(path.name, file)


def _classify_records(name: str, found: list[tuple[str, int]], file: BinaryIO) -> Weights:
    """Classify a zip as torch does: by its records, whose names begin with the file's own folder.

    Programs that torch 2.6 and 2.7 export have no such folder.
    """
    records: dict[str, int] = {}
    has_folder = all(inner != OLD_PROGRAM for inner, _ in found)
    for inner, size in found:  # of records with one name, the largest counts
        record = inner.partition("/")[2] if has_folder else inner
        records[record] = max(size, records.get(record, 0))
    if records.keys() & {"archive_format", OLD_PROGRAM}:
        return _package(name, records, file)
    if "constants.pkl" in records:
        return _torchscript(name, file)
    if "data.pkl" in records or any(record.endswith((".pkl", ".pt")) for record in records):
        return _pickle(name, TORCH_SAVE, file)
    return Weights(name, "zip" if found else "damaged zip", False, "is not of a kind known here")


def _torchscript(name: str, file: BinaryIO) -> Weights:
    try:
        check_script(file, _size(file))
    except UnsafeModel as error:
        risk = f"READS OR WRITES FILES: {error}"
        return Weights(name, TORCHSCRIPT, True, risk, (str(error),))
    risk = "runs in TorchScript's interpreter, touches no files, and its pickle can't call Python"
    return Weights(name, TORCHSCRIPT, True, risk)


def _package(name: str, records: dict[str, int], file: BinaryIO) -> Weights:
    # Programs without example inputs have an empty record for them.
    pickled = any(size and record.endswith((".pkl", ".pt")) for record, size in records.items())
    suffix = f"; {_PICKLE_RISK}" if pickled else ""
    if any(record.endswith(".so") or record.startswith(_COMPILED_FOLDER) for record in records):
        foreign = foreign_names_in(file, _size(file))
        return Weights(name, AOTINDUCTOR, pickled, f"{_native(records)}{suffix}", foreign)
    try:
        check_program(file, _size(file))
    except UnsafeModel as error:
        return Weights(name, EXPORTED_PROGRAM, pickled, f"RUNS CODE OF ITS OWN: {error}", (str(error),))
    return Weights(name, EXPORTED_PROGRAM, pickled, f"runs its graph{suffix}")


def _native(records: Iterable[str]) -> str:
    """Describe how compiled code runs. A package without a library holds C++, which torch compiles."""
    if any(record.endswith(".so") for record in records):
        return _NATIVE
    return f"is compiled from C++ and {_NATIVE}"


def _pickle(name: str, kind: str, file: BinaryIO) -> Weights:
    foreign = foreign_names_in(file, _size(file))
    if foreign:
        return Weights(name, kind, True, f"{_PICKLE_RISK}; it imports {first_names(foreign)}", foreign)
    return Weights(name, kind, True, _PICKLE_RISK)


def _size(file: BinaryIO) -> int:
    return file.seek(0, os.SEEK_END)


def _sizes_in(file: BinaryIO) -> list[tuple[str, int]]:
    try:
        directory = read_directory(file, _size(file))
        file.seek(directory.offset)
        return list(_decoded(file, min(directory.entries, _MAX_LISTED)))
    except Malformed:
        return []


def _decoded(file: BinaryIO, count: int) -> Iterable[tuple[str, int]]:
    for _ in range(count):
        entry = read_central(file)
        yield entry.raw_name.decode("utf-8", "replace"), entry.size
