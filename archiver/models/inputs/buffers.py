"""Keeps a model's buffers from changing while packing runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unchanged_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restore the values of the module's buffers at block exit, in the tensors that they were in.

    A model may count its runs or keep a mean of its inputs in a buffer: runs of the packer are no requests.
    Other state, such as plain attributes, is not restored. Takes the memory of the buffers a second time.

    Args:
        module: a torch.jit.ScriptModule is one, too.
    """
    before = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if _is_plain(buffer)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, values in before:
                if not torch.equal(buffer, values):  # writing all would copy pages of a mapped file
                    buffer.copy_(values)
                if getattr(part, name) is not buffer:
                    setattr(part, name, buffer)


def _is_plain(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_quantized
