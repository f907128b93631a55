"""Tells what a weights file is, and whether reading it runs a pickle, from its bytes alone.

Nothing is loaded or unpickled. TorchScript and `torch.save` files are zips and known by the names in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from torchere.archiver.zipheaders import Malformed, read_central, read_directory

HEAD_BYTES = 16
SUFFIXES = frozenset(
    {".pt", ".pth", ".pt2", ".bin", ".ckpt", ".jit", ".pkl", ".pickle", ".onnx", ".so", ".safetensors"}
)
_MAX_LISTED = 100_000
_PICKLE_RISK = "its pickle can run any Python code unless read with weights_only"


@dataclass(frozen=True, slots=True)
class Weights:
    """What one weights file is; `pickled` when reading it involves Python's pickle format."""

    name: str
    kind: str
    pickled: bool
    risk: str  # what reading it may execute, as a sentence's end


def classify(name: str, head: bytes, file: BinaryIO | None) -> Weights:
    """Tell the kind from the first `HEAD_BYTES` and, for a zip, from the whole `file`."""
    if head.startswith(b"PK") and file is not None:
        return _classify_names(name, _names_in(file))
    suffix = os.path.splitext(name)[1].lower()
    if head.startswith(b"\x80") and head[1:2] <= b"\x05":
        return Weights(name, "pickle", True, _PICKLE_RISK)
    if head.startswith(b"\x7fELF"):
        return Weights(name, "shared library", False, "runs as native code in the server")
    if suffix == ".safetensors" and head[8:9] == b"{":
        return Weights(name, "safetensors", False, "runs nothing")
    if suffix == ".onnx":
        return Weights(name, "ONNX", False, "runs nothing but the graph")
    return Weights(name, "unknown", False, "is not of a kind known here")


def _classify_names(name: str, names: frozenset[str]) -> Weights:
    """Tell the kind as torch does: by records, whose names have the file's own folder in front."""
    records = {inner.partition("/")[2] for inner in names}
    pickled = any(record.endswith((".pkl", ".pt")) for record in records)
    if records & {"archive_format", "serialized_exported_program.json"}:
        native = any(record.endswith(".so") for record in records)
        risk = "runs as native code in the server" if native else "runs its graph"
        return Weights(name, "PT2", pickled, f"{risk}; {_PICKLE_RISK}" if pickled else risk)
    if "constants.pkl" in records:
        risk = "runs in TorchScript's interpreter, and its pickle can't call Python"
        return Weights(name, "TorchScript", True, risk)
    if pickled:
        return Weights(name, "torch.save", True, _PICKLE_RISK)
    return Weights(name, "zip" if names else "damaged zip", False, "is not of a kind known here")


def _names_in(file: BinaryIO) -> frozenset[str]:
    try:
        directory = read_directory(file, file.seek(0, os.SEEK_END))
        file.seek(directory.offset)
        return frozenset(_decoded(file, min(directory.entries, _MAX_LISTED)))
    except Malformed:
        return frozenset()


def _decoded(file: BinaryIO, count: int) -> Iterable[str]:
    for _ in range(count):
        yield read_central(file).raw_name.decode("utf-8", "replace")
