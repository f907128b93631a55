"""The library of `handlers/cpp/handlers.cc`, compiled by the line of docs/handlers.md, once in a process."""

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "handlers" / "cpp" / "handlers.cc"


@functools.cache
def cpp_library() -> bytes:
    """The bytes of the library; skips the test where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("handlers in C++ are compiled with g++, which is not here")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libhandlers.so")
        command = "g++ -O0 -shared -fPIC {} -o {} $({} -m torchere.handlers.cpp)"
        line = command.format(SOURCE, library, sys.executable)
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")  # no warning either
        return library.read_bytes()
