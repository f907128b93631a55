"""Handlers in C++ (archives of runtime LSP): the headers to compile them with, and their Python side.

The headers in `include/` have the paths and names of TorchServe's C++ backend, so that handlers written for
it compile unchanged. They add a C interface to a handler's library, through which `handler.py` calls it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

INCLUDE = Path(__file__).parent / "include"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
AGAIN = "compile it again: g++ -shared -fPIC HANDLER.cc -o {} $(python -m torchere.handlers.cpp)"

_STAMP = re.compile(rb"torchere handler, interface (\d+), torch (\d+\.\d+)")
_FUNCTION = re.compile(rb"\b(allocator|deleter)([A-Za-z]\w*)\0")
_INTERFACE = b"1"


class CppHandlerName(NamedTuple):
    """A handler of a manifest that is a class in a shared library."""

    file: str  # in the archive's folder
    class_name: str


def cpp_handler_name(handler: str, runtime: str) -> CppHandlerName | None:
    """Return the library and the class that a manifest's handler names; None if it is not in C++.

    As in TorchServe's C++ backend, `libmy_handler:MyHandler` is the class `MyHandler` in `libmy_handler.so`.
    """
    library, colon, class_name = handler.partition(":")
    if runtime != "LSP" or not colon:
        return None
    return CppHandlerName(library.rpartition("/")[2].removesuffix(SUFFIX) + SUFFIX, class_name)


def compile_flags() -> Sequence[str]:
    """Return the compiler's arguments that follow the source file: headers, torch's ABI and libraries."""
    import torch  # noqa: PLC0415  # takes a second, and the server imports this module

    home = Path(torch.__file__).parent
    includes = (home / "include", home / "include/torch/csrc/api/include")
    return (
        "-std=c++17",
        "-DFMT_HEADER_ONLY",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{INCLUDE}",
        *(f"-isystem{folder}" for folder in includes),  # suppresses warnings in torch's headers
        f"-L{home / 'lib'}",
        *("-ltorch", "-ltorch_cpu", "-lc10"),
    )


def problem_of(library: bytes, name: CppHandlerName, torch_version: str) -> str:
    """Return why a worker with this torch can't load a library, and the remedy; "": no reason is known.

    `library` is the content of the file, none of which is run.
    """
    stamp = _STAMP.search(library)
    again = AGAIN.format(name.file)
    if stamp is None:
        return f"{name.file} was compiled for TorchServe's C++ backend, without torchere's headers; {again}"
    if stamp[1] != _INTERFACE:
        return f"{name.file} was compiled with the headers of another release of torchere; {again}"
    if (found := stamp[2].decode()) != ".".join(torch_version.split(".")[:2]):
        return f"{name.file} was compiled with torch {found}, and here is torch {torch_version}; {again}"
    functions = _FUNCTION.findall(library)
    classes = {each for kind, each in functions if kind == b"allocator" and (b"deleter", each) in functions}
    if name.class_name.encode() not in classes:
        has = ", ".join(sorted(each.decode() for each in classes)) or "none"
        return (
            f"{name.file} exports no allocator{name.class_name}() and deleter{name.class_name}(), the "
            f"functions of the class that the manifest names; classes that have them: {has}"
        )
    return ""
