"""Settings of the C library's allocator that keep the freed memory of a batch for the next one.

By default glibc gives every thread a heap of its own, and large blocks go back to the kernel when they are
freed. A model allocates the same amount of memory in every run, so the kernel has to find and zero that many
pages each time. For a convolutional network at batch size 8 this takes half of the CPU time.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Mapping

from torchere.handlers.cgroup import available_cores

# malloc.h of glibc; the parameters of mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
# A larger block gets its own mapping, and freeing the block returns it to the kernel, as weights need.
_OWN_MAPPING_BYTES = 256 * 2**20
_OLD_OWN_MAPPING_BYTES = 32 * 2**20  # the most that glibc before 2.35 accepts
_KEPT_BYTES = 512 * 2**20  # free memory kept at the end of the heap; the kernel gets the rest
# Every heap but the first consists of 64 MiB pieces, which go back when they are empty, with any setting. So
# one heap is best; but threads wait for its lock, so there is one heap for every 8 cores.
_CORES_PER_HEAP = 8
# Set by an operator who tunes the allocator; GLIBC_TUNABLES may hold settings of other parts of glibc, too.
_OPERATORS_VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_OPERATORS_TUNABLE = "glibc.malloc."


def heaps(cores: int) -> int:
    """Return the number of heaps for the threads of a process that runs on `cores` cores."""
    return max(1, cores // _CORES_PER_HEAP)


def settle_loaded(*, thaw: bool = False) -> None:
    """Freeze the loaded objects, so that later garbage collections do not traverse them; free the rest.

    The garbage collector runs first, because `gc.freeze` would keep garbage in reference cycles forever.
    Objects that the fork server froze stay frozen unless `thaw` is set, because traversing them would copy
    37 MiB of pages that the workers share. Free memory then goes back to the kernel, once; memory that is
    freed later is kept as before. Loading can leave as much free memory as the model's weights take, because
    a class first makes its own weights, which the weights of the file then replace.
    """
    if thaw:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Make the allocators of this process and of its forked children keep freed memory.

    Call it before there are threads: a thread keeps the heap it has. It does nothing if the C library is not
    glibc, or if `environment` sets one of glibc's own variables for this. Return whether the allocator
    accepted all settings.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    chosen = _OPERATORS_TUNABLE in tunables or any(name in environment for name in _OPERATORS_VARIABLES)
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mapping = mallopt(M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES) or mallopt(
        M_MMAP_THRESHOLD, _OLD_OWN_MAPPING_BYTES
    )
    return bool(
        mapping and mallopt(M_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(M_ARENA_MAX, heaps(available_cores()))
    )
