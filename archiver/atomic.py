"""Atomic writes: output goes to a hidden sibling of the target, which is renamed when it is complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = re.compile(r"\.torchere-[0-9a-f]{16}\.part")


def is_unfinished(name: str) -> bool:
    """Return whether a file name is that of a hidden sibling, used by another run or left by a killed one."""
    return _UNFINISHED.fullmatch(name) is not None


@contextmanager
def staged(target: Path, *, merge: bool = False) -> Iterator[Path]:
    """Yield a new path beside `target`, on the same file system, to write a file or directory to.

    When the block ends without an error, the path is renamed to `target` and replaces an existing file. When
    the block raises, everything written is removed and `target` is unchanged. With `merge`, an existing
    directory receives the new one's files and keeps its others. Files are moved one by one, so a failure
    half-way leaves a mix of old and new files.

    Raises:
        OSError: the block wrote nothing, the path can't be renamed, or (without `merge`) `target` is a
            directory that is not empty.
    """
    work = target.with_name(f".torchere-{os.urandom(8).hex()}.part")  # of the same length for every target
    try:
        yield work
        if merge and target.is_dir():
            _merge(work, target)
        else:
            os.replace(work, target)
    finally:
        _remove(work)


def _merge(work: Path, target: Path) -> None:
    """Move each file of a directory tree to the same relative path in another one."""
    for file in sorted(path for path in work.rglob("*") if path.is_file()):
        place = target / file.relative_to(work)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
