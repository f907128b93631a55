"""Slots of shared memory: they carry large values between the server and a worker beside the data socket.

The kernel copies bytes that cross a socket twice, into buffers of its own and out of them. A slot takes one
copy: the sender (the server for a run, the worker for its report) puts the values into it, and the receiver
reads them in place. A byte for each slot says whether it is in use. The sender sets it; the receiver clears
it once the last view of the slot is gone, which may be long after the run: handlers keep inputs, and clients
read slowly. If no slot is free, values cross the socket, so nothing ever waits for a slot.

The server reads nothing back that it has put into a slot: a handler may change its inputs in place.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

# In each direction. The lowest free slot is taken: the others take no memory before they are needed.
SLOTS = 8
SLOT_BYTES = 2**22
_FLAGS_BYTES = mmap.PAGESIZE  # of which each direction uses `SLOTS`
BYTES = _FLAGS_BYTES + 2 * SLOTS * SLOT_BYTES  # of both directions

# The slots with views in this process. A forked child keeps its parent's views: those slots stay in use for
# good, because neither process can know when the other has dropped them. The child clears those, too, that
# another thread has taken since: hooks of other modules run, and may wait, between this one and the fork.
_viewed: dict[tuple[int, int], weakref.ref[Any]] = {}
os.register_at_fork(before=_viewed.clear, after_in_child=_viewed.clear)


class Slots:
    """The slots of one direction. Any thread may use it.

    Args:
        memory: a mapping of shared memory.
        start: the offset in it of `BYTES` for both directions, zeroed at first; its end: there are no slots.
        direction: 0 or 1.
    """

    def __init__(self, memory: mmap.mmap, start: int, direction: int) -> None:
        self._memory = memory
        self._count = SLOTS if len(memory) > start else 0
        self._flags_at = start + direction * SLOTS
        self._values_at = start + _FLAGS_BYTES + direction * SLOTS * SLOT_BYTES
        self._putting = threading.Lock()

    def put(self, values: Sequence[bytes | bytearray | memoryview], size: int) -> int:
        """Copy values of `size` bytes in all into a free slot, one behind the other.

        Returns:
            The slot's number; -1: no slot is free, or the values are larger than a slot.
        """
        if size > SLOT_BYTES:
            return -1
        with self._putting:
            at = self._memory.find(b"\0", self._flags_at, self._flags_at + self._count)
            if at < 0:
                return -1
            self._memory[at] = 1
        slot = at - self._flags_at
        start = self._values_at + slot * SLOT_BYTES
        for value in values:
            _bytes_of(self._memory, start, len(value))[:] = _bytes_of(value, 0, len(value))
            start += len(value)
        return slot

    def take(self, slot: int, size: int) -> memoryview:
        """Return the first `size` bytes of a slot, which is free again once no view of them is left.

        Raises:
            ValueError: there is no such slot, or it is smaller.
        """
        if not (0 <= slot < self._count and size <= SLOT_BYTES):
            raise ValueError(
                f"slot {slot} with {size} bytes, expected one of {self._count} with at most {SLOT_BYTES}"
            )
        array = _bytes_of(self._memory, self._values_at + slot * SLOT_BYTES, size)
        _viewed[id(self), slot] = weakref.ref(array, partial(self._free, slot))
        view: memoryview = array.data
        return view

    def _free(self, slot: int, view: weakref.ref[Any]) -> None:
        if _viewed.get((id(self), slot)) is view:
            del _viewed[id(self), slot]
            self._memory[self._flags_at + slot] = 0


def _bytes_of(buffer: mmap.mmap | bytes | bytearray | memoryview, start: int, size: int) -> Any:
    """Return a NumPy array over bytes of a buffer: unlike memoryviews, arrays copy without the GIL."""
    import numpy as np  # noqa: PLC0415 - 0.1 s, which the start of the server need not wait for

    return np.frombuffer(buffer, np.uint8, size, start)
