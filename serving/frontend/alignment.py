"""Alignment of the buffers of long requests, so that their tensors can be read without a copy."""

from __future__ import annotations

# In bytes, as allocators align memory. Requests end with tensors, whose elements have at most 8 bytes.
TENSOR_ALIGNMENT = 16


def room_before(length: int) -> int:
    """Return the padding before `length` bytes that makes them end on a multiple of `TENSOR_ALIGNMENT`."""
    return -length % TENSOR_ALIGNMENT
