"""Mapping torch's libraries beside what Python imports meanwhile: linking them takes no GIL, only time."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
from contextlib import suppress
from pathlib import Path

_RTLD_LAZY = 1  # dlfcn.h
# The linker serves one thread at a time: whoever imports an extension module while torch is being mapped
# waits until all of torch is, with the GIL held. So those come first that a start needs before torch.
EXTENSIONS = (
    "asyncio",
    "csv",
    "decimal",
    "google._upb._message",
    "grp",
    "hashlib",
    "httptools",
    "mmap",
    "msgspec",
    "multiprocessing.connection",
    "numpy",
    "orjson",
    "psutil",
    "queue",
    "resource",
    "ssl",
    "termios",
    "unicodedata",
    "uuid",
    "yaml",
)


def map_torch_aside() -> None:
    """Begin to map torch's libraries in a thread; `import torch` waits for what is left of it."""
    if sys.platform == "linux":
        for name in EXTENSIONS:
            with suppress(ImportError):  # who needs it will say so
                importlib.import_module(name)
        threading.Thread(target=map_torch, name="map-torch", daemon=True).start()


def map_torch() -> None:
    """Map the libraries of torch, which `import torch` then finds mapped; without effect where it can't.

    Called as a foreign function, because `ctypes.CDLL` keeps the GIL while it maps and links. Left to torch
    where it is built for CUDA: it has rules of its own for finding those libraries.
    """
    found = importlib.util.find_spec("torch")
    for place in (found.submodule_search_locations or ()) if found else ():
        library = Path(place, "lib", "libtorch_python.so")
        if library.is_file() and not library.with_name("libtorch_cuda.so").exists():
            dlopen = ctypes.CDLL(None).dlopen
            dlopen.restype = ctypes.c_void_p
            dlopen(bytes(library), _RTLD_LAZY)
