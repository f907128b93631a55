"""Read safetensors files: a header of JSON, then the numbers. Nothing in them can run.

The format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

from torchere.archiver.container.entries import open_regular
from torchere.archiver.errors import ModelRefused

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file by name, to the CPU.

    Raises:
        ModelRefused: the file is cut off, or its header is wrong or does not match the data.
        OSError: it can't be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            _refuse(path, f"its header is said to have {length} bytes, and the file has {size}")
        header = _header(path, file.read(length))
        room = size - 8 - length
        _check_ranges(path, header, room)
        numbers = torch.empty(room, dtype=torch.uint8)
        if room and file.readinto(numbers.numpy().data) != room:  # type: ignore[attr-defined]
            _refuse(path, "it became shorter while it was read")
    return {name: _tensor(entry, numbers) for name, entry in header.items()}


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path}: not safetensors: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        _refuse(path, "its header is not an object")
    header.pop("__metadata__", None)
    return header


def _check_ranges(path: Path, header: dict[str, Any], room: int) -> None:
    """Refuse ranges that are not as long as their tensors, or do not cover all bytes exactly once.

    The format requires this; bytes shared by many tensors would be copied in memory for each of them.
    """
    ranges = sorted((*_range(path, name, entry, room), name) for name, entry in header.items())
    cursor = 0
    for begin, end, name in ranges:
        if begin != cursor:
            found = (
                "overlaps another tensor" if begin < cursor else "has bytes before it that are no tensor's"
            )
            _refuse(path, f"{ascii(name)[:60]} {found}")
        cursor = end
    if cursor != room:
        _refuse(path, f"{room - cursor} bytes at its end are no tensor's")


def _range(path: Path, name: str, entry: Any, room: int) -> tuple[int, int]:
    """Return the checked byte range that the header gives for a tensor."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        _refuse(path, f"{ascii(name)[:60]} has the dtype {ascii(dtype)[:40]}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        _refuse(path, f"{ascii(name)[:60]} has no shape, or no two data_offsets")
    begin, end = offsets
    wanted = math.prod(shape) * _DTYPES[dtype].itemsize
    if not begin <= end <= room or end - begin != wanted:
        _refuse(path, f"{ascii(name)[:60]} has {wanted} bytes, said to lie at {begin} to {end} of {room}")
    return begin, end


def _tensor(entry: dict[str, Any], numbers: torch.Tensor) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    # A copy: an offset need not suit the dtype, and the whole file should not live as long as one tensor.
    return numbers[begin:end].clone().view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ModelRefused(f"{path}: damaged safetensors: {reason}; get the file again")
