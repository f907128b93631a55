"""From a request to the list of files that go into the archive, each under its entry name."""

from __future__ import annotations

import filecmp
import glob
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchere.archiver.errors import PackingError
from torchere.archiver.names import MANIFEST_NAME, first_clash, problem_with
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.staging import is_unfinished

_log = logging.getLogger("torchere.archiver")
_LEFT_OUT_DIRECTORIES = frozenset({"__MACOSX", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Input:
    """One file on disk and the name it gets in the archive."""

    name: str
    path: Path


def gather(request: ArchiveRequest) -> list[Input]:
    """List the files of `request`, sorted by entry name, links followed.

    Files are flattened to the archive's root by base name; below a directory in `extra_files` the structure
    is kept, without hidden directories, `__pycache__` and `__MACOSX`. An existing output is never an input,
    unless it is itself the directory that is given; what another run has begun to write is none either.

    Raises:
        FileNotFoundError: A file that was asked for does not exist.
        PackingError: Two different files want one name, or a name or file type can't be packed.
    """
    chosen: dict[str, Input] = {}
    made = list(_below(Path(request.made), request.target)) if request.made else []
    left_out = request.leave_out | {item.name for item in made}
    extra = (item for item in _extra_files(request) if item.name not in left_out)
    for item in (*_named_files(request), *made, *extra):
        if _is_output(item.path, request.target):
            continue
        if item.name == MANIFEST_NAME:
            _log.warning("Leaving out %s: the archiver writes a manifest of its own", item.path)
            continue
        _check(item)
        _check_agreement(chosen.setdefault(item.name, item), item)
    if clash := first_clash(sorted(chosen)):
        raise PackingError(
            f"{chosen[clash[0]].path} and {chosen[clash[1]].path} would be one file on some systems; "
            "rename one"
        )
    return [chosen[name] for name in sorted(chosen)]


def _named_files(request: ArchiveRequest) -> Iterator[Input]:
    files = (
        request.model_file,
        request.serialized_file,
        request.handler_file(),
        request.requirements_file,
        request.config_file,
    )
    for path in [Path(file) for file in files if file]:
        os.stat(path)  # raises the FileNotFoundError that names it
        yield Input(path.name, path)


def _extra_files(request: ArchiveRequest) -> Iterator[Input]:
    for given in request.extra_files:
        pattern = str(given).strip()
        if os.path.exists(pattern):
            yield from _below(Path(pattern), request.target)
        elif glob.has_magic(pattern):
            yield from _matching(pattern, request.target)
        else:
            raise FileNotFoundError(f"File does not exist: {given}")


def _matching(pattern: str, output: Path) -> Iterator[Input]:
    matches = sorted(glob.glob(pattern))
    if not matches:
        _log.warning("Given wildcard pattern did not match any file: %s", pattern)
    for match in matches:
        yield from _below(Path(match), output)


def _below(path: Path, output: Path) -> Iterator[Input]:
    """The file itself, or the files in the directory under their paths relative to it."""
    if not path.is_dir():
        yield Input(path.name, path)
        return
    # With each, the directories on disk that it lies in, so that a link back up ends the walk.
    folders: list[tuple[Path, frozenset[tuple[int, int]]]] = [(path, frozenset())]
    while folders:
        folder, above = folders.pop()
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            continue
        for file in folder.iterdir():
            if not file.is_dir():
                yield Input(file.relative_to(path).as_posix(), file)
            elif _is_wanted(file.name) and not _is_output(file, output):
                folders.append((file, above | {here}))


def _is_wanted(directory: str) -> bool:
    return directory not in _LEFT_OUT_DIRECTORIES and not directory.startswith(".")


def _is_output(path: Path, target: Path) -> bool:
    return is_unfinished(path.name) or (target.exists() and path.exists() and os.path.samefile(path, target))


def _check(item: Input) -> None:
    if problem := problem_with(item.name):
        raise PackingError(f"{item.path} can't be packed: {problem}; rename it")
    if item.path.is_symlink() and not item.path.exists():
        raise PackingError(
            f"{item.path} is a link to {os.readlink(item.path)}, which does not exist; remove it"
        )
    if not stat.S_ISREG(os.stat(item.path).st_mode):
        raise PackingError(f"{item.path} is not a regular file; leave it out")


def _check_agreement(first: Input, second: Input) -> None:
    if first is not second and not filecmp.cmp(first.path, second.path, shallow=False):
        raise PackingError(
            f"{first.path} and {second.path} differ, and both would be {first.name!r} in the archive; "
            "rename one"
        )
