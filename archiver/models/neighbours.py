"""The Python files beside a model file that it imports: what a server needs to import it, too."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path, PurePosixPath


def neighbours_of(model_file: Path) -> Mapping[PurePosixPath, Path]:
    """The source files that were imported from the model file's folder, by their relative names.

    To be asked after the model file was imported. A module counts when its name is its path in that folder,
    so that what is installed below it (a virtual environment) does not; nor does anything for a file that
    lies among installed packages itself, because those are the server's.
    """
    folder = model_file.resolve().parent
    if any(folder == Path(place).resolve() for place in sysconfig.get_paths().values()):
        return {}
    found = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(*name.split("."))
        for relative in (path.with_suffix(".py"), path / "__init__.py"):
            if file == str(folder / relative) and (folder / relative).is_file():
                found[PurePosixPath(relative.as_posix())] = folder / relative
    return found


def take_along(model_file: Path, beside: Path) -> None:
    """Copy the neighbours to the folder `beside`, under their relative names, for the archive."""
    for relative, file in neighbours_of(model_file).items():
        target = beside / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
