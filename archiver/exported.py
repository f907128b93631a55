"""Checks an exported program (`.pt2`) for anything that would run code while it is loaded; loads nothing.

torch's loader trusts the file: it compiles and loads native code that lies beside the program, takes all that
lies in one folder for programs, evaluates expressions of sizes, executes guards as Python, looks operators up
by any dotted path below `torch`, and unpickles examples. A file from `torch.export.save` uses a small part of
that, and this module accepts that part and nothing else (torch/export/pt2_archive/_package.py,
torch/_export/serde/serialize.py).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from torchere.archiver.errors import ArchiveError
from torchere.archiver.exported_graph import UnsafeProgram, check_graph
from torchere.archiver.pickles import foreign_names_in
from torchere.archiver.zipcontainer import DAMAGED, check_zip

__all__ = ["INT8_OPERATORS", "UnsafeProgram", "check_program"]

# Registers the operators of quantised programs (torchao's PT2E); without it torch can't load them.
INT8_OPERATORS = "torch.ao.quantization.fx._decomposed"
_OLD_PROGRAM = "serialized_exported_program.json"
_OLD_PICKLES = re.compile(r"serialized_(state_dict|constants)\.(pt|json)|serialized_example_inputs\.pt")
_MAX_JSON_BYTES = 2**28
_PROGRAM = "models/model.json"
_PAYLOADS = re.compile(r"data/(weights|constants)/\w+_config\.json", re.ASCII)
# Everything that torch.export.save writes, below the file's own folder. What lies in extra/ is text for who
# asks for it; in data/weights and data/constants are numbers, and pickles that `foreign_names_in` looks at.
_RECORD = re.compile(
    r"archive_format|archive_version|version|byteorder|\.data/(version|serialization_id)"
    rf"|{re.escape(_PROGRAM)}|data/sample_inputs/model\.pt|extra/.+"
    r"|data/(weights|constants)/(model\.pt|model_\w+_config\.json|(weight|tensor|custom_obj|opaque_obj)_\d+)",
    re.ASCII,
)


def check_program(file: BinaryIO, size: int, allow_pickle: bool = False) -> None:
    """Raise when loading the `.pt2` in `file` with `torch.export.load` could run code of its own.

    Args:
        file: the whole package.
        size: its bytes.
        allow_pickle: let pickles in it be.

    Raises:
        UnsafeProgram: it could, or it is damaged or no exported program.
    """
    file.seek(0)
    try:
        check_zip(file, size)  # torch and Python have readers of their own: both must see the same
        with zipfile.ZipFile(file) as archive:
            pickled = _check_records(archive)
    except ArchiveError as error:
        raise UnsafeProgram(f"the file is damaged: {error.reason}") from error
    except DAMAGED as error:
        raise UnsafeProgram(f"the file is damaged: {error}") from error
    if not allow_pickle and (names := foreign_names_in(file, size, pickled)):
        raise UnsafeProgram(f"its pickle imports {', '.join(names[:3])}")


def _check_records(archive: zipfile.ZipFile) -> frozenset[str]:
    """Check every record of the package; returns the base names of those that are unpickled."""
    names = [info.orig_filename for info in archive.infolist()]
    if _OLD_PROGRAM in names:  # what torch before 2.7 wrote
        _refuse_others([name for name in names if name != _OLD_PROGRAM and not _is_old_record(name)])
        check_graph(_json(archive, _OLD_PROGRAM))
        return frozenset(name for name in names if _OLD_PICKLES.fullmatch(name))
    roots = {name.partition("/")[0] for name in names}
    _refuse_others([name for name in names if not _RECORD.fullmatch(name.partition("/")[2])])
    if len(roots) != 1 or f"{min(roots)}/{_PROGRAM}" not in names:
        raise UnsafeProgram(f"it holds no exported program ({_PROGRAM})")
    check_graph(_json(archive, f"{min(roots)}/{_PROGRAM}"))
    return frozenset(_pickled_records(archive))


def _is_old_record(name: str) -> bool:
    return name == "version" or _OLD_PICKLES.fullmatch(name) is not None


def _refuse_others(names: list[str]) -> None:
    if names:
        raise UnsafeProgram(f"it holds {ascii(names[0])[1:-1][:80]}, which torch.export.save does not write")


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    if archive.getinfo(name).file_size > _MAX_JSON_BYTES:
        raise UnsafeProgram(f"{name} is larger than {_MAX_JSON_BYTES} bytes")
    try:
        return json.loads(archive.read(name).decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise UnsafeProgram(f"its program is not valid JSON: {error}") from error


def _pickled_records(archive: zipfile.ZipFile) -> Iterator[str]:
    """Files of weights and constants that are unpickled by Python."""
    for name in archive.namelist():
        found = _PAYLOADS.fullmatch(name.partition("/")[2])
        if found is not None:
            yield from _pickled_payloads(_json(archive, name), found[1])


def _pickled_payloads(config: Any, kind: str) -> Iterator[str]:
    payloads = config.get("config") if isinstance(config, dict) else None
    for payload in payloads.values() if isinstance(payloads, dict) else ():
        if not isinstance(payload, dict):
            raise UnsafeProgram(f"its list of weights has {ascii(payload)[:80]}; expected objects")
        path = str(payload.get("path_name")).lower()
        by_torchscript = kind == "constants" and path.startswith("custom_obj_")
        if path.startswith("opaque_obj") or (payload.get("use_pickle") and not by_torchscript):
            yield path.rpartition("/")[2]
