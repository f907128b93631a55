"""Read the directory of a `.pt2` package, and extract its compiled library to a file."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from torchere.archiver.container.zip import DAMAGED

# Layout: torch/export/pt2_archive/constants.py. Every name is prefixed with the package's own folder.
_COMPILED_FOLDER = "/data/aotinductor/model/"  # "model" is the name that aoti_compile_and_package gives
_WEIGHTS_FOLDER = "/data/weights/"
_PROGRAMS = ("/models/model.json", "serialized_exported_program.json")
_SELF_CONTAINED = (".so", ".cpp", "_metadata.json", "_compile_flags.json", "_linker_flags.json")
_LEAST_TWO = re.compile(rb"_size\[\d+\] < 2\b")  # torch/_inductor/codegen/cpp_wrapper_cpu.py
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Package:
    """One `.pt2` file.

    `library` is the zip entry with the machine code, if there is one and it needs nothing else of the
    package: no weights in separate files, no operators outside of torch. `checkable`: the code can check its
    inputs without refusing a free dimension of 1, which the checks that torch generates by default refuse.
    `metadata` holds the compiler's notes (torch 2.7 on): AOTI_DEVICE_KEY, AOTI_CPU_ISA, AOTI_MACHINE, ...
    """

    path: str
    is_program: bool  # an exported program, which torch interprets, and no compiled code
    library: str | None = None
    checkable: bool = False
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The kind of device the code was compiled for; "unknown" in old packages, which may be for any."""
        return self.metadata.get("AOTI_DEVICE_KEY", "unknown")


def read_package(path: str) -> Package:
    """Read the directory of a package.

    Raises:
        RuntimeError: it is not a zip file, or it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
            compiled = [name for name in names if _COMPILED_FOLDER in name]
            if not compiled:
                return Package(path, is_program=any(name.endswith(_PROGRAMS) for name in names))
            libraries = [name for name in compiled if name.endswith(".so")]
            whole = all(name.endswith(_SELF_CONTAINED) for name in compiled)
            beside = any(_WEIGHTS_FOLDER in name for name in names)
            only = libraries[0] if len(libraries) == 1 and whole and not beside else None
            metadata = _metadata(file, compiled)
            return Package(path, False, only, _takes_one(file, compiled), metadata)
    except (*DAMAGED, ValueError) as err:
        raise RuntimeError(
            f"{path} is not a .pt2 package ({err}); expected what torch._inductor.aoti_compile_and_package "
            "or torch.export.save writes"
        ) from err


def _metadata(file: zipfile.ZipFile, names: list[str]) -> dict[str, str]:
    for name in names:
        if name.endswith("wrapper_metadata.json"):
            found = json.loads(file.read(name))
            return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
    return {}


def _takes_one(file: zipfile.ZipFile, names: list[str]) -> bool:
    """Return whether the package holds its source, and no check there requires a dimension of 2 or more."""
    sources = [name for name in names if name.endswith("wrapper.cpp")]
    return bool(sources) and not any(_LEAST_TWO.search(file.read(name)) for name in sources)


def extracted_library(package: Package, folder: Path) -> Path:
    """Return the library of a package as a file in `folder`; extract it only if it is missing.

    Several processes may call this for the same library at the same time. The file is named by its content,
    so a second executor maps the same pages as the first.

    Raises:
        OSError: the folder can't be written.
        RuntimeError: the package is damaged.
    """
    if package.library is None:
        raise ValueError(f"{package.path} has no library of its own")
    with zipfile.ZipFile(package.path) as file:
        entry = file.getinfo(package.library)
        target = folder / f"{entry.CRC:08x}-{entry.file_size}.so"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as out, file.open(entry) as source:
                shutil.copyfileobj(source, out, _COPY_BYTES)
            os.replace(part, target)
        except DAMAGED as err:
            Path(part).unlink()
            raise RuntimeError(f"{package.path} is damaged: {err}") from err
        except BaseException:  # also on cancellation
            Path(part).unlink(missing_ok=True)
            raise
    return target
