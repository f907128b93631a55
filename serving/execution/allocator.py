"""The C library's allocator, told to keep the memory that a batch has freed for the next one.

As it comes, glibc gives every thread a heap of its own and gives large blocks back to the kernel when they
are freed. A model allocates the same megabytes in every run, so the kernel has to find and to clear the same
pages in every run, which for a convolutional network at batch size 8 is half of all processor time.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping

from torchere.serving.execution.devices import available_cores

# malloc.h of glibc; the parameters of mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
# A larger block has a mapping of its own, and goes back when it is freed: weights may be as large.
_OWN_MAPPING_BYTES = 256 * 2**20
_OLD_OWN_MAPPING_BYTES = 32 * 2**20  # the most that glibc before 2.35 takes
_KEPT_BYTES = 512 * 2**20  # free memory at the end of the heap; what is above goes back
# Further heaps are made of pieces of 64 MiB, which go back when they are empty, whatever is set, so one is
# best; but threads that allocate wait for one another at its lock, so no more than these share it.
_CORES_OF_A_HEAP = 8
_OWN_CHOICE = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_OWN_TUNABLE = "glibc.malloc."  # in GLIBC_TUNABLES, which is for other things, too


def heaps(cores: int) -> int:
    """How many heaps the threads of so many cores share."""
    return max(1, cores // _CORES_OF_A_HEAP)


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Set this process's allocator so; it counts for forked children, too.

    Call it before there are threads: a heap that a thread has got stays. Does nothing where the C library is
    another one than glibc, or where the environment chooses for itself by one of glibc's own variables.

    Returns:
        Whether it was set.
    """
    chosen = any(name in environment for name in _OWN_CHOICE)
    if platform.libc_ver()[0] != "glibc" or chosen or _OWN_TUNABLE in environment.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mapping = mallopt(M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES) or mallopt(
        M_MMAP_THRESHOLD, _OLD_OWN_MAPPING_BYTES
    )
    return bool(
        mapping and mallopt(M_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(M_ARENA_MAX, heaps(available_cores()))
    )
