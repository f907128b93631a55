"""Lists the names that a pickle would import, by reading its opcodes; nothing is unpickled.

A pickle can call anything that it imports. One that imports only the names that tensors are rebuilt from is a
container of numbers; any other name in it is code that runs when the file is read.

This is for reports. The loaders use torch's weights-only unpickler, which allows the same names.
"""

from __future__ import annotations

import io
import pickletools
import re
import tarfile
import zipfile
from typing import BinaryIO

from torchere.archiver.container.zip import DAMAGED, DEFLATED, STORED, check_zip
from torchere.archiver.errors import ArchiveError

MAX_PICKLE_BYTES = 64 * 2**20  # the numbers lie beside the pickle, so even large models stay far below
UNKNOWN = "a name that can't be told"
_PICKLES_IN_OLD_FORMAT = 5
_DEPTH = 2  # a .pt2 holds .pt files, which hold a pickle; deeper nesting is not in use

# torch/_weights_only_unpickler.py allows these names, but not their attributes.
_PLAIN_NAMES = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
        "__builtin__.bytearray",
        "__builtin__.set",
        "__builtin__.complex",
        "torch._tensor._rebuild_from_type_v2",
    }
)
_TENSOR_NAME = re.compile(
    r"torch\._utils\._rebuild_(parameter|parameter_with_state|(|q|sparse_|nested_)tensor(_v[23])?|"
    r"meta_tensor_no_storage|device_tensor_from_(numpy|cpu_tensor))"
    r"|torch\.(storage\.|cuda\.)?[A-Za-z0-9]+Storage"
    r"|torch\.(bool|half|float|double|short|int|long|((b?float|q?u?int|complex|bits)[0-9][a-z0-9_]*))"
)
_TEXT_OPCODES = frozenset(
    {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING"}
)
_SILENT_OPCODES = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "FRAME", "PROTO"})


def foreign_names_in(file: BinaryIO, size: int, also: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the sorted names that the pickles of a `.pt`, `.pt2` or bare pickle import beyond tensors.

    Args:
        file: the whole file, read from its start.
        size: its size in bytes.
        also: base names of further entries that are pickles, with any suffix.
    """
    file.seek(0)
    if file.read(2) != b"PK":
        file.seek(0)
        return _foreign(imported_names(file.read(min(size, MAX_PICKLE_BYTES))))
    found: set[str] = set()
    try:
        _collect(file, found, _DEPTH, also)
    except (ArchiveError, *DAMAGED, RuntimeError, ValueError):
        found.add(UNKNOWN)
    return tuple(sorted(found))


def is_pickle(file: BinaryIO) -> bool:
    """Return whether a file begins with a complete pickle, of any protocol."""
    file.seek(0)
    try:
        return sum(1 for _ in pickletools.genops(file.read(MAX_PICKLE_BYTES))) > 1  # STOP alone is none
    except ValueError:  # UnicodeDecodeError is one
        return False


def imported_names(data: bytes) -> list[str]:
    """Return every `module.name` that unpickling imports; `UNKNOWN` for a name that opcodes do not show.

    A file in torch's old format has five pickles in a row, followed by raw numbers.
    """
    names: list[str] = []
    stream = io.BytesIO(data)
    for _ in range(_PICKLES_IN_OLD_FORMAT):
        if stream.tell() == len(data):
            break
        try:
            names += _Walk(data).names(stream)
        except (ValueError, IndexError):  # UnicodeDecodeError is a ValueError
            names.append(UNKNOWN)
            break
    return names


class _Walk:
    """State of reading one pickle: the last texts on the stack, the memo, and the imported names."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._memo: dict[int, str | None] = {}
        self._recent: list[str | None] = []
        self._names: list[str] = []

    def names(self, stream: io.BytesIO) -> list[str]:
        for opcode, argument, at in pickletools.genops(stream):
            if opcode.name in ("GLOBAL", "INST"):
                self._names.append(self._global(at or 0))
                self._recent.append(None)
            else:
                self._take(opcode.name, argument)
        return self._names

    def _global(self, at: int) -> str:
        """Return `module.name` of two lines as the unpickler reads them; pickletools interprets escapes."""
        middle = self._data.index(b"\n", at)
        module, name = (
            self._data[at + 1 : middle],
            self._data[middle + 1 : self._data.index(b"\n", middle + 1)],
        )
        return f"{module.decode()}.{name.decode()}"

    def _take(self, name: str, argument: object) -> None:
        if name in _TEXT_OPCODES:
            self._recent.append(str(argument))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._recent.append(self._memo.get(int(str(argument))))
        elif name in _SILENT_OPCODES:
            self._remember(name, argument)
        elif name == "STACK_GLOBAL":
            texts = self._recent[-2:]
            known = len(texts) == 2 and None not in texts
            self._names.append(".".join(str(text) for text in texts) if known else UNKNOWN)
            self._recent.append(None)
        elif name.startswith("EXT"):
            self._names.append(UNKNOWN)  # from the registry of copyreg, by number
        else:
            self._recent.append(None)

    def _remember(self, name: str, argument: object) -> None:
        top = self._recent[-1] if self._recent else None
        if name == "MEMOIZE":
            self._memo[len(self._memo)] = top
        elif name.endswith("PUT"):
            self._memo[int(str(argument))] = top


def _collect(file: BinaryIO, found: set[str], depth: int, also: frozenset[str]) -> None:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            base = info.filename.lower().rpartition("/")[2]
            if depth < _DEPTH and base == "constants.pkl":
                found.add("TorchScript")  # torch.load passes it to torch.jit.load
            if not base.endswith((".pkl", ".pt")) and base not in also:
                continue
            # torch reads no other methods than these two.
            if info.file_size > MAX_PICKLE_BYTES or info.compress_type not in (STORED, DEFLATED):
                found.add(UNKNOWN)
                continue
            found.update(_inner(archive.read(info), depth, also))


def _inner(data: bytes, depth: int, also: frozenset[str]) -> set[str]:
    """Return the foreign names of a pickle, or of a zip with pickles, told apart as by torch.load."""
    found: set[str] = set()
    if data.startswith(b"PK\3\4") and depth:
        check_zip(io.BytesIO(data), len(data))  # so that torch finds the same pickles in it
        _collect(io.BytesIO(data), found, depth - 1, also)
    elif tarfile.is_tarfile(io.BytesIO(data)):
        found.add(UNKNOWN)
    else:
        found.update(_foreign(imported_names(data)))
    return found


def is_plain(name: str) -> bool:
    """Return whether `module.name` is one of the names that tensors are rebuilt from."""
    return name in _PLAIN_NAMES or _TENSOR_NAME.fullmatch(name) is not None


def _foreign(names: list[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in names if not is_plain(name)}))
