"""Detects TorchScript that would read or write files, from the source in it; nothing is loaded.

TorchScript's interpreter runs no Python, but its operators can write tensors to any file and map any file,
and `__setstate__` runs while a module is loaded. The source in the file names its operators:
`torch.save(...)`, `ops.image.write_file(...)`. The source can also rename `torch` and `ops` (`t = torch`), or
look operators up by text (`getattr(torch, "sa" "ve")`); torch never writes either, and both are refused.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from torchere.archiver.scan import UnsafeModel, checked_zip

FILE_OPERATORS = frozenset({"save", "load", "from_file", "read_file", "write_file"})
_MAX_SOURCE_BYTES = 2**28  # limit for one source file
# A source without any of these, as nearly all are, need not be split into tokens.
_SUSPECT = re.compile(
    rb"\b(?:save|from_file|read_file|write_file|load)\b|\btorch\b(?!\.\w)|\bops\b(?!\.\w+\.\w)"
)
# torch writes strings in double quotes, on one line; any other quote becomes its own token, and is refused.
_TOKEN = re.compile(r'#[^\n]*|\\\n|"""|"(?:\\.|[^"\\\n])*"|\w+|\n|[^\s\w]')
_STRANGE_QUOTES = ('"""', '"', "'")


def check_script(file: BinaryIO, size: int) -> None:
    """Raise UnsafeModel when the code of a TorchScript file calls an operator that reads or writes files.

    Args:
        file: the whole file, which must be a zip as torch.jit.save writes it. torch would also read a zip
            that follows other bytes, and a flatbuffer, whose code is not text.
        size: its size in bytes.
    """
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise UnsafeModel("it is no zip as torch.jit.save writes it")
    with checked_zip(file, size) as archive:
        for info in archive.infolist():
            if info.filename.lower().endswith(".py"):  # torch looks names up without regard to case
                _check_source(info.filename.partition("/")[2], _source(archive, info))


def _source(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > _MAX_SOURCE_BYTES:
        raise UnsafeModel(f"{info.filename} is larger than {_MAX_SOURCE_BYTES} bytes")
    return archive.read(info)


def _check_source(name: str, source: bytes) -> None:
    if _SUSPECT.search(source) and (found := _file_operator(source.decode())):
        raise UnsafeModel(f"{found} in {ascii(name)[1:-1][:80]}")


def _file_operator(source: str) -> str | None:
    """Return the first file operator in the source, or the first construct that hides one; None: neither."""
    tokens = ["\n", *_tokens(source), "\n", "\n", "\n", "\n"]
    for at, token in enumerate(tokens):
        if token in _STRANGE_QUOTES:
            return "text in quotes that torch does not write"
        if token not in ("torch", "ops") or tokens[at - 1] == ".":
            continue
        if tokens[at + 1] == ":" and tokens[at - 1] == "\n":  # the type of an attribute that has this name
            continue
        path = tokens[at : at + 4 : 2] if token == "torch" else tokens[at : at + 6 : 2]
        dots = tokens[at + 1 : at + 2 * len(path) - 1 : 2]
        if any(dot != "." for dot in dots):
            return f"{token} itself as a value"
        if path[-1] in FILE_OPERATORS:
            return ".".join(path)
    return None


def _tokens(source: str) -> Iterator[str]:
    """Yield names, signs, strings and line ends; comments, and line ends inside brackets, are left out."""
    depth = 0
    for match in _TOKEN.finditer(source):
        token = match[0]
        depth += (token in "([{") - (token in ")]}")
        if token[0] in "#\\" or (token == "\n" and depth > 0):
            continue
        yield token
