"""Says which file that was asked for is not there, in one line, before anything is read or built.

`write_archive` finds the same later, in the words of TorchServe's archiver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from torchere.archiver.building import BuildOptions
from torchere.archiver.errors import PackingError
from torchere.archiver.request import BUILT_IN_HANDLERS, ArchiveRequest


def check_inputs(request: ArchiveRequest) -> None:
    """Look for every file that `request` names, but what a glob pattern would match.

    Raises:
        PackingError: one does not exist; the text names its flag, what was expected, and what to do.
    """
    handler = request.handler_file()
    if handler is not None and _is_missing(handler):
        raise PackingError(f"--handler {request.handler}: {_about_handler(request, handler)}")
    for flag, path in _named(request):
        if _is_missing(path):
            raise PackingError(f"{flag} {path}: no such file{_place(path)}; check the path")
    for given in request.extra_files:
        path = Path(str(given).strip())
        if _is_missing(path) and not has_magic(str(path)):
            raise PackingError(
                f"--extra-files {path}: no such file or folder{_place(path)}; check the path (a comma begins "
                "the next one)"
            )


def check_examples(options: BuildOptions) -> None:
    """Look for the files that a model is run on.

    Raises:
        PackingError: as `check_inputs`.
    """
    for flag, path in (("--example", options.example), ("--samples", options.samples)):
        if path is not None and _is_missing(path):
            raise PackingError(f"{flag} {path}: no such file or folder{_place(path)}; check the path")


def _named(request: ArchiveRequest) -> Iterator[tuple[str, Path]]:
    files = {
        "--serialized-file": request.serialized_file,
        "--model-file": request.model_file,
        "--requirements-file": request.requirements_file,
        "--config-file": request.config_file,
    }
    return ((flag, Path(file)) for flag, file in files.items() if file)


def _about_handler(request: ArchiveRequest, file: Path) -> str:
    found = f"there is no file {file}{_place(file)}"
    if request.runtime == "LSP":
        return f"{found}; give the path of a shared library"
    return (
        f"{found}, and no built-in handler of that name; expected one of {', '.join(BUILT_IN_HANDLERS)}, or "
        "a Python file: check the spelling or the path"
    )


def _is_missing(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # it may be there; reading it will tell
    return False


def _place(path: Path) -> str:
    return "" if path.is_absolute() else f" in {Path.cwd()}"
