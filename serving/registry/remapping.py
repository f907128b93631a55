"""Lets memory that is in use show another file with the same bytes, without a moment in which it shows none.

mmap(2) with MAP_FIXED puts a mapping in the place of another in one step: who reads meanwhile waits for the
page, and finds it in the new one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

_MAP_FIXED = 0x10  # linux/mman.h, the same on every architecture that torch is built for
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value


def show_file(address: int, size: int, file: int) -> None:
    """Let memory show the file from its beginning; written pages stay private.

    Args:
        address: of a mapping, at the beginning of a page. Nothing of it may have been written to.
        size: bytes, all of them the mapping's.
        file: a descriptor, which may be closed afterwards.

    Raises:
        OSError: the system would not; the memory is as it was.
    """
    _map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file)


def show_nothing(address: int, size: int) -> None:
    """Let memory that nobody reads show no file any more; its addresses stay taken. OSError as above."""
    _map(address, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def _map(address: int, size: int, access: int, kind: int, file: int) -> None:
    if _mmap()(address, size, access, kind | _MAP_FIXED, file, 0) == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    number = ctypes.c_int
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_ssize_t)
    return function
