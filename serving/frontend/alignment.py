"""Where the memory of a long request ends, so that the tensors in it need not be copied to be read."""

from __future__ import annotations

# Bytes: tensors are what requests end with, an element has 8 at most, and memory that is allocated begins on
# such an address, too.
TENSOR_ALIGNMENT = 16


def room_before(length: int) -> int:
    """How many bytes to leave free before so many, for these to end on a multiple of `TENSOR_ALIGNMENT`."""
    return -length % TENSOR_ALIGNMENT
