"""Maps safetensors files: a header of JSON, then the numbers. These files contain no code."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torchere.archiver.container.entries import open_regular
from torchere.archiver.errors import ModelRefused

_LONGEST_REASON = 200  # characters: the library quotes names from the file, and lists all its dtypes


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a safetensors file by name, on the CPU.

    Pages of the file are read at first use, and a write to a tensor copies the page. The file must not be
    truncated while a tensor exists.

    Raises:
        ModelRefused: the file is cut off, or its header is wrong or does not match the data.
        ArchiveError: `path` is not a regular file.
        OSError: the file can't be read.
    """
    open_regular(path).close()  # the library would wait for the writer of a FIFO
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: _aligned(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  # no dict
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")[:_LONGEST_REASON]
        raise ModelRefused(
            f"{path}: damaged safetensors: {reason}; expected a header that gives each tensor a dtype, "
            "a shape and bytes, and each byte to one tensor; get the file again"
        ) from error


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its address is not aligned, which the format does not require."""
    return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor
